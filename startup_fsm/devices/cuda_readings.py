"""What torch's allocator shows: bytes by pool, segments, live blocks. Unknown keys of a snapshot are ignored."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch

from startup_fsm.memory import PoolUsage

_LARGEST_BLOCKS: Final = 8
_LIVE: Final = frozenset({"active_allocated", "active_awaiting_free", "active_pending_free"})

PoolKey = tuple[int, int]


def segments(index: int) -> list[dict[str, Any]]:
    """Segments of one device, without traces where torch can leave them out: they cost seconds where history is on."""
    arguments = {"include_traces": False} if _has_argument("include_traces") else {}
    listed = torch.cuda.memory_snapshot(**arguments)  # type: ignore[no-untyped-call]
    return [each for each in listed if each.get("device", index) == index]


def _has_argument(name: str) -> bool:
    return name in inspect.signature(torch.cuda.memory_snapshot).parameters


def pool_key(segment: Mapping[str, Any]) -> PoolKey:
    """Which pool a segment belongs to; the default pool where torch does not say."""
    first, second = segment.get("segment_pool_id", (0, 0))
    return int(first), int(second)


def pool_name(key: PoolKey) -> str:
    """Identity of a pool in snapshots, such as ``0.3``."""
    return f"{key[0]}.{key[1]}"


def pool_usage(index: int, purposes: Mapping[PoolKey, str]) -> tuple[PoolUsage, ...]:
    """Bytes by pool id; the default pool first, even when it is empty."""
    usage: dict[PoolKey, list[int]] = {(0, 0): [0, 0, 0]}
    for segment in segments(index):
        held = usage.setdefault(pool_key(segment), [0, 0, 0])
        held[0] += int(segment.get("total_size", 0))
        held[1] += int(segment.get("active_size", 0))
        held[2] += sum(
            int(block.get("requested_size", block.get("size", 0)))
            for block in segment.get("blocks", ())
            if block.get("state") in _LIVE
        )
    return tuple(
        PoolUsage(
            pool=pool_name(key),
            purpose=purposes.get(key),
            reserved_bytes=held[0],
            active_bytes=held[1],
            requested_bytes=held[2],
        )
        for key, held in sorted(usage.items())
    )


def pool_segments(index: int, key: PoolKey) -> list[tuple[int, int]]:
    """Address ranges of the segments that a pool has now."""
    return [
        (int(segment["address"]), int(segment["address"]) + int(segment["total_size"]))
        for segment in segments(index)
        if pool_key(segment) == key
    ]


def largest_blocks(index: int, purposes: Mapping[PoolKey, str]) -> tuple[Mapping[str, Any], ...]:
    """The largest live blocks, with their pool and, where torch recorded it, the line that allocated them."""
    blocks: list[dict[str, Any]] = []
    for segment in segments(index):
        key = pool_key(segment)
        for block in segment.get("blocks", ()):
            if block.get("state") in _LIVE:
                shown = {"pool": pool_name(key), "purpose": purposes.get(key), "bytes": int(block.get("size", 0))}
                frames = block.get("frames") or ()
                if frames:
                    shown["frame"] = f"{frames[0].get('filename')}:{frames[0].get('line')} {frames[0].get('name')}"
                blocks.append(shown)
    return tuple(sorted(blocks, key=lambda block: -block["bytes"])[:_LARGEST_BLOCKS])


def trim_graph_memory(index: int) -> bool:
    """Give back what the driver keeps for graphs' own allocations; False where cuda-python is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return False
    # The argument is a CUdevice, which for one process is torch's index as long as none is hidden between them.
    result = driver.cuDeviceGetGraphMemAttribute(
        index, driver.CUgraphMem_attribute.CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT
    )
    if result[0] != driver.CUresult.CUDA_SUCCESS or int(result[1]) == 0:
        return False
    return bool(driver.cuDeviceGraphMemTrim(index)[0] == driver.CUresult.CUDA_SUCCESS)
