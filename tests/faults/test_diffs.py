"""
Each fault against the same start without it, through the real command line: ``diff`` names the cause first.

The good start has the engine, the device and the sizes of the bad one; what the fault sets wrong is set right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import attrs
import pytest

from startup_fsm.bootstrap import Bootstrap
from startup_fsm.cli import main
from startup_fsm.engines import demonstration, faults
from startup_fsm.engines.faults import FAULTS
from startup_fsm.memory import GIB

#: What is set right, where a fault is a setting and not an engine that does something wrong.
RIGHT: dict[str, dict[str, Any]] = {
    "graphs-not-reserved": {"graph_estimate": "measure"},
    "estimate-short": {"graph_share": 1.0},
    "budget-too-small": {"utilization": 0.9},
    "weights-too-big": {"total": 64 * GIB, "capture_sizes": [1]},
    "request-too-long": {"max_model_len": 1_024},
}

#: The finding that comes first, and what it is tied to: kind and name; None where no number of both ties it to anything.
CAUSES: dict[str, tuple[str, tuple[str, str] | None]] = {
    "graphs-not-reserved": ("graphs.not_reserved", ("setting", "graph_estimate")),
    "estimate-short": ("graphs.estimate_short", ("setting", "graph_share")),
    "kv-held-by-view": ("teardown.kv_alive", None),
    "pool-reused": ("capture.pool_reused", None),
    "metadata-missing": ("state.raised", None),
    "capture-fails": ("capture.failed", None),
    "neighbour-takes": ("device.neighbour_grew", ("device", "other processes")),
    "neighbour-frees": ("device.neighbour_shrank", ("device", "other processes")),
    "workspace-grows": ("workspace.grew", None),
    "weights-too-big": ("weights.exceed_device", ("device", "total_bytes")),
    "budget-too-small": ("budget.negative", ("setting", "gpu_memory_utilization")),
    "request-too-long": ("budget.request_does_not_fit", ("setting", "max_model_len")),
    "sampler-not-profiled": ("profile.incomplete", ("course", "sampler")),
    "stall": ("state.stalled", None),
    "killed": ("run.ended_without_trace", None),
}

#: Faults that end their process.
DEADLY = {"stall", "killed"}


def good(name: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of a fault without the fault."""
    fault = FAULTS[name]

    def scene(chance: Random) -> dict[str, Any]:
        return fault.scene(chance) | RIGHT.get(name, {})

    monkeypatch.setitem(FAULTS, name, attrs.evolve(fault, scene=scene, engine=faults._plain, hooks=faults._no_hooks))  # type: ignore[index]
    parts = demonstration.assemble(fault=name)
    boot = Bootstrap(
        device=parts.device, knobs=parts.knobs, plan=parts.plan, hooks=parts.hooks, journal=runs, discover=False
    )
    boot.run(parts.engine)
    monkeypatch.undo()


def bad(name: str, runs: Path) -> None:
    """The start with its fault."""
    words = ["demo", "--runs", str(runs), "--fault", name]
    if name in DEADLY:
        subprocess.run([sys.executable, "-m", "startup_fsm", *words], env=os.environ, capture_output=True, check=False)
    else:
        main(words)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """What ``diff --json`` says, and its exit code."""
    capsys.readouterr()
    code = main(["diff", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", FAULTS)
def test_diff_names_the_cause_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The bad start is worse in either order, by its own first finding, tied to what was set or done otherwise."""
    good(name, tmp_path / "good", monkeypatch)
    bad(name, tmp_path / "bad")
    finding, tied = CAUSES[name]
    paths = str(tmp_path / "good"), str(tmp_path / "bad")
    code, found = told(capsys, *paths)

    assert (code, found["worse"], found["finding"]["code"]) == (2, "b", finding)
    assert found["why"].startswith(f"{finding} in {found['finding']['state']}: ")
    first = found["ties"][0] if found["ties"] else None
    assert (None if first is None else (first["kind"], first["name"])) == tied
    assert first is None or (first["bytes"] > 0 and first["text"] in found["why"])

    code, found = told(capsys, *reversed(paths))
    assert (code, found["worse"], found["finding"]["code"]) == (0, "a", finding)


def test_every_fault_has_its_cause():
    """The table has each fault."""
    assert set(CAUSES) == set(FAULTS)
