"""
A lease: a device belongs to one start at a time. It is taken before the first state, renewed before every other, and
dropped when the start is over. Whoever dies without dropping it loses it when it runs out.

    python examples/hooks/lease.py
"""

from __future__ import annotations

import sys
import time
from typing import Any

from startup_fsm.errors import HookFailed
from startup_fsm.testing import counting_start, verdict_of


class Server:
    """Stands for the service of your platform that knows who holds which device, and until when."""

    def __init__(self) -> None:
        self.leases: dict[str, tuple[str, float]] = {}

    def hold(self, device: str, holder: str, seconds: float) -> None:
        """Take or renew a lease; raises where somebody else has it."""
        other, until = self.leases.get(device, (holder, 0.0))
        if other != holder and until > time.monotonic():
            text = f"{device} is leased to {other}"
            raise PermissionError(text)
        self.leases[device] = (holder, time.monotonic() + seconds)

    def drop(self, device: str) -> None:
        """Give a lease back."""
        del self.leases[device]


class Lease:
    """Holds one device for one start."""

    name = "lease"
    policy = "fail"  # without the lease, the device may be somebody else's by now
    thread = True  # whom we ask may hang, so we ask on a thread that can be left behind
    deadline_s = 2.0

    def __init__(self, server: Server, device: str, holder: str, seconds: float = 60) -> None:
        self.server = server
        self.device = device
        self.holder = holder
        self.seconds = seconds
        self.is_held = False

    def before_state(self, **future: Any) -> None:
        self.server.hold(self.device, self.holder, self.seconds)
        self.is_held = True

    def on_event(self, *, event: Any, **future: Any) -> None:
        if event.kind == "run_finished" and self.is_held:
            self.server.drop(self.device)


def attempt(runs: str, server: Server, holder: str) -> None:
    """Start an engine that holds the lease of one device, and print what came of it."""
    boot, engine = counting_start(journal=runs, hooks=[Lease(server, "gpu-0", holder)])
    try:
        boot.run(engine)
    except HookFailed as error:
        print(f"{holder}: {error.__cause__}")
    print(f"{holder}: {verdict_of(boot).outcome}; startup-fsm doctor {boot.path}")


class HangingServer(Server):
    """One that does not answer."""

    def hold(self, device: str, holder: str, seconds: float) -> None:
        time.sleep(3_600)


def main(runs: str = "runs") -> None:
    server = Server()
    attempt(runs, server, "first")  # takes it, renews it, drops it
    server.hold("gpu-0", "somebody else", seconds=60)
    attempt(runs, server, "second")  # is refused
    attempt(runs, HangingServer(), "third")  # does not wait for ever


if __name__ == "__main__":
    main(*sys.argv[1:])
