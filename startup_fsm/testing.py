"""For tests of engines, hooks and plans: starts without a GPU, in memory, and their verdicts."""

from __future__ import annotations

from typing import Any

from startup_fsm.bootstrap import Bootstrap
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.diagnose import diagnose
from startup_fsm.engines.counting import CountingEngine
from startup_fsm.memory import GIB
from startup_fsm.sources import Source
from startup_fsm.verdict import Verdict


def counting_start(
    *, total_bytes: int = 4 * GIB, engine: dict[str, Any] | None = None, **options: Any
) -> tuple[Bootstrap, CountingEngine]:
    """
    A start that is ready to run: an engine that only counts bytes, on a device of ``total_bytes`` bytes.

    Args:
        total_bytes: Capacity of the device, where ``options`` bring none.
        engine: Attributes of :class:`startup_fsm.engines.counting.CountingEngine`.
        options: Of :class:`startup_fsm.Bootstrap`; the journal is kept in memory unless they say otherwise.
    """
    device = options.pop("device", None) or SimulatedDevice(total_bytes)
    boot = Bootstrap(device=device, **{"journal": None, "discover": False, **options})
    return boot, CountingEngine(device=device, **(engine or {}))


def verdict_of(boot: Bootstrap) -> Verdict:
    """What the doctor would say of a start so far, from its own events."""
    return diagnose([Source(run=boot.history)])
