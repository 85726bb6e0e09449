"""Every fault really happens, where its line says and for any seed, and no journal names it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from startup_fsm.bootstrap import Bootstrap
from startup_fsm.codec import CODEC
from startup_fsm.engines.demonstration import assemble
from startup_fsm.engines.faults import FAULTS
from startup_fsm.fold import RunState, fold

ROOT = Path(__file__).parents[2]

#: Fault to where it fails: state, part, category; None for a start that comes to ready.
FAILS = {
    "graphs-not-reserved": ("capture_graphs", None, "oom"),
    "estimate-short": ("capture_graphs", None, "oom"),
    "kv-held-by-view": ("teardown", None, "check"),
    "pool-reused": ("capture_graphs", None, "pool"),
    "metadata-missing": ("capture_throwaway", None, "raised"),
    "capture-fails": ("capture_throwaway", None, "capture"),
    "neighbour-takes": ("allocate_kv", None, "oom"),
    "neighbour-frees": None,
    "workspace-grows": None,
    "weights-too-big": ("load_weights", None, "oom"),
    "budget-too-small": ("size_kv", None, "budget"),
    "request-too-long": ("size_kv", None, "budget"),
    "sampler-not-profiled": ("verify", "sampler_warmup", "oom"),
}
#: What checks say while it happens; nothing else may be said above a note.
SAID = {
    "kv-held-by-view": "teardown.kv_alive",
    "neighbour-takes": "device.neighbour_grew",
    "neighbour-frees": "device.neighbour_shrank",
    "workspace-grows": "workspace.grew",
}
#: These end the process.
DEADLY = {"stall": "capture_graphs", "killed": "allocate_kv"}
START = """
import sys
from startup_fsm.bootstrap import Bootstrap
from startup_fsm.engines.demonstration import assemble
parts = assemble(fault=sys.argv[1], seed=int(sys.argv[2]))
Bootstrap(plan=parts.plan, device=parts.device, knobs=parts.knobs, hooks=parts.hooks, journal=sys.argv[3]).run(parts.engine)
"""


def run(tmp_path: Path, **given) -> tuple[RunState, BaseException | None]:
    """The history of one start with a journal, and what it raised."""
    parts = assemble(**given)
    boot = Bootstrap(
        plan=parts.plan, device=parts.device, knobs=parts.knobs, hooks=parts.hooks, journal=tmp_path, discover=False
    )
    try:
        boot.run(parts.engine)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        return boot.history, error
    return boot.history, None


def findings(history: RunState) -> list[str]:
    """Codes above a note, in order."""
    return [found.code for _, judged in history.checks for found in judged.findings if found.severity != "note"]


def assert_unnamed(tmp_path: Path, name: str):
    """No file of the run holds the name, however it is spelt."""
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert texts
    for text in texts:
        for spelling in (name, name.replace("-", "_"), name.replace("-", " ")):
            # The kind `state_stalled` is what happened, not what it was called.
            assert spelling not in text.replace("state_stalled", "").replace(".stalled", "")


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", FAILS)
def test_happens_where_it_should(tmp_path: Path, name: str, seed: int):
    """The state, the part and the category are those of the table, and checks say that and nothing else."""
    history, error = run(tmp_path, fault=name, seed=seed)

    assert history.violations == []
    assert history.finished is not None
    failed = [(visit.state, visit.failed.part, visit.failed.category) for visit in history.visits if visit.failed]
    expected = FAILS[name]
    assert failed == ([] if expected is None else [expected])
    assert history.finished[1].end == ("ready" if expected is None else "failed")
    assert (error is None) == (expected is None)
    assert findings(history) == ([SAID[name]] if name in SAID else [])
    assert_unnamed(tmp_path, name)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["graphs-not-reserved", "estimate-short"])
def test_recovers_with_a_smaller_cache(tmp_path: Path, name: str, seed: int):
    """With retries the plan's own edges lead to ready, with a smaller KV cache that leaves what the graphs take."""
    history, error = run(tmp_path, fault=name, seed=seed, retries=2)

    assert error is None
    assert [visit.state for visit in history.visits if visit.failed] == ["capture_graphs"]
    assert [chosen.target for _, chosen in history.recoveries] == ["recover_allocator"]
    assert history.visits_of("recover_allocator")[0].probes["repair"][1].result["proven"] is True
    first, second = (computed.kv_bytes for _, computed in history.budgets)
    assert second < first
    assert findings(history) == []


@pytest.mark.parametrize(
    ("name", "applied"),
    [
        ("graphs-not-reserved", {"graph_estimate": "measure"}),
        ("estimate-short", {"graph_share": 1.0}),
        ("budget-too-small", {"utilization": 0.9}),
        ("request-too-long", {"max_model_len": 2_048}),
        ("request-too-long", {"utilization": 0.99}),
        ("weights-too-big", {"total": 48 << 30, "max_num_seqs": 2}),
    ],
)
def test_what_is_given_wins_over_the_scene(tmp_path: Path, name: str, applied: dict):
    """A setting that cures the fault can be applied on top of it."""
    history, error = run(tmp_path, fault=name, seed=1, **applied)

    assert error is None
    assert findings(history) == []


def test_the_holder_is_named(tmp_path: Path):
    """The probe names the module and the attribute that keep the profiling cache."""
    history, _ = run(tmp_path, fault="kv-held-by-view", seed=4)

    [holder] = history.visits_of("teardown")[0].probes["holders_profiling_kv"][1].result["holders"]
    assert holder["path"] == "startup_fsm.engines.reference.model.Layer.recent_keys"
    assert holder["kind"] == "attribute"


def test_the_request_that_would_fit_is_said(tmp_path: Path):
    """The error has the length that would fit, shorter than what was asked for and not absurdly so."""
    history, error = run(tmp_path, fault="request-too-long", seed=3)

    asked = history.knob("max_model_len")
    assert asked / 4 < error.fits["max_model_len"] < asked


@pytest.mark.parametrize(("name", "state"), DEADLY.items())
def test_the_deadly_ones_leave_a_journal(tmp_path: Path, name: str, state: str):
    """The process dies by SIGKILL with the state open; one that was overdue has its stack in the journal before."""
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", START, name, "2", str(tmp_path)], cwd=ROOT, timeout=60, check=False, capture_output=True
    )

    assert ended.returncode == -signal.SIGKILL
    assert time.monotonic() - began < 30
    [journal] = tmp_path.rglob("*.jsonl")
    history = fold(CODEC.decode(line) for line in journal.read_bytes().splitlines())
    assert history.position == "open"
    assert history.state == state
    if name == "stall":
        [(_, stalled)] = history.stalls
        assert stalled.state == state
        assert any("answer.wait(60)" in line for line in stalled.stack)
    assert_unnamed(tmp_path, name)


def test_every_fault_is_tried():
    """The tests above know every fault, and every fault says in a line what it does."""
    assert {*FAILS, *DEADLY} == set(FAULTS)
    assert all(fault.summary for fault in FAULTS.values())


def test_listing_needs_no_torch():
    """Names and summaries can be had where torch is not installed."""
    code = "import sys, startup_fsm.engines.demonstration as d; assert d.FAULTS; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
