"""
A rule of the company: who asks for more of a device than the house allows does not start at all.

    python examples/hooks/rule.py
"""

from __future__ import annotations

import sys
from typing import Any

from startup_fsm import Knobs
from startup_fsm.errors import HookFailed
from startup_fsm.testing import counting_start, verdict_of


class AtMost:
    """Refuses a start whose settings ask for more than ``share`` of the device."""

    name = "house-rule"
    policy = "fail"  # what this raises ends the start, before its first state has run

    def __init__(self, share: float) -> None:
        self.share = share

    def on_event(self, *, event: Any, **future: Any) -> None:
        if event.kind != "run_started":
            return
        asked = event.knobs["gpu_memory_utilization"]
        if asked > self.share:
            text = f"gpu_memory_utilization is {asked}; on shared devices at most {self.share} is allowed"
            raise PermissionError(text)


def main(runs: str = "runs") -> None:
    for utilization in (0.9, 0.98):
        boot, engine = counting_start(journal=runs, hooks=[AtMost(0.95)], knobs=Knobs(utilization=utilization))
        try:
            boot.run(engine)
        except HookFailed as error:
            print(f"refused: {error.__cause__}")
        print(f"{utilization}: {verdict_of(boot).outcome}; startup-fsm doctor {boot.path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
