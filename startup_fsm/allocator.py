"""
torch's native CUDA caching allocator as a pure model: what is reserved, where, and when it comes back.

Follows ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.11) without expandable segments and ``max_split_size``. The same
calls in the same order give the same segments. Imports attrs and the standard library only; does no IO, is not thread
safe.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NoReturn

from startup_fsm.pages import (
    DEFAULT_POOL,
    NEIGHBOUR,
    PAGE_BYTES,
    ROUND_BYTES,
    SMALL_BYTES,
    Block,
    BlockPool,
    DeviceMemory,
    DeviceOutOfMemoryError,
    InternalAssertError,
    OutOfMemoryFacts,
    PoolId,
    PoolUse,
    Shelf,
    TraceEntry,
    segment_entry,
    segment_size,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# Above what a process can map: never mistaken for an address of the host.
_FIRST_ADDRESS = 1 << 48


class Allocator:
    """
    The caching allocator of one device.

    Bytes of torch, its pools and their lives; a block is named by its address, as in torch. Current values and peaks
    are plain attributes: ``allocated_bytes``, ``active_bytes`` (allocated, or waiting for another stream),
    ``reserved_bytes``, ``requested_bytes``, each with a ``_peak`` beside it; ``num_alloc_retries``, ``num_ooms``,
    ``num_device_alloc``, ``num_device_free``.

    Args:
        memory: Where segments come from; taken in the name of ``torch``.
        device: Number that the out-of-memory sentence names.
        limit_bytes: What ``torch.cuda.set_per_process_memory_fraction`` allows, or None.
        trace: Called with every entry of the history.
        place: Returns the address of a new segment of so many bytes; the default counts upwards.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        *,
        device: int = 0,
        limit_bytes: int | None = None,
        trace: Callable[[TraceEntry], None] | None = None,
        place: Callable[[int], int] | None = None,
    ) -> None:
        self.memory = memory
        self.device = device
        self.limit_bytes = limit_bytes
        self.trace = trace
        self._place = place or self._next_address
        self._address = _FIRST_ADDRESS
        self._default = BlockPool(DEFAULT_POOL)
        self._private: dict[PoolId, BlockPool] = {}
        self._freeable: dict[PoolId, BlockPool] = {}
        self._underway: list[tuple[PoolId, frozenset[int] | None]] = []
        self._allocated: dict[int, Block] = {}
        self._segments: dict[int, Block] = {}
        self._waiting: list[Block] = []
        self._deferred: list[Block] = []
        self.allocated_bytes = self.active_bytes = self.reserved_bytes = self.requested_bytes = 0
        self.num_alloc_retries = self.num_ooms = self.num_device_alloc = self.num_device_free = 0
        self.allocated_bytes_peak = self.active_bytes_peak = self.reserved_bytes_peak = self.requested_bytes_peak = 0

    def _next_address(self, nbytes: int) -> int:
        address = self._address
        # A page between two segments: no address is both an end and a beginning.
        self._address += nbytes + PAGE_BYTES
        return address

    def malloc(self, nbytes: int, stream: int = 0) -> int:
        """
        Allocate *nbytes* for *stream* and return the address.

        Raises:
            ValueError: *nbytes* is not positive; torch takes no block for an empty tensor.
            DeviceOutOfMemoryError: No free block, no new segment, and none after the cache was flushed.
        """
        if nbytes <= 0:
            message = f"a block of {nbytes} bytes"
            raise ValueError(message)
        size = -(-nbytes // ROUND_BYTES) * ROUND_BYTES
        if self._underway:
            pool = self._pool_of(stream)
        else:
            if self._waiting or self._deferred:
                self._finish_waiting()
            pool = self._default
        shelf = pool.small if size <= SMALL_BYTES else pool.large
        entries = shelf.free.get(stream)
        if entries and (found := bisect_left(entries, (size,))) < len(entries):
            block = entries.pop(found)[2]
        else:
            block = self._new_segment(shelf, stream, size)
        remaining = block.size - size
        if remaining >= ROUND_BYTES if shelf.small else remaining > SMALL_BYTES:
            shelf.put(block.split(size))
        block.allocated = True
        block.requested = nbytes
        size = block.size
        self._allocated[block.address] = block
        pool.active += size
        pool.requested += nbytes
        self.allocated_bytes += size
        self.active_bytes += size
        self.requested_bytes += nbytes
        # Comparisons, not max(): this is the hot path, and a call costs more than all three.
        if self.allocated_bytes > self.allocated_bytes_peak:  # noqa: PLR1730
            self.allocated_bytes_peak = self.allocated_bytes
        if self.active_bytes > self.active_bytes_peak:  # noqa: PLR1730
            self.active_bytes_peak = self.active_bytes
        if self.requested_bytes > self.requested_bytes_peak:  # noqa: PLR1730
            self.requested_bytes_peak = self.requested_bytes
        if self.trace is not None:
            self.trace(TraceEntry("alloc", block.address, nbytes, stream, pool.id))
        return block.address

    def free(self, address: int) -> None:
        """
        Free the block at *address*.

        A block that another stream used stays active until the next allocation outside of any capture.

        Raises:
            ValueError: Nothing is allocated there.
        """
        block = self._allocated.pop(address, None)
        if block is None:
            message = f"invalid device pointer: {address:#x}"
            raise ValueError(message)
        block.allocated = False
        self.allocated_bytes -= block.size
        if self.trace is not None:
            self.trace(TraceEntry("free_requested", address, block.requested, block.stream, block.shelf.pool.id))
        if not block.foreign_use:
            self._complete_free(block)
        elif self._underway:
            self._deferred.append(block)
        else:
            self._waiting.append(block)

    def record_stream(self, address: int, stream: int) -> None:
        """Note that *stream*, not only its own, used the block at *address* (``Tensor.record_stream``)."""
        block = self._allocated[address]
        if stream != block.stream:
            block.foreign_use = True

    def is_allocated(self, address: int) -> bool:
        """Whether an allocated block begins at *address*."""
        return address in self._allocated

    def size_of(self, address: int) -> int:
        """Return the bytes of the allocated block at *address*, rounding included."""
        return self._allocated[address].size

    def pool_of(self, address: int) -> PoolId:
        """Return the pool of the allocated block at *address*."""
        return self._allocated[address].shelf.pool.id

    def create_or_incref_pool(self, pool_id: PoolId) -> None:
        """
        Open a pool, or count one more user of it; what making a ``torch.cuda.MemPool`` does.

        Raises:
            InternalAssertError: The pool is a zombie: released by its last user and not erased yet.
        """
        pool = self._private.get(pool_id)
        if pool is None:
            self._private[pool_id] = BlockPool(pool_id)
            return
        if pool.use_count <= 0:
            raise InternalAssertError("it->second->use_count > 0", 2706)
        pool.use_count += 1

    def begin_allocate_to_pool(self, pool_id: PoolId, streams: frozenset[int] | None = None) -> None:
        """
        Send allocations (of *streams*, or all) to a pool until ``end_allocate_to_pool``; the last begun wins.

        A capture and ``torch.cuda.use_mem_pool`` both begin here. While any is open, the flush of the cache before an
        out-of-memory error is off and ``empty_cache`` passes the default pool by.
        """
        self.create_or_incref_pool(pool_id)
        if any(open_id == pool_id for open_id, _ in self._underway):
            message = "beginAllocateToPool: already recording to mempool_id"
            raise RuntimeError(message)
        self._underway.append((pool_id, streams))

    def end_allocate_to_pool(self, pool_id: PoolId) -> None:
        """Stop sending allocations to a pool; its count of users stays."""
        for place, (open_id, _) in enumerate(self._underway):
            if open_id == pool_id:
                del self._underway[place]
                return
        message = "endAllocatePool: not currently recording to mempool_id"
        raise RuntimeError(message)

    def release_pool(self, pool_id: PoolId) -> None:
        """Count one user of a pool less; at 0 the pool may be freed, but ``empty_cache`` does that."""
        pool = self._known_pool(pool_id)
        pool.use_count -= 1
        if pool.use_count < 0:
            raise InternalAssertError("uc >= 0", 2791)
        if pool.use_count == 0:
            self._freeable[pool_id] = pool

    def pool_use_count(self, pool_id: PoolId) -> int:
        """Return how many users a pool has; asserts, as torch does, that it is known."""
        return self._known_pool(pool_id).use_count

    def empty_cache(self, pool_id: PoolId = DEFAULT_POOL) -> None:
        """
        Return unsplit free segments to the device.

        With the default pool: its own, unless a capture or pool scope is open, and those of every released pool. With
        a private pool: only its own, and only if it is released (the end of a ``MemPool``). A released pool is erased
        when its last segment is gone.

        Raises:
            InternalAssertError: A released private pool was named while a capture or pool scope is open.
        """
        if pool_id == DEFAULT_POOL and not self._underway:
            self._finish_waiting()
            self._release_shelf(self._default.large)
            self._release_shelf(self._default.small)
        for freeable_id, pool in list(self._freeable.items()):
            if pool_id not in (DEFAULT_POOL, freeable_id):
                continue
            if pool_id != DEFAULT_POOL:
                if self._underway:
                    raise InternalAssertError("captures_underway.empty()", 3564)
                self._finish_waiting()
            self.release_unsplit(freeable_id)
            if pool.segments == 0:
                del self._freeable[freeable_id], self._private[freeable_id]

    def release_unsplit(self, pool_id: PoolId) -> None:
        """Return the unsplit free segments of one pool to the device, whoever uses it."""
        pool = self._default if pool_id == DEFAULT_POOL else self._known_pool(pool_id)
        first, second = (pool.large, pool.small) if pool is self._default else (pool.small, pool.large)
        self._release_shelf(first)
        self._release_shelf(second)

    def reset_peaks(self) -> None:
        """Set every peak to its current value."""
        self.allocated_bytes_peak = self.allocated_bytes
        self.active_bytes_peak = self.active_bytes
        self.reserved_bytes_peak = self.reserved_bytes
        self.requested_bytes_peak = self.requested_bytes

    @property
    def captures_underway(self) -> tuple[PoolId, ...]:
        """Pools that a capture or a pool scope is allocating to, the first begun first."""
        return tuple(pool_id for pool_id, _ in self._underway)

    @property
    def zombies(self) -> tuple[PoolId, ...]:
        """Pools without a user that still exist; opening one again is torch's ``use_count > 0`` assertion."""
        return tuple(self._freeable)

    def pools(self) -> dict[PoolId, PoolUse]:
        """Return every pool that exists, the default pool first."""
        known = {DEFAULT_POOL: self._default, **self._private}
        return {
            pool_id: PoolUse(pool.reserved, pool.active, pool.requested, pool.segments, pool.use_count)
            for pool_id, pool in known.items()
        }

    def stats(self) -> dict[str, int]:
        """Return the statistics under the keys of ``torch.cuda.memory_stats``."""
        counted = {"num_alloc_retries": self.num_alloc_retries, "num_ooms": self.num_ooms}
        counted |= {"num_device_alloc": self.num_device_alloc, "num_device_free": self.num_device_free}
        for name in ("allocated_bytes", "active_bytes", "reserved_bytes", "requested_bytes"):
            counted[f"{name}.all.current"] = getattr(self, name)
            counted[f"{name}.all.peak"] = getattr(self, f"{name}_peak")
        return counted

    def snapshot(self) -> list[dict[str, object]]:
        """Return segments and blocks in the shape of ``torch.cuda.memory_snapshot``, by address."""
        return [segment_entry(self._segments[address], self.device) for address in sorted(self._segments)]

    def _known_pool(self, pool_id: PoolId) -> BlockPool:
        pool = self._private.get(pool_id)
        if pool is None:
            raise InternalAssertError("it != graph_pools.end()", 3169)
        return pool

    def _pool_of(self, stream: int) -> BlockPool:
        for pool_id, streams in reversed(self._underway):
            if streams is None or stream in streams:
                return self._private[pool_id]
        return self._default

    def _complete_free(self, block: Block) -> None:
        shelf = block.shelf
        pool = shelf.pool
        if self.trace is not None:
            self.trace(TraceEntry("free_completed", block.address, block.requested, block.stream, pool.id))
        pool.active -= block.size
        pool.requested -= block.requested
        self.active_bytes -= block.size
        self.requested_bytes -= block.requested
        block.foreign_use = False
        block.requested = 0
        behind = block.behind
        if behind is not None and not behind.allocated and not behind.foreign_use:
            shelf.remove(behind)
            block.absorb(behind)
        before = block.before
        if before is not None and not before.allocated and not before.foreign_use:
            shelf.remove(before)
            before.absorb(block)
            block = before
        shelf.put(block)

    def _finish_waiting(self) -> None:
        # The model has no time: what another stream used is finished when somebody looks, outside of captures.
        done, self._waiting, self._deferred = self._deferred + self._waiting, [], []
        for block in done:
            self._complete_free(block)

    def _new_segment(self, shelf: Shelf, stream: int, size: int) -> Block:
        nbytes = segment_size(size)
        block = self._take_segment(shelf, stream, nbytes)
        if block is None and not self._underway:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._take_segment(shelf, stream, nbytes)
        return block or self._out_of_memory(nbytes, shelf.pool.id, stream)

    def _take_segment(self, shelf: Shelf, stream: int, nbytes: int) -> Block | None:
        if self.limit_bytes is not None and self.reserved_bytes + nbytes > self.limit_bytes:
            return None
        if not self.memory.take("torch", nbytes):
            return None
        pool = shelf.pool
        block = Block(self._place(nbytes), nbytes, stream, shelf)
        self._segments[block.address] = block
        pool.segments += 1
        pool.reserved += nbytes
        self.num_device_alloc += 1
        self.reserved_bytes += nbytes
        self.reserved_bytes_peak = max(self.reserved_bytes_peak, self.reserved_bytes)
        if self.trace is not None:
            self.trace(TraceEntry("segment_alloc", block.address, nbytes, stream, pool.id))
        return block

    def _release_shelf(self, shelf: Shelf) -> None:
        pool = shelf.pool
        for block in shelf.whole():
            shelf.remove(block)
            del self._segments[block.address]
            self.memory.give_back("torch", block.size)
            pool.segments -= 1
            pool.reserved -= block.size
            self.num_device_free += 1
            self.reserved_bytes -= block.size
            if self.trace is not None:
                self.trace(TraceEntry("segment_free", block.address, block.size, block.stream, pool.id))

    def _out_of_memory(self, nbytes: int, pool_id: PoolId, stream: int) -> NoReturn:
        self.num_ooms += 1
        memory = self.memory
        if self.trace is not None:
            self.trace(TraceEntry("oom", memory.free_bytes, nbytes, stream, pool_id))
        private = sum(pool.free_bytes for pool in self._private.values())
        others = {name: held for name, held in memory.holders.items() if name.startswith(NEIGHBOUR)}
        raise DeviceOutOfMemoryError(
            OutOfMemoryFacts(
                tried_bytes=nbytes,
                device=self.device,
                total_bytes=memory.total_bytes,
                free_bytes=memory.free_bytes,
                process_bytes=memory.used_bytes - sum(others.values()),
                torch_allocated_bytes=self.allocated_bytes + private,
                private_pool_bytes=private,
                torch_reserved_bytes=self.reserved_bytes,
                other_processes=tuple((name.removeprefix(NEIGHBOUR), held) for name, held in others.items()),
                allowed_bytes=self.limit_bytes,
            )
        )
