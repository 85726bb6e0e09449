"""
Starts that are waiting to be killed: one forked process for each state, blocked where the test wants it.

    driver.py RUNS PLAN MOMENT WAY STATE...

A moment is ``begin`` (the body of the state is about to run), ``end`` (it has run, the state is still open) or ``left``
(the state was left, the next was not entered). A way is ``embedded`` (a program that makes a ``Bootstrap``) or
``command`` (``startup-fsm run``). Each process prints ``<state> <pid>`` and sleeps for ever. No torch: a start takes
milliseconds.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import startup_fsm.launch  # noqa: F401 - loaded here once, and not by every child
from startup_fsm import cli
from startup_fsm.bootstrap import Bootstrap
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.engine import Step
from startup_fsm.engines.counting import CountingEngine
from startup_fsm.memory import GIB, MIB
from startup_fsm.plan import PLANS, Plan, eager, observed, single_capture, throwaway

#: What a plan must be asked for so that every state of it can be reached.
ASKED: dict[str, Callable[[], Plan]] = {
    "throwaway": lambda: throwaway(retries=1, allow_eager=True),
    "single_capture": lambda: single_capture(retries=1, allow_eager=True),
    "eager": lambda: eager(retries=1),
    "observed": observed,
}

#: The failure that leads to a state beside the straight way: the state that fails first, and by what.
DETOURS = {
    ("throwaway", "recover_allocator"): ("capture_throwaway", "capture"),
    ("single_capture", "recover_allocator"): ("capture_graphs", "capture"),
    ("single_capture", "teardown"): ("commit_kv", "oom"),
    ("single_capture", "bootstrap_kv"): ("reserve_kv", "unsupported"),
    ("single_capture", "capture_throwaway"): ("reserve_kv", "unsupported"),
    ("single_capture", "allocate_kv"): ("reserve_kv", "unsupported"),
    ("eager", "teardown"): ("allocate_kv", "oom"),
}


class Trap:
    """A hook that knows which state is open, and waits for ever where it is told to."""

    def __init__(self, moment: str, state: str) -> None:
        self.wanted = (moment, state)
        self.state = ""

    def before_state(self, *, state: str, **future: object) -> None:
        self.state = state

    def on_event(self, *, event: object, **future: object) -> None:
        if getattr(event, "kind", "") == "state_left":
            self.arrive("left")

    def arrive(self, moment: str) -> None:
        if (moment, self.state) == self.wanted:
            os.write(1, f"{self.state} {os.getpid()}\n".encode())
            while True:
                # Not pause(): a signal that arrives just before it would find nobody awake to handle it.
                time.sleep(0.05)


class WaitingDevice(SimulatedDevice):
    """Bodies of states run inside ``scope``, so this is where one can be held up, whatever runs in it."""

    def __init__(self, total_bytes: int, trap: Trap) -> None:
        super().__init__(total_bytes)
        self.trap = trap

    @contextmanager
    def scope(self) -> Iterator[None]:
        self.trap.arrive("begin")
        yield
        self.trap.arrive("end")


class StumblingEngine(CountingEngine):
    """Fails once, in the state it is told to."""

    stumble: tuple[str, str] = ("", "")

    def capture(self, step: Step, size: int) -> None:
        self._stumble(step, self.device.forbid_in_capture)
        super().capture(step, size)

    def allocate_kv(self, step: Step, blocks: int) -> None:
        self._stumble(step)
        super().allocate_kv(step, blocks)

    def commit_kv(self, step: Step, blocks: int) -> None:
        self._stumble(step)

    def _stumble(self, step: Step, in_capture: Callable[[], None] | None = None) -> None:
        state, how = self.stumble
        if step.state != state:
            return
        self.stumble = ("", "")
        if how == "capture":
            step.capture(1, in_capture or (lambda: None))
        if how == "unsupported":
            text = "this device has no virtual memory management"
            raise NotImplementedError(text)
        self.device.malloc(1 << 50)


def reached(plan: str) -> list[str]:
    """Every state of a shipped plan."""
    return [state.name for state in PLANS[plan]().states]


def prepared(plan: str, moment: str, state: str) -> tuple[StumblingEngine, dict[str, Any]]:
    """An engine that gets to a state, and the options for ``Bootstrap`` that hold it up there."""
    trap = Trap(moment, state)
    device = WaitingDevice(4 * GIB, trap)
    engine = StumblingEngine(device=device)
    engine.stumble = DETOURS.get((plan, state), ("", ""))
    return engine, {"plan": ASKED[plan](), "device": device, "hooks": [trap], "discover": False}


def embedded(runs: str, plan: str, moment: str, state: str) -> None:
    """A program that starts an engine, or, where no plan has an order, goes through the states itself."""
    engine, options = prepared(plan, moment, state)
    boot = Bootstrap(journal=Path(runs) / state, **options)
    if not boot.plan.is_free:
        boot.run(engine)
    for name in reached(plan):
        with boot.state(name):
            engine.device.malloc(MIB)


def command(runs: str, plan: str, moment: str, state: str) -> None:
    """The command, with a factory that makes the same."""
    global factory  # noqa: PLW0603 - it is found by its name in this module
    factory = lambda: prepared(plan, moment, state)  # noqa: E731
    sys.modules["driver"] = sys.modules[__name__]
    sys.exit(cli.main(["run", "driver:factory", "--runs", f"{runs}/{state}"]))


def main(runs: str, plan: str, moment: str, way: str, *states: str) -> None:
    """One process for each state; this one waits for all of them."""
    start = {"embedded": embedded, "command": command}[way]
    # Settling collects garbage; what is there already need not be looked at again by every child.
    gc.freeze()
    pids = []
    for state in states:
        pids.append(os.fork())
        if pids[-1] == 0:
            start(runs, plan, moment, state)
            os._exit(1)
    for pid in pids:
        _, status = os.waitpid(pid, 0)
        os.write(1, f"{states[pids.index(pid)]} ended {os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
