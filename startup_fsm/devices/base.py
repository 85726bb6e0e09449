"""
The device protocol: everything that the live machine asks of memory.

Two implementations: ``simulated`` (the allocator as a model) and ``cuda`` (torch.cuda with NVML beside it). Nothing
here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import attrs

from startup_fsm.engine import Graph, Pool
from startup_fsm.memory import Snapshot

#: How a device reads an exception of the engine: ``oom`` memory ran out, ``capture`` an operation that may not be
#: captured, ``pool`` a pool opened again after its graphs died, None not about the device.
ErrorCategory = Literal["oom", "capture", "pool"]


@attrs.frozen(kw_only=True)
class Settled:
    """
    What settling did.

    Attributes:
        polls: Readings of free memory until it stood still.
        late_return_bytes: Free memory that came back only while we polled.
        duration_ns: Time taken.
        workspaces_cleared: Whether cuBLAS workspaces were dropped.
    """

    polls: int
    late_return_bytes: int
    duration_ns: int
    workspaces_cleared: bool


@attrs.frozen(kw_only=True)
class OutOfMemory:
    """
    What an out-of-memory error says, in bytes; None where it does not say.

    ``blocks`` are the largest live blocks by pool, as plain data.
    """

    tried_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None
    private_pool_bytes: int | None = None
    blocks: tuple[Mapping[str, Any], ...] = ()


@attrs.frozen(kw_only=True)
class Repair:
    """
    The outcome of repairing the allocator after a failed capture.

    Attributes:
        proven: An allocation was freed, the cache emptied, reserved bytes fell, and the pool is gone.
        evidence: The readings that prove it, or that do not.
    """

    proven: bool
    evidence: Mapping[str, Any]


class Arena(Protocol):
    """KV memory as virtual memory: a reserved range of which a prefix of every sub-range is mapped."""

    @property
    def base(self) -> int:
        """Address of the range; never changes."""

    @property
    def reserved_bytes(self) -> int:
        """Size of the range."""

    @property
    def mapped_bytes(self) -> int:
        """Bytes with memory behind them; at most ``reserved_bytes``."""

    @property
    def granule_bytes(self) -> int:
        """Smallest growth over all sub-ranges together."""

    def buffers(self) -> list[Any]:
        """One ``uint8`` buffer a sub-range, over its whole capacity."""

    def map_blocks(self, blocks: int) -> None:
        """Map enough that the first ``blocks`` blocks of every sub-range are usable; never shrinks; zeroed."""

    def blocks_within(self, size: int) -> int:
        """Most blocks whose mapping takes at most ``size`` bytes in all, granules included."""

    def close(self) -> None:
        """Give everything back. Nothing may use the range any more."""


def pool_key(identity: str) -> tuple[int, int]:
    """What the allocator calls a pool that snapshots call ``0.3``."""
    first, _, second = identity.partition(".")
    return int(first), int(second)


class Device(Protocol):
    """One accelerator, real or simulated."""

    @property
    def name(self) -> str:
        """For people and journals, such as ``simulated 80 GiB``."""

    @property
    def kind(self) -> str:
        """``simulated`` or ``cuda``."""

    @property
    def identity(self) -> str | None:
        """What tells this device from all others of its host; None where it cannot be shared."""

    @property
    def has_values(self) -> bool:
        """False when tensors are fakes and nothing can be compared."""

    def scope(self) -> AbstractContextManager[None]:
        """Bodies of states run inside this; a simulated device follows their tensors here."""

    def snapshot(self, *, settled: bool = False) -> Snapshot:
        """Read memory now, without changing anything. ``settled`` is only noted."""

    def settle(self, *, clear_workspaces: bool = False) -> Settled:
        """
        Collect garbage, synchronize, empty the cache, trim graph memory, and read until free memory stands still.

        ``clear_workspaces`` drops cuBLAS workspaces too: never after the first real capture began.
        """

    def label(self, text: str) -> None:
        """Stamp what follows in the allocator's own traces, where it has some; harmless where it has none."""

    def reset_peaks(self) -> None:
        """Peaks of the allocator start again from what it holds now."""

    def synchronize(self) -> None:
        """Wait for everything that was launched."""

    def open_pool(self, purpose: str) -> Pool:
        """A new pool of its own."""

    def capture(self, body: Callable[[], Any], pool: Pool, *, size: int, warmups: int = 1) -> Graph:
        """Warm up and capture ``body`` on the one capture stream into ``pool``; a failed capture raises."""

    def buffers(self, count: int, size: int) -> list[Any]:
        """``count`` uninitialised ``uint8`` buffers of ``size`` bytes from the pool that is open, zeroed."""

    def reserve(self, count: int, block_bytes: int, blocks: int) -> Arena:
        """
        An arena of ``count`` sub-ranges for ``blocks`` blocks of ``block_bytes`` bytes each.

        Raises:
            NotImplementedError: The device has no virtual memory management; the message says why.
        """

    def category(self, error: BaseException) -> ErrorCategory | None:
        """How this device reads an exception."""

    def out_of_memory(self, error: BaseException) -> OutOfMemory | None:
        """The figures of an out-of-memory error; None when it is none."""

    def holder_test(self, pool: str | None) -> Callable[[Any], bool]:
        """
        A test for "does the storage of this tensor live in the pool of that id (None: in the arena)".

        It stays valid after the pool was released. Of a graph it says whether the graph was captured into that pool.
        """

    def has_graphs(self, pool: str) -> bool:
        """Whether a graph is alive that was captured into the pool of that id, by whomever."""

    def address(self, tensor: Any) -> int:
        """Device address of a tensor's first byte."""

    def repair(self, pool: Pool | None) -> Repair:
        """
        After a failed capture: end and release ``pool``, settle, and prove that the allocator works again.

        None where the capture went into no pool of ours: then nothing is ended, and only the proof is tried.
        """
