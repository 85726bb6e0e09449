"""Tests on a card. Skipped where there is none; what poisons an allocator or a context runs in a process of its own."""

from __future__ import annotations

import multiprocessing
import runpy
from pathlib import Path
from typing import Any

import pytest

CHILDREN = Path(__file__).parent / "children.py"
PATIENCE_S = 120


def has_cuda() -> bool:
    """Whether torch sees a card."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_runtest_setup(item):
    """Nothing here runs without a card."""
    if not has_cuda():
        pytest.skip("no CUDA device")


@pytest.fixture
def device():
    """The card, with nothing of this test left on it afterwards."""
    from startup_fsm.devices.cuda import CudaDevice

    made = CudaDevice()
    made.settle(clear_workspaces=True)
    yield made
    made.settle(clear_workspaces=True)


def begun(name: str) -> tuple[Any, Any]:
    """A process that runs a function of children.py, and our end of its pipe."""
    context = multiprocessing.get_context("forkserver")
    # Imported once, and forked from there: the device is untouched until a child touches it.
    context.set_forkserver_preload(["torch", "startup_fsm.devices.cuda"])
    ours, theirs = context.Pipe()
    arguments = {"init_globals": {"answer": theirs, "wanted": name}, "run_name": "child"}
    process = context.Process(target=runpy.run_path, args=(str(CHILDREN),), kwargs=arguments)
    process.start()
    theirs.close()
    return process, ours


def ended(process: Any, connection: Any) -> int | None:
    """Wait for the end of such a process; its exit code."""
    connection.close()
    process.join(PATIENCE_S)
    if process.is_alive():
        process.kill()
        process.join()
    code = process.exitcode
    process.close()
    return code


@pytest.fixture
def child():
    """Runs a function of children.py in a process of its own; gives what it returned, and how the process ended."""

    def run(name: str) -> dict[str, Any]:
        process, connection = begun(name)
        found: dict[str, Any] = {}
        try:
            if connection.poll(PATIENCE_S):
                found = connection.recv()
        except EOFError:
            pass
        found["exit_code"] = ended(process, connection)
        return found

    return run


@pytest.fixture
def neighbour():
    """Another process that holds memory on the card, from the call until the end of the test; gives its pid."""
    running = []

    def run() -> int:
        running.append(begun("neighbour"))
        process, connection = running[-1]
        assert connection.poll(PATIENCE_S)
        assert connection.recv() == "held"
        return process.pid

    yield run
    for process, connection in running:
        assert ended(process, connection) == 0


@pytest.fixture
def start(device, tmp_path):
    """Starts an engine in a journal of its own: the engine, the boot, the budget. Nothing of it stays on the card."""
    import torch

    from startup_fsm.bootstrap import Bootstrap
    from startup_fsm.budget import Knobs
    from startup_fsm.memory import GIB
    from tests.gpu.little_engine import LittleEngine

    engines, boots = [], []

    def run(plan, engine=None, **knobs):
        knobs = Knobs(**{"requested_bytes": 8 * GIB, **knobs})
        boots.append(Bootstrap(plan=plan, journal=tmp_path, device=device, knobs=knobs, discover=False, progress=False))
        engines.append(engine or LittleEngine())
        with torch.no_grad():
            budget = boots[-1].run(engines[-1])
        return engines[-1], boots[-1], budget

    yield run
    for engine, boot in zip(engines, boots, strict=True):
        engine.release_graphs()
        vars(engine).clear()
        boot.measurement.pools.clear()
        if boot.measurement.arena is not None:
            boot.measurement.arena.close()
