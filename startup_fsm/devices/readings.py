"""What the meters of a simulated device show: snapshots, and the figures of an out-of-memory error. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from startup_fsm.allocator import Allocator
from startup_fsm.devices.arena import CountedArena
from startup_fsm.devices.base import OutOfMemory
from startup_fsm.devices.holdings import pool_name
from startup_fsm.memory import PoolUsage, Snapshot, Tenant
from startup_fsm.pages import DEFAULT_POOL, NEIGHBOUR, DeviceOutOfMemoryError, PoolId

_LARGEST_BLOCKS = 5


def read_snapshot(allocator: Allocator, purposes: Mapping[PoolId, str], arenas: Sequence[CountedArena]) -> Snapshot:
    """Memory as it stands; every figure is exact, because the model knows who holds what."""
    memory = allocator.memory
    tenants = tuple(
        Tenant(label=holder.removeprefix(NEIGHBOUR), bytes=nbytes)
        for holder, nbytes in memory.holders.items()
        if holder.startswith(NEIGHBOUR)
    )
    pools = tuple(
        PoolUsage(
            pool=pool_name(key),
            purpose=purposes.get(key),
            reserved_bytes=use.reserved_bytes,
            active_bytes=use.active_bytes,
            requested_bytes=use.requested_bytes,
            use_count=None if key == DEFAULT_POOL else use.use_count,
        )
        for key, use in allocator.pools().items()
    )
    return Snapshot(
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        process_bytes=memory.used_bytes - sum(tenant.bytes or 0 for tenant in tenants),
        allocated_bytes=allocator.allocated_bytes,
        requested_bytes=allocator.requested_bytes,
        reserved_bytes=allocator.reserved_bytes,
        allocated_peak_bytes=allocator.allocated_bytes_peak,
        reserved_peak_bytes=allocator.reserved_bytes_peak,
        retries=allocator.num_alloc_retries,
        ooms=allocator.num_ooms,
        pools=pools,
        arena_mapped_bytes=sum(arena.mapped_bytes for arena in arenas if not arena.closed),
        arena_reserved_bytes=sum(arena.reserved_bytes for arena in arenas if not arena.closed),
        tenants=tenants,
        sources=dict.fromkeys(("device", "torch", "process", "tenants", "arena"), "simulated"),
    )


def read_out_of_memory(error: BaseException, allocator: Allocator) -> OutOfMemory:
    """The figures of an out-of-memory error, as far as it has some, and the largest blocks that live now."""
    blocks = _largest_blocks(allocator)
    source = error if isinstance(error, DeviceOutOfMemoryError) else error.__cause__
    if not isinstance(source, DeviceOutOfMemoryError):
        return OutOfMemory(blocks=blocks)
    return OutOfMemory(
        tried_bytes=source.tried_bytes,
        free_bytes=source.free_bytes,
        allocated_bytes=source.torch_allocated_bytes,
        reserved_unallocated_bytes=source.torch_reserved_unallocated_bytes,
        private_pool_bytes=source.private_pool_bytes,
        blocks=blocks,
    )


def _largest_blocks(allocator: Allocator) -> tuple[Mapping[str, Any], ...]:
    blocks = [
        {"pool": pool_name(cast("PoolId", segment["segment_pool_id"])), "bytes": block["size"]}
        for segment in allocator.snapshot()
        for block in cast("list[dict[str, Any]]", segment["blocks"])
        if block["state"] == "active_allocated"
    ]
    return tuple(sorted(blocks, key=lambda block: -block["bytes"])[:_LARGEST_BLOCKS])
