"""
KV memory as virtual memory on a simulated device: a reserved range that is mapped from the front.

On a host with real tensors it is ``mmap``, ``mprotect`` and ``madvise``; for fakes, or without torch, a byte counter.
The rules are those of CUDA's virtual memory: whole pages of 2 MiB, no mapping while a capture is open, an address that
never moves. torch is imported only where a tensor is made.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Any

from startup_fsm.pages import PAGE_BYTES, DeviceMemory, whole_pages

_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_PRIVATE, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x02, 0x20, 0x4000
_MADV_DONTNEED = 4


class CountedArena:
    """
    An arena that only counts: equal sub-ranges, each mapped from its own front.

    Args:
        memory: The device that pages are taken from, in the name of ``arena``.
        count: Sub-ranges, such as one for K and one for V of every layer.
        block_bytes: Bytes of one KV block in one sub-range.
        blocks: Capacity of a sub-range, in blocks.
        base: Address of the range.
        refuse: Returns why nothing may be mapped now, or None.
        full: Makes the error that is raised when the device has no page left.
        buffer: Makes the buffer of one sub-range from its address and its bytes.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        *,
        count: int,
        block_bytes: int,
        blocks: int,
        base: int,
        refuse: Callable[[], str | None],
        full: Callable[[int], Exception],
        buffer: Callable[[int, int], Any],
    ) -> None:
        if min(count, block_bytes, blocks) < 1:
            raise ValueError(f"an arena of {count} sub-ranges, {blocks} blocks of {block_bytes} bytes")
        self._memory = memory
        self._count = count
        self._block_bytes = block_bytes
        self._blocks = blocks
        self._base = base
        self._refuse = refuse
        self._full = full
        self._buffer = buffer
        self._stride = whole_pages(block_bytes * blocks)
        self._mapped = 0
        self.closed = False

    @property
    def base(self) -> int:
        """Address of the range; never changes."""
        return self._base

    @property
    def reserved_bytes(self) -> int:
        """Size of the range: capacity of all sub-ranges, each in whole pages."""
        return self._stride * self._count

    @property
    def mapped_bytes(self) -> int:
        """Bytes with memory behind them, over all sub-ranges."""
        return self._mapped * self._count

    @property
    def granule_bytes(self) -> int:
        """Smallest growth: one page in every sub-range."""
        return PAGE_BYTES * self._count

    @property
    def buffer(self) -> Callable[[int, int], Any]:
        """What makes the buffer of one sub-range from its address and its bytes."""
        return self._buffer

    def make_buffers_with(self, buffer: Callable[[int, int], Any]) -> None:
        """Have buffers made otherwise, such as by a device that follows their storages."""
        self._buffer = buffer

    def buffers(self) -> list[Any]:
        """
        One ``uint8`` buffer a sub-range, over its whole capacity.

        They are not kept here: what still points into the range at its end must be the engine's.
        """
        self._check_open()
        size = self._block_bytes * self._blocks
        return [self._buffer(self._base + place * self._stride, size) for place in range(self._count)]

    def blocks_within(self, size: int) -> int:
        """Most blocks whose mapping takes at most *size* bytes in all, granules included."""
        pages = max(0, size) // self.granule_bytes
        return min(self._blocks, pages * PAGE_BYTES // self._block_bytes)

    def map_blocks(self, blocks: int) -> None:
        """
        Map enough that the first *blocks* blocks of every sub-range are usable; never shrinks; fresh pages are zero.

        Raises:
            RuntimeError: A capture is open; growth is a state of its own.
            ValueError: More than the capacity.
        """
        self._check_open()
        if not 0 <= blocks <= self._blocks:
            raise ValueError(f"arena of {self._blocks} blocks asked to map {blocks}\nhint: reserve more, map later")
        reason = self._refuse()
        if reason is not None:
            raise RuntimeError(reason)
        target = whole_pages(blocks * self._block_bytes)
        growth = (target - self._mapped) * self._count
        if growth <= 0:
            return
        if not self._memory.take("arena", growth):
            raise self._full(growth)
        self._grow(self._mapped, target)
        self._mapped = target

    def close(self) -> None:
        """Give everything back. Nothing may use the range any more."""
        if self.closed:
            return
        self.closed = True
        self._memory.give_back("arena", self.mapped_bytes)
        self._mapped = 0
        self._shut()

    def owns(self, address: int) -> bool:
        """Whether an address lies in the range, mapped or not."""
        return self._base <= address < self._base + self.reserved_bytes

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError(f"the arena at {self._base:#x} is closed")

    def _grow(self, low: int, high: int) -> None:
        """Put memory behind ``[low, high)`` of every sub-range; a counter has nothing to do."""

    def _shut(self) -> None:
        """Take the memory away; a counter has nothing to do."""


class HostArena(CountedArena):
    """
    An arena of host memory: touching what is not mapped is a segmentation fault, as it is an illegal access on a GPU.

    Takes the arguments of :class:``CountedArena`` but ``base`` and ``buffer``. Buffers are torch tensors. After
    ``close`` the range stays reserved without access until the last tensor over it is gone, so that a late touch
    faults and reads nobody else's memory.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        *,
        count: int,
        block_bytes: int,
        blocks: int,
        refuse: Callable[[], str | None],
        full: Callable[[int], Exception],
    ) -> None:
        self._range = _HostRange(whole_pages(block_bytes * blocks) * count)
        super().__init__(
            memory,
            count=count,
            block_bytes=block_bytes,
            blocks=blocks,
            base=self._range.base,
            refuse=refuse,
            full=full,
            buffer=self._range.tensor,
        )

    def _grow(self, low: int, high: int) -> None:
        for place in range(self._count):
            self._range.commit(self._base + place * self._stride + low, high - low)

    def _shut(self) -> None:
        self._range.decommit()


class _HostRange:
    """Address space of this process; given back when neither an arena nor a tensor refers to it."""

    def __init__(self, size: int) -> None:
        self._libc = _libc()
        self.size = size
        address = self._libc.mmap(None, size, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
        if address is None or address == ctypes.c_void_p(-1).value:
            raise MemoryError(f"reserving {size} bytes of address space: {os.strerror(ctypes.get_errno())}")
        self.base: int = address

    def __del__(self) -> None:
        base = getattr(self, "base", None)
        if base is not None:
            self._libc.munmap(base, self.size)

    def commit(self, address: int, size: int) -> None:
        self._check(self._libc.mprotect(address, size, _PROT_READ | _PROT_WRITE), f"mapping {size} bytes")

    def decommit(self) -> None:
        self._check(self._libc.madvise(self.base, self.size, _MADV_DONTNEED), f"unmapping {self.size} bytes")
        self._check(self._libc.mprotect(self.base, self.size, _PROT_NONE), f"closing {self.size} bytes")

    def tensor(self, address: int, size: int) -> Any:
        import torch

        view = (ctypes.c_uint8 * size).from_address(address)
        # The storage keeps the view and the view keeps the range: it cannot be unmapped under a living tensor.
        view.range = self  # type: ignore[attr-defined]
        return torch.frombuffer(view, dtype=torch.uint8)

    @staticmethod
    def _check(result: int, doing: str) -> None:
        if result != 0:
            code = ctypes.get_errno()
            kind = MemoryError if code == errno.ENOMEM else OSError
            raise kind(f"{doing} of host memory: {os.strerror(code)}")


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mprotect.argtypes = [pointer, size, ctypes.c_int]
    libc.madvise.argtypes = [pointer, size, ctypes.c_int]
    libc.munmap.argtypes = [pointer, size]
    return libc
