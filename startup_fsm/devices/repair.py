"""
Repairing a simulated allocator after a capture that was invalidated, and the proof of it. Imports no torch.

Torch offers two private calls for this, ``_cuda_endAllocateToPool`` and ``_cuda_releasePool``; the model has the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from startup_fsm.devices.base import Repair
from startup_fsm.pages import MIB, DeviceOutOfMemoryError, InternalAssertError

if TYPE_CHECKING:
    from startup_fsm.devices.holdings import SimulatedPool
    from startup_fsm.devices.simulated import SimulatedDevice

PROBE_BYTES = MIB
# A stream that nothing else uses: the probe cannot be served from a cached block.
_PROBE_STREAM = 3


def repair(device: SimulatedDevice, pool: SimulatedPool | None) -> Repair:
    """End and release *pool*, settle; then prove it: allocate, free, empty: reserved falls, the pool is gone."""
    allocator = device.allocator
    evidence: dict[str, Any] = {}
    if pool is not None:
        evidence["capture_was_open"] = device.end_failed_capture(pool.key)
    try:
        if pool is not None:
            pool.release()
        device.settle()
        evidence |= _probe(device)
    except (DeviceOutOfMemoryError, InternalAssertError) as error:
        evidence["error"] = str(error)
    use = None if pool is None else allocator.pools().get(pool.key)
    if pool is not None:
        evidence["pool_reserved_bytes"] = 0 if use is None else use.reserved_bytes
        evidence["pool_gone"] = use is None
    evidence["captures_underway"] = len(allocator.captures_underway)
    proven = "error" not in evidence and use is None and not evidence["captures_underway"]
    proven = proven and evidence["reserved_with_probe_bytes"] > evidence["reserved_after_bytes"]
    return Repair(proven=proven, evidence=evidence)


def _probe(device: SimulatedDevice) -> dict[str, int]:
    before = device.allocator.reserved_bytes
    with device.on_stream(_PROBE_STREAM):
        address = device.malloc(PROBE_BYTES)
    during = device.allocator.reserved_bytes
    device.free(address)
    device.allocator.empty_cache()
    after = device.allocator.reserved_bytes
    return {"reserved_before_bytes": before, "reserved_with_probe_bytes": during, "reserved_after_bytes": after}
