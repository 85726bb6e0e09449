"""
Starts that are waiting to be killed: one forked process for each state, blocked where the test wants it.

    driver.py RUNS PLAN MOMENT STATE...

A moment is ``begin`` (the body of the state is about to run), ``end`` (it has run, the state is still open) or ``left``
(the state was left, the next was not entered). Each process prints ``<state> <pid> <journal>`` and sleeps for ever. No
torch: a start takes milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
    ("eager", "teardown"): ("allocate_kv", "oom"),
}


class WaitingDevice(SimulatedDevice):
    """Bodies of states run inside ``scope``, so this is where one can be held up, whatever runs in it."""

    def __init__(self, total_bytes: int, arrive: Callable[[str], None]) -> None:
        super().__init__(total_bytes)
        self.arrive = arrive

    @contextmanager
    def scope(self) -> Iterator[None]:
        self.arrive("begin")
        yield
        self.arrive("end")


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
        self.device.malloc(1 << 50)


def reached(plan: str) -> list[str]:
    """Every state of a shipped plan."""
    return [state.name for state in PLANS[plan]().states]


def start(runs: str, plan: str, moment: str, state: str) -> None:
    """One start that never comes back."""
    boot: Bootstrap

    def arrive(where: str) -> None:
        if (where, boot.history.state) == (moment, state):
            os.write(1, f"{state} {os.getpid()} {boot.path}\n".encode())
            while True:
                signal.pause()

    class Between:
        def on_event(self, *, event: object, **future: object) -> None:
            if getattr(event, "kind", "") == "state_left":
                arrive("left")

    device = WaitingDevice(4 * GIB, arrive)
    boot = Bootstrap(plan=ASKED[plan](), journal=runs, device=device, hooks=[Between()], discover=False)
    engine = StumblingEngine(device=device)
    engine.stumble = DETOURS.get((plan, state), ("", ""))
    if not boot.plan.is_free:
        boot.run(engine)
    for name in reached(plan):
        with boot.state(name):
            device.malloc(MIB)


def main(runs: str, plan: str, moment: str, states: list[str]) -> None:
    """One process for each state; this one waits for all of them."""
    pids = []
    for state in states:
        pids.append(os.fork())
        if pids[-1] == 0:
            start(runs, plan, moment, state)
            os._exit(1)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(str(Path(sys.argv[1])), sys.argv[2], sys.argv[3], sys.argv[4:])
