"""
Memory of a CUDA device for a process that must not notice: nothing is allocated, waited for, emptied or reset.

The live device of this package probes and settles; inside vLLM's own measurements that would change what they measure.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch

from startup_fsm.devices.cuda_readings import pool_usage
from startup_fsm.devices.nvml import Nvml
from startup_fsm.memory import MIB, Snapshot, Tenant

#: What NVML's figure of this process may be off by while it grows, in bytes.
_NEAR = 64 * MIB


class Readings:
    """
    One device of this process, after its context was made.

    Args:
        index: As torch counts them.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        properties = torch.cuda.get_device_properties(index)
        self.name = f"cuda:{index} {properties.name}"
        self._nvml = Nvml(str(properties.uuid))
        self._listed: dict[int, int | None] = {}
        self._reserved = 0
        if os.getpid() in self._nvml.processes():
            self._nvml.own_pid, self._nvml.own_source = os.getpid(), "pid"

    def snapshot(self) -> Snapshot:
        """Memory now, in bytes: about 1 ms where few blocks are alive, 4 ms where thousands are."""
        began = time.perf_counter_ns()
        free, total = torch.cuda.mem_get_info(self.index)
        stats = torch.cuda.memory_stats(self.index)
        memory, listed = self._nvml.memory(), self._nvml.processes()
        reserved = stats.get("reserved_bytes.all.current", 0)
        self._find_own(listed, reserved)
        own = self._nvml.own_pid
        sources = {"device": "mem_get_info", "torch": "memory_stats"}
        if own is not None:
            sources["process"] = sources["tenants"] = f"NVML by {self._nvml.own_source}"
        return Snapshot(
            total_bytes=total,
            free_bytes=min(free, total),
            nvml_used_bytes=None if memory is None else memory.used,
            nvml_free_bytes=None if memory is None else memory.free,
            nvml_reserved_bytes=None if memory is None else memory.reserved,
            process_bytes=None if own is None else listed.get(own),
            allocated_bytes=stats.get("allocated_bytes.all.current", 0),
            requested_bytes=stats.get("requested_bytes.all.current"),
            reserved_bytes=reserved,
            allocated_peak_bytes=stats.get("allocated_bytes.all.peak", 0),
            reserved_peak_bytes=stats.get("reserved_bytes.all.peak", 0),
            retries=stats.get("num_alloc_retries", 0),
            ooms=stats.get("num_ooms", 0),
            pools=pool_usage(self.index, {(0, 0): "default"}),
            tenants=() if own is None else tuple(_tenants(listed, own)),
            sources=sources,
            cost_ns=time.perf_counter_ns() - began,
        )

    def _find_own(self, listed: dict[int, int | None], reserved: int) -> None:
        """In a container NVML shows the host's pids: ours is the one that grows as our allocator does."""
        grown = reserved - self._reserved
        if self._nvml.own_pid is None and grown > 4 * _NEAR:
            near = [
                pid
                for pid, held in listed.items()
                if held is not None and abs(held - (self._listed.get(pid) or 0) - grown) <= max(_NEAR, grown // 20)
            ]
            if len(near) == 1:
                self._nvml.own_pid, self._nvml.own_source = near[0], "growth"
        self._listed, self._reserved = listed, reserved


def _tenants(listed: dict[int, int | None], own: int) -> Iterator[Tenant]:
    for pid, held in listed.items():
        if pid != own:
            yield Tenant(label=f"pid {pid}", bytes=held)
