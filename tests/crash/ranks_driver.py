"""
Starts over several ranks, one of which is killed by a signal where it waits: all states of a plan side by side.

    ranks_driver.py RUNS PLAN SIZE VICTIM WAY STATE...

For each state SIZE ranks are forked, as a launcher would start them, with devices of different sizes. The victim stops
in that state and prints ``<state> victim <pid>``; ways are ``meeting`` (the others go on until all meet) and ``busy``
(each of the others stops in the same state, and never comes out of it by itself). When a rank ends, it is printed:
``<state> <rank> ended <exit code> <seconds since the epoch>``. Without a victim (-1) all are to become ready.
"""

from __future__ import annotations

import gc
import os
import random
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Loaded here once, and not by every child.
import torch.distributed

import startup_fsm.launch
import startup_fsm.reports.views
import startup_fsm.verbs.starting
from startup_fsm import cli
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.engine import Step
from startup_fsm.engines.counting import CountingEngine
from startup_fsm.memory import GIB
from startup_fsm.plan import Plan, eager, single_capture, throwaway

LOADED = (torch.distributed, startup_fsm.launch, startup_fsm.reports.views, startup_fsm.verbs.starting)
PLANS: dict[str, Plan] = {
    "throwaway": throwaway(retries=1, allow_eager=True, fewer_sizes=1),
    "single_capture": single_capture(retries=1, allow_eager=True, fewer_sizes=1),
    "eager": eager(retries=1),
}
#: The way to a state beside the straight one: the state in which one rank fails once, and by what.
DETOURS = {
    ("throwaway", "recover_allocator"): ("capture_throwaway", "capture"),
    ("single_capture", "recover_allocator"): ("capture_graphs", "capture"),
    ("single_capture", "teardown"): ("commit_kv", "oom"),
    ("single_capture", "bootstrap_kv"): ("reserve_kv", "unsupported"),
    ("single_capture", "capture_throwaway"): ("reserve_kv", "unsupported"),
    ("single_capture", "allocate_kv"): ("reserve_kv", "unsupported"),
    ("eager", "teardown"): ("allocate_kv", "oom"),
}


class WaitingDevice(SimulatedDevice):
    """Holds the body of one state up for ever."""

    wanted = ""
    state = ""
    said = ""

    def label(self, text: str) -> None:
        self.state = text.partition("=")[2].partition(" ")[0]

    @contextmanager
    def scope(self) -> Iterator[None]:
        if self.state == self.wanted:
            if self.said:
                os.write(1, self.said.encode())
            while True:
                time.sleep(0.05)
        yield


class StumblingEngine(CountingEngine):
    """Fails once, in the state it is told to."""

    stumble: tuple[str, str] = ("", "")

    def capture(self, step: Step, size: int) -> None:
        if self._stumbles(step):
            step.capture(1, self.device.forbid_in_capture)
        super().capture(step, size)

    def allocate_kv(self, step: Step, blocks: int) -> None:
        self._run_out(step)
        super().allocate_kv(step, blocks)

    def commit_kv(self, step: Step, blocks: int) -> None:
        self._run_out(step)

    def _run_out(self, step: Step) -> None:
        if self._stumbles(step):
            if step.state == "reserve_kv":
                text = "this device has no virtual memory management"
                raise NotImplementedError(text)
            self.device.malloc(1 << 50)

    def _stumbles(self, step: Step) -> bool:
        if step.state != self.stumble[0]:
            return False
        self.stumble = ("", "")
        return True


def rank_of(runs: str, plan: str, state: str, rank: int, victim: int, way: str) -> None:
    """One rank, as ``startup-fsm run`` under a launcher."""
    device = WaitingDevice((4 + rank) * GIB)
    engine = StumblingEngine(device=device)
    engine.stumble = DETOURS.get((plan, state), ("", "")) if rank != victim else ("", "")
    if victim >= 0 and (rank == victim or way == "busy"):
        device.wanted = state
        device.said = f"{state} {'victim' if rank == victim else 'busy'} {os.getpid()}\n"

    def factory() -> tuple[StumblingEngine, dict[str, Any]]:
        return engine, {"plan": PLANS[plan], "device": device, "discover": False, "progress": False}

    module = sys.modules["ranks_driver"] = sys.modules[__name__]
    module.factory = factory  # type: ignore[attr-defined]
    code = cli.main(["run", "ranks_driver:factory", "--runs", f"{runs}/{state}"])
    # An interpreter that has loaded torch takes half a second of processor time to end, and here are many of them.
    os._exit(code)


def free_port() -> int:
    """A port that nobody listens at now, and that no connection gets: so many ranks have many."""
    while True:
        try:
            with socket.create_server(("127.0.0.1", random.randrange(10_000, 30_000))) as listener:
                return int(listener.getsockname()[1])
        except OSError:
            continue


def main(runs: str, plan: str, size: str, victim: str, way: str, *states: str) -> None:
    """All ranks of all states; this process waits for each of them."""
    gc.freeze()
    running: dict[int, tuple[str, int]] = {}
    for state in states:
        os.environ["STARTUP_FSM_STORE"] = f"127.0.0.1:{free_port()}"
        os.environ["STARTUP_FSM_RANKS_DEADLINE"] = "60"
        for rank in range(int(size)):
            pid = os.fork()
            if pid == 0:
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": size, "LOCAL_RANK": str(rank)}
                output = os.open(Path(runs) / f"{state}-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(output, 2)
                rank_of(runs, plan, state, rank, int(victim), way)
                os._exit(1)
            running[pid] = state, rank
    while running:
        pid, status = os.wait()
        state, rank = running.pop(pid)
        os.write(1, f"{state} {rank} ended {os.waitstatus_to_exitcode(status)} {time.time()}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
