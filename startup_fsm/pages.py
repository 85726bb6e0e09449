"""
The memory of one device as its driver gives it out, and what is said when it is gone.

Holds the device below the caching allocator: a capacity, named holders, whole pages. Imports attrs and the standard
library only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import attrs

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
PAGE_BYTES = 2 * MIB
"""What a CUDA driver gives out at a time; also the granularity of its virtual memory (measured on an H200)."""

PoolId = tuple[int, int]
"""
``(0, 0)`` is the default pool, ``(0, n)`` comes from a handle or a ``MemPool``, ``(n, 0)`` from a capture without
either.
"""

DEFAULT_POOL: PoolId = (0, 0)

NEIGHBOUR = "neighbour:"
"""Holders whose name begins so are other processes."""


def format_size(nbytes: int) -> str:
    """Return *nbytes* in the words of c10 ``format_size``: ``bytes``, or KiB, MiB, GiB with two decimals."""
    if nbytes <= KIB:
        return f"{nbytes} bytes"
    if nbytes <= MIB:
        return f"{nbytes / KIB:.2f} KiB"
    if nbytes <= GIB:
        return f"{nbytes / MIB:.2f} MiB"
    return f"{nbytes / GIB:.2f} GiB"


def whole_pages(nbytes: int) -> int:
    """Return *nbytes* rounded up to pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class InternalAssertError(RuntimeError):
    """
    An assertion inside torch's allocator failed, with torch's own sentence.

    Attributes:
        condition: The C++ condition that did not hold.
    """

    def __init__(self, condition: str, line: int) -> None:
        self.condition = condition
        where = f'"/pytorch/c10/cuda/CUDACachingAllocator.cpp":{line}'
        super().__init__(f"{condition} INTERNAL ASSERT FAILED at {where}, please report a bug to PyTorch. ")


@attrs.frozen
class OutOfMemoryFacts:
    """
    The numbers of torch's out-of-memory sentence, in bytes.

    ``torch_allocated_bytes`` and ``private_pool_bytes`` follow torch to the letter: what it calls "allocated in
    private pools" is the sum of the *free* blocks there, added to the allocated ones, because no other tensor may use
    them.
    """

    tried_bytes: int
    device: int
    total_bytes: int
    free_bytes: int
    process_bytes: int
    torch_allocated_bytes: int
    private_pool_bytes: int
    torch_reserved_bytes: int
    other_processes: tuple[tuple[str, int], ...] = ()
    allowed_bytes: int | None = None

    @property
    def torch_reserved_unallocated_bytes(self) -> int:
        """What torch holds and could give to a tensor of the default pool."""
        return self.torch_reserved_bytes - self.torch_allocated_bytes

    def sentence(self) -> str:
        """Return the sentence of torch 2.10 and later."""
        others = "".join(f"Process {name} has {format_size(n)} memory in use. " for name, n in self.other_processes)
        allowed = "" if self.allowed_bytes is None else f"{format_size(self.allowed_bytes)} allowed; "
        private = ""
        if self.private_pool_bytes > 0:
            private = f"with {format_size(self.private_pool_bytes)} allocated in private pools (e.g., CUDA Graphs), "
        return (
            f"CUDA out of memory. Tried to allocate {format_size(self.tried_bytes)}. "
            f"GPU {self.device} has a total capacity of {format_size(self.total_bytes)} of which "
            f"{format_size(self.free_bytes)} is free. {others}"
            f"Including non-PyTorch memory, this process has {format_size(self.process_bytes)} memory in use. {allowed}"
            f"Of the allocated memory {format_size(self.torch_allocated_bytes)} is allocated by PyTorch, {private}"
            f"and {format_size(self.torch_reserved_unallocated_bytes)} is reserved by PyTorch but unallocated. "
            "If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True "
            "to avoid fragmentation.  See documentation for Memory Management  "
            "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )


class DeviceOutOfMemoryError(RuntimeError):
    """
    No free block, no free page: the caching allocator gave up.

    A ``RuntimeError``, as ``torch.OutOfMemoryError`` is. The numbers of the sentence are attributes, in bytes:
    ``tried_bytes`` (the segment that was asked for, not the tensor), ``free_bytes``, ``total_bytes``,
    ``process_bytes``, ``torch_allocated_bytes``, ``torch_reserved_unallocated_bytes``, ``private_pool_bytes``;
    ``facts`` has them all.
    """

    def __init__(self, facts: OutOfMemoryFacts) -> None:
        self.facts = facts
        self.tried_bytes = facts.tried_bytes
        self.free_bytes = facts.free_bytes
        self.total_bytes = facts.total_bytes
        self.process_bytes = facts.process_bytes
        self.torch_allocated_bytes = facts.torch_allocated_bytes
        self.torch_reserved_unallocated_bytes = facts.torch_reserved_unallocated_bytes
        self.private_pool_bytes = facts.private_pool_bytes
        super().__init__(facts.sentence())


class TraceEntry(NamedTuple):
    """
    One line of allocator history, with the keys of torch's ``device_traces``.

    ``action`` is one of alloc, free_requested, free_completed, segment_alloc, segment_free, oom. ``size`` is in bytes:
    as requested for the first three, of the segment for the next two. For oom ``addr`` is the number of bytes that
    were free on the device.
    """

    action: str
    addr: int
    size: int
    stream: int
    pool_id: PoolId


class DeviceMemory:
    """
    A device's memory and who holds it.

    Holders are names: ``context``, ``driver``, ``torch``, ``arena``, ``neighbour:<name>``. Every holder takes whole
    pages, except that a taking may be ``exact`` (a context is measured in kilobytes, 618.8 MiB on an H200).

    Args:
        total_bytes: Capacity as ``cudaMemGetInfo`` reports it; need not be a multiple of the page.
    """

    def __init__(self, total_bytes: int) -> None:
        if total_bytes < PAGE_BYTES:
            message = f"a device of {total_bytes} bytes is smaller than one page of {PAGE_BYTES}"
            raise ValueError(message)
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.used_peak_bytes = 0
        self._held: dict[str, int] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody holds, as ``cudaMemGetInfo`` says."""
        return self.total_bytes - self.used_bytes

    @property
    def holders(self) -> dict[str, int]:
        """Bytes by holder; a copy."""
        return {name: nbytes for name, nbytes in self._held.items() if nbytes}

    def held(self, holder: str) -> int:
        """Return the bytes of one holder, 0 for one that is not known."""
        return self._held.get(holder, 0)

    def take(self, holder: str, nbytes: int, *, exact: bool = False) -> bool:
        """Give pages to *holder*; False, and nothing taken, where they do not fit."""
        taken = nbytes if exact else whole_pages(nbytes)
        if nbytes < 0:
            message = f"{holder} asked for {nbytes} bytes"
            raise ValueError(message)
        if taken > self.free_bytes:
            return False
        self._held[holder] = self._held.get(holder, 0) + taken
        self.used_bytes += taken
        self.used_peak_bytes = max(self.used_peak_bytes, self.used_bytes)
        return True

    def give_back(self, holder: str, nbytes: int, *, exact: bool = False) -> None:
        """
        Take back what ``take`` gave; *nbytes* is rounded the same way.

        Raises:
            ValueError: The holder does not have that much.
        """
        given = nbytes if exact else whole_pages(nbytes)
        held = self._held.get(holder, 0)
        if nbytes < 0 or given > held:
            message = f"{holder} gives back {given} bytes and holds {held}"
            raise ValueError(message)
        self._held[holder] = held - given
        self.used_bytes -= given


ROUND_BYTES = 512
"""Every block is a multiple of this, and a small segment is split where this much is left."""
SMALL_BYTES = 1 * MIB
"""Up to this a block comes from small segments; a large segment is split where more than this is left."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB


def round_size(nbytes: int) -> int:
    """Return the block that *nbytes* take: a multiple of 512 bytes."""
    return max(ROUND_BYTES, -(-nbytes // ROUND_BYTES) * ROUND_BYTES)


def segment_size(nbytes: int) -> int:
    """
    Return the segment that is asked of the driver for a block of *nbytes*: 2 MiB, 20 MiB, or its own in steps of 2
    MiB.
    """
    if nbytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if nbytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


@attrs.frozen
class PoolUse:
    """
    One pool at one moment, in bytes. ``use_count`` is 1 for the default pool, 0 for a pool that is released but not
    gone.
    """

    reserved_bytes: int
    active_bytes: int
    requested_bytes: int
    segments: int
    use_count: int


class Block:
    """A stretch of one segment; the leftmost block of a segment stays the same object for the segment's life."""

    __slots__ = ("address", "allocated", "before", "behind", "foreign_use", "requested", "shelf", "size", "stream")

    def __init__(self, address: int, size: int, stream: int, shelf: Shelf) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        self.shelf = shelf
        self.requested = 0
        self.allocated = False
        self.foreign_use = False
        self.before: Block | None = None
        self.behind: Block | None = None

    def split(self, size: int) -> Block:
        """Keep the first *size* bytes and return the rest as a new block."""
        rest = Block(self.address + size, self.size - size, self.stream, self.shelf)
        rest.before, rest.behind = self, self.behind
        if rest.behind is not None:
            rest.behind.before = rest
        self.behind = rest
        self.size = size
        return rest

    def absorb(self, right: Block) -> None:
        """Join with the free block that follows."""
        self.size += right.size
        self.behind = right.behind
        if self.behind is not None:
            self.behind.before = self


class Shelf:
    """The free blocks of one pool and one kind of segment, by stream, then size, then address."""

    __slots__ = ("free", "pool", "small")

    def __init__(self, pool: BlockPool, *, small: bool) -> None:
        self.pool = pool
        self.small = small
        self.free: dict[int, list[tuple[int, int, Block]]] = {}

    def put(self, block: Block) -> None:
        entries = self.free.get(block.stream)
        if entries is None:
            entries = self.free[block.stream] = []
        insort(entries, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        entries = self.free[block.stream]
        del entries[bisect_left(entries, (block.size, block.address))]

    def whole(self) -> list[Block]:
        """Return the free blocks that are a whole segment, in the order in which torch releases them."""
        return [
            block
            for stream in sorted(self.free)
            for _, _, block in self.free[stream]
            if block.before is None and block.behind is None
        ]


class BlockPool:
    """The default pool, or a private one with its count of users and of segments."""

    __slots__ = ("active", "id", "large", "requested", "reserved", "segments", "small", "use_count")

    def __init__(self, pool_id: PoolId) -> None:
        self.id = pool_id
        self.use_count = 1
        self.segments = 0
        self.reserved = 0
        self.active = 0
        self.requested = 0
        self.small = Shelf(self, small=True)
        self.large = Shelf(self, small=False)

    @property
    def free_bytes(self) -> int:
        """Bytes of the free blocks, split or not."""
        shelves = (self.small, self.large)
        return sum(size for shelf in shelves for entries in shelf.free.values() for size, _, _ in entries)


def segment_entry(head: Block, device: int) -> dict[str, object]:
    """Return the segment that begins with *head* as an entry of ``torch.cuda.memory_snapshot``."""
    blocks: list[dict[str, object]] = []
    sums = {"total_size": 0, "allocated_size": 0, "active_size": 0, "requested_size": 0}
    block: Block | None = head
    while block is not None:
        active = block.allocated or block.foreign_use
        state = "active_allocated" if block.allocated else "active_pending_free" if active else "inactive"
        blocks.append(
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": state,
                "frames": [],
            }
        )
        sums["total_size"] += block.size
        sums["allocated_size"] += block.size * block.allocated
        sums["active_size"] += block.size * active
        sums["requested_size"] += block.requested * active
        block = block.behind
    return {
        "device": device,
        "address": head.address,
        **sums,
        "stream": head.stream,
        "segment_type": "small" if head.shelf.small else "large",
        "segment_pool_id": head.shelf.pool.id,
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
