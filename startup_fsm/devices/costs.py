"""
What a simulated driver takes and says: costs outside the allocator, and CUDA's words for what goes wrong.

Imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import attrs

from startup_fsm.devices.base import ErrorCategory
from startup_fsm.errors import text_of
from startup_fsm.pages import KIB, MIB, DeviceMemory, DeviceOutOfMemoryError, InternalAssertError, whole_pages

FORBIDDEN_WORDS = "CUDA error: operation not permitted when stream is capturing"
INVALIDATED_WORDS = "CUDA error: operation failed due to a previous error during capture"
DRIVER_OOM_WORDS = "CUDA error: out of memory"


_CARDS: Final = Path(__file__).parent / "cards"


@attrs.frozen(kw_only=True)
class Costs:
    """
    What a process takes, in bytes; the defaults were measured on one H200.

    Attributes:
        context_bytes: Outside torch before anything: context, handles.
        modules_bytes: Outside torch at the first matrix product: code that is loaded lazily; stays.
        capture_bytes: Outside torch at the first capture: code and pools of the driver; stays.
        graph_bytes: Outside torch for every instantiated graph.
        node_bytes: Outside torch for every node of a graph; 51 graphs of an 8B shape, 482 nodes each, took 80 MiB.
        workspace_bytes: cuBLAS workspace of a stream, from whatever pool is open at its first matrix product; sm_90.
        graphs_return: Whether settling gives the memory of destroyed graphs back. On the H200 the driver kept it and
            used it again for the next graphs.
    """

    context_bytes: int = 648_859_648
    modules_bytes: int = 74 * MIB
    capture_bytes: int = 70 * MIB
    graph_bytes: int = 64 * KIB
    node_bytes: int = 3_300
    workspace_bytes: int = 32 * MIB
    graphs_return: bool = False

    @classmethod
    def of_card(cls, name: str = "nvidia-h200") -> Costs:
        """
        What a start on a real card was measured to take; its file says on which, and how.

        Raises:
            ValueError: No card of that name was measured.
        """
        path = _CARDS / f"{name}.json"
        if not path.is_file():
            known = ", ".join(sorted(each.stem for each in _CARDS.glob("*.json")))
            raise ValueError(f"card: {name!r} is none of {known}\nhint: benchmarks/fidelity.py --fit measures one")
        return cls(**json.loads(path.read_text(encoding="utf-8"))["costs"])

    @classmethod
    def none(cls) -> Costs:
        """No cost at all: only what the allocator takes."""
        zero = dict.fromkeys(("context", "modules", "capture", "graph", "node", "workspace"), 0)
        return cls(**{f"{name}_bytes": nbytes for name, nbytes in zero.items()})  # type: ignore[arg-type]


class DriverMemory:
    """
    What the driver holds for this process beside the context: code, graphs. Grows by whole pages and keeps them.

    Args:
        memory: The device, held in the name of ``driver``.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._once: set[str] = set()
        self.used_bytes = 0

    def take(self, nbytes: int) -> None:
        """
        Use *nbytes* more, from pages that are held if they suffice.

        Raises:
            RuntimeError: The device has no page left, in CUDA's words.
        """
        missing = whole_pages(self.used_bytes + nbytes) - self._memory.held("driver")
        if missing > 0 and not self._memory.take("driver", missing):
            raise RuntimeError(DRIVER_OOM_WORDS)
        self.used_bytes += nbytes

    def take_once(self, what: str, nbytes: int) -> None:
        """The same for what is taken at its first use only, and stays."""
        if what not in self._once:
            self.take(nbytes)
            self._once.add(what)

    def give_back(self, nbytes: int) -> None:
        """Use *nbytes* less; the pages stay for the next graph."""
        self.used_bytes -= nbytes

    def trim(self) -> int:
        """Return unused pages to the device, and how many bytes that were."""
        surplus = self._memory.held("driver") - whole_pages(self.used_bytes)
        self._memory.give_back("driver", surplus)
        return surplus


def category_of(error: BaseException) -> ErrorCategory | None:
    """How an exception is read: by its type, else by the words of CUDA and torch."""
    text = text_of(error)
    if isinstance(error, DeviceOutOfMemoryError) or "CUDA out of memory" in text or DRIVER_OOM_WORDS in text:
        return "oom"
    if isinstance(error, InternalAssertError) or "use_count > 0 INTERNAL ASSERT FAILED" in text:
        return "pool"
    return "capture" if FORBIDDEN_WORDS in text or INVALIDATED_WORDS in text else None
