"""For tests of engines, hooks and plans: starts without a GPU, in memory, over several ranks, and their verdicts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from startup_fsm.agreement import StoreAgreement
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


class MemoryStore:
    """The part of a c10d store that ranks need to meet, in this process and without torch."""

    def __init__(self) -> None:
        self._held: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str, /) -> None:
        """Keep a value."""
        with self._changed:
            self._held[key] = value
            self._changed.notify_all()

    def get(self, key: str, /) -> bytes:
        """A value, once there is one."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._held)
            return self._held[key].encode()

    def add(self, key: str, amount: int, /) -> int:
        """Count, and get the sum."""
        with self._changed:
            total = int(self._held.get(key, "0")) + amount
            self._held[key] = str(total)
            return total

    def check(self, keys: list[str], /) -> bool:
        """Whether all of them have values."""
        with self._changed:
            return all(key in self._held for key in keys)

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Several values."""
        return [self.get(key) for key in keys]


def over_ranks(size: int, start: Callable[[StoreAgreement], Any], **options: Any) -> list[Any]:
    """
    What ``start`` returns or raises on each rank of a start of ``size`` ranks, each on a thread of its own.

    Args:
        size: How many.
        start: Gets the agreement of its rank, for ``Bootstrap(agreement=...)``.
        options: Of :class:`startup_fsm.agreement.StoreAgreement`.
    """
    store = MemoryStore()
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            given = {"deadline_s": 60.0, "boot": "this host", **options}
            results[rank] = start(StoreAgreement(rank, size, lambda _: store, **given))
        except BaseException as error:  # noqa: BLE001 - of whatever kind: it is what came of that rank
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
