"""The recovery ladder on a card: an estimate that was too small, and a capture after which only a new process helps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from startup_fsm.journal import read_journal
from startup_fsm.memory import GIB, MIB
from startup_fsm.plan import throwaway
from startup_fsm.reading import read_starts
from startup_fsm.testing import verdict_of
from startup_fsm.verdict import EXIT_NOT_READY, EXIT_READY
from tests.gpu.little_engine import SIZES, LittleEngine

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
MAKE = """
import torch
from tests.gpu.little_engine import OwnCaptures
from startup_fsm import Knobs

torch.set_grad_enabled(False)

def make():
    # What went before lets it go on without graphs: then it captures nothing.
    return OwnCaptures(cripples=True), {"knobs": Knobs(requested_bytes=8 << 30), "progress": False}
"""


@pytest.mark.parametrize("knobs", [{"graph_estimate": "none"}, {"graph_share": 0.1}], ids=["none", "a tenth"])
def test_an_estimate_too_small_is_answered_by_a_smaller_kv_cache(start, knobs):
    """The real capture runs out of the memory of the whole card; the same process sizes again, and is ready."""
    engine = LittleEngine(row_bytes=12 * MIB)
    knobs = {"requested_bytes": None, "utilization": 0.985, "retries": 1, **knobs}
    _, boot, budget = start(throwaway(retries=1), engine, **knobs)
    history = boot.history
    first, second = [computed for _, computed in history.budgets]
    (failed,) = [visit for visit in history.visits if visit.failed is not None]
    repair = history.last("recover_allocator").probes["repair"][1].result
    print(f"{first.kv_bytes / GIB:.2f} GiB of KV cache, then {second.kv_bytes / GIB:.2f} GiB; {dict(repair)}")
    assert (failed.state, failed.failed.category) == ("capture_graphs", "oom")
    assert [(each.state, each.edge) for _, each in history.recoveries] == [("capture_graphs", "recover")]
    assert repair["proven"]
    assert second.kv_bytes < first.kv_bytes - 2 * GIB
    assert budget == second
    assert sorted(engine.graphs) == sorted(SIZES)
    assert history.attempts == []
    verdict = verdict_of(boot)
    assert verdict.outcome == "ready"
    assert verdict.figures["used_peak_bytes"] <= verdict.figures["requested_bytes"]


@pytest.fixture
def crippled(tmp_path):
    """A start by the command line whose capture leaves the allocator crippled: its exit code, and what it wrote."""
    (tmp_path / "made.py").write_text(MAKE, encoding="utf-8")

    def run(*options):
        given = {name: value for name, value in os.environ.items() if not name.startswith("STARTUP_FSM_")}
        given["PYTHONPATH"] = os.pathsep.join([str(ROOT), given.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "startup_fsm", "run", "made:make", "--allow-eager", *options]
        ran = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, check=False, timeout=240)
        print(ran.stdout[-2_000:], ran.stderr[-2_000:])
        return ran

    return run


def test_a_crippled_allocator_is_answered_by_a_new_process(tmp_path, crippled):
    """It continues the run as attempt 2, one rung further, and has all of the memory back."""
    ran = crippled("--restart", "1")

    assert ran.returncode == EXIT_READY
    first, second = read_starts(tmp_path / "runs")
    assert (first.run, first.attempt, second.attempt) == (second.run, 1, 2)
    (before,), (after,) = first.processes, second.processes
    repair = before.history.last("recover_allocator").probes["repair"][1]
    print(dict(repair.result))
    assert not repair.result["proven"]
    assert before.history.started.pid == after.history.started.pid
    assert after.history.finished[1].end == "ready"
    assert after.history.last("capture_graphs") is None
    free = [each.history.last("init_device").before.free_bytes for each in (before, after)]
    assert abs(free[0] - free[1]) < 64 * MIB


def test_without_leave_to_restart_it_ends_as_any_failed_start(tmp_path, crippled):
    """Its journal is whole, its exit code is its own, and torch does not abort the process on its way out."""
    ran = crippled()

    assert ran.returncode == EXIT_NOT_READY
    (journal,) = (tmp_path / "runs").glob("*/rank-00000.1.jsonl")
    read = read_journal(journal)
    assert read.problems == ()
    assert [record.event.end for record in read.records if record.kind == "run_finished"] == ["failed"]
