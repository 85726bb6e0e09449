"""
A CUDA device through torch, with NVML beside it. What torch can do is detected, versions are never compared.

Nothing here calls CUDA from another thread. Workspaces are cleared only where ``settle`` is told to: after the first
real capture they are baked into the graphs, and replay would write to freed memory.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final, cast

import torch

from startup_fsm.devices.base import Arena, ErrorCategory, OutOfMemory, Repair, Settled, pool_key
from startup_fsm.devices.cuda_arena import CudaArena
from startup_fsm.devices.cuda_graphs import (
    CudaGraph,
    CudaPool,
    capture_graph,
    end_left_open,
    new_graph,
    repair_allocator,
)
from startup_fsm.devices.cuda_observer import Sight, stamp, watch
from startup_fsm.devices.cuda_readings import PoolKey, largest_blocks, pool_segments, pool_usage, trim_graph_memory
from startup_fsm.devices.host import host_available_bytes, resident_bytes
from startup_fsm.devices.nvml import Nvml
from startup_fsm.engine import Graph, Pool
from startup_fsm.importers.torch_oom import parse_sentence
from startup_fsm.memory import Snapshot, Tenant
from startup_fsm.probes import any_graph, collect_garbage

_POLL_S: Final = 0.02
_LONGEST_SETTLE_S: Final = 1.0
_STILL: Final = 3
_OOM_WORDS: Final = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_CAPTURE_WORDS: Final = (
    "stream is capturing",
    "StreamCapture",
    "operation failed due to a previous error during capture",
    "capturing stream",
    "graph capture",
)


class CudaDevice:
    """
    One GPU of this process.

    Args:
        index: As torch counts them.
        use_nvml: Whether NVML is asked; without it every byte that is used is charged to us.
        oom_directory: Where a full snapshot for memory_viz is written when memory runs out; None for none.

    Attributes:
        at_oom: What was seen when memory ran out last; taken by :meth:`out_of_memory`.

    Raises:
        RuntimeError: No CUDA here.
    """

    kind = "cuda"
    has_values = True

    def __init__(self, index: int | None = None, *, use_nvml: bool = True, oom_directory: Path | None = None) -> None:
        if not torch.cuda.is_available():
            msg = "device: torch sees no CUDA device here\nhint: use the device sim"
            raise RuntimeError(msg)
        self.index = torch.cuda.current_device() if index is None else index
        self.device = torch.device("cuda", self.index)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(self.device)
        self.capture_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._purposes: dict[tuple[int, int], str] = {(0, 0): "default"}
        self._pools: weakref.WeakSet[CudaPool] = weakref.WeakSet()
        self._arenas: list[CudaArena] = []
        self.oom_directory = oom_directory
        self.at_oom: Sight | None = None
        watch(self)
        # The allocator of pinned memory may ask a graph whose capture failed, by address, for as long as it runs.
        self._failed: list[Any] = []
        properties = torch.cuda.get_device_properties(self.index)
        self._name = properties.name
        self.identity: str | None = f"GPU-{properties.uuid}"
        self._is_integrated = bool(getattr(properties, "is_integrated", False))
        self.nvml = Nvml(str(properties.uuid)) if use_nvml else None
        if self.nvml is not None:
            self.nvml.find_own(self._probe_allocation)
            torch.cuda.reset_peak_memory_stats(self.index)

    @property
    def name(self) -> str:
        """Its product name and index."""
        return f"cuda:{self.index} {self._name}"

    def _probe_allocation(self, size: int) -> Callable[[], None]:
        held = [torch.empty(size, dtype=torch.uint8, device=self.device)]
        torch.cuda.synchronize(self.index)

        def release() -> None:
            held.clear()
            torch.cuda.empty_cache()

        return release

    def scope(self) -> AbstractContextManager[None]:
        """Bodies run as they are."""
        return nullcontext()

    def snapshot(self, *, settled: bool = False) -> Snapshot:
        """Read memory now; about 0.2 ms, and 3 ms where thousands of blocks are alive."""
        began = time.perf_counter_ns()
        free, total = torch.cuda.mem_get_info(self.index)
        stats = torch.cuda.memory_stats(self.index)
        pools = pool_usage(self.index, self._purposes)
        memory = None if self.nvml is None else self.nvml.memory()
        listed = {} if self.nvml is None else self.nvml.processes()
        own = None if self.nvml is None else self.nvml.own_pid
        sources = {"device": "mem_get_info", "torch": "memory_stats", "arena": "arena"}
        if self._is_integrated:
            # cudaMemGetInfo leaves out what the host could give back.
            free, sources["device"] = max(free, host_available_bytes() or 0), "mem_get_info, MemAvailable"
        if own is not None and self.nvml is not None:
            sources["process"] = f"NVML by {self.nvml.own_source}"
            sources["tenants"] = "NVML"
        arenas = [arena for arena in self._arenas if not arena.is_closed]
        return Snapshot(
            total_bytes=total,
            free_bytes=min(free, total),
            nvml_used_bytes=None if memory is None else memory.used,
            nvml_free_bytes=None if memory is None else memory.free,
            nvml_reserved_bytes=None if memory is None else memory.reserved,
            process_bytes=None if own is None else listed.get(own),
            allocated_bytes=stats.get("allocated_bytes.all.current", 0),
            requested_bytes=stats.get("requested_bytes.all.current"),
            reserved_bytes=stats.get("reserved_bytes.all.current", 0),
            allocated_peak_bytes=stats.get("allocated_bytes.all.peak", 0),
            reserved_peak_bytes=stats.get("reserved_bytes.all.peak", 0),
            retries=stats.get("num_alloc_retries", 0),
            ooms=stats.get("num_ooms", 0),
            pools=pools,
            arena_mapped_bytes=sum(arena.mapped_bytes for arena in arenas),
            arena_reserved_bytes=sum(arena.reserved_bytes for arena in arenas),
            host_rss_bytes=resident_bytes(),
            tenants=()
            if own is None
            else tuple(Tenant(label=f"pid {pid}", bytes=size) for pid, size in sorted(listed.items()) if pid != own),
            settled=settled,
            cost_ns=time.perf_counter_ns() - began,
            sources=sources,
        )

    def settle(self, *, clear_workspaces: bool = False) -> Settled:
        """Collect, synchronize, clear where told, empty, trim; then read until free memory stands still."""
        began = time.perf_counter_ns()
        collect_garbage(thaw=True)
        torch.cuda.synchronize(self.index)
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # noqa: SLF001 - torch has no public call
        cleared = clear_workspaces and clear is not None
        if cleared and clear is not None:
            clear()
        torch.cuda.empty_cache()
        trim_graph_memory(self.index)
        first, _ = torch.cuda.mem_get_info(self.index)
        readings = [first]
        deadline = time.monotonic() + _LONGEST_SETTLE_S
        while len(set(readings[-_STILL:])) > 1 or len(readings) < _STILL:
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
            readings.append(torch.cuda.mem_get_info(self.index)[0])
        return Settled(
            polls=len(readings),
            late_return_bytes=max(0, readings[-1] - first),
            duration_ns=time.perf_counter_ns() - began,
            workspaces_cleared=cleared,
        )

    def reset_peaks(self) -> None:
        """Of the allocator of this device; process-wide, so an engine that resets too changes what we read."""
        torch.cuda.reset_peak_memory_stats(self.index)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.index)

    def open_pool(self, purpose: str) -> Pool:
        """A ``MemPool`` object: it holds a reference, so its id can never be opened after its graphs died."""
        pool = CudaPool(self.index, purpose)
        self._purposes[pool.key] = purpose
        self._pools.add(pool)
        return pool

    def capture(self, body: Callable[[], Any], pool: Pool, *, size: int, warmups: int = 1) -> Graph:
        """Warm up and capture on the one capture stream; capture, instantiation and upload apart where torch can."""
        graph, into = new_graph(), cast("CudaPool", pool)
        try:
            return capture_graph(self.index, self.capture_stream, body, into, graph, size=size, warmups=warmups)
        except BaseException:
            # One that ended well before its body raised holds a reference to the pool.
            graph.reset()
            self._failed.append(graph)
            end_left_open(self.index, into)
            raise

    def buffers(self, count: int, size: int) -> list[Any]:
        """Zeroed: padding rows and masked slots are read."""
        return [torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(count)]

    def reserve(self, count: int, block_bytes: int, blocks: int) -> Arena:
        """CUDA virtual memory through cuda-python."""
        arena = CudaArena(self.index, count=count, block_bytes=block_bytes, blocks=blocks)
        self._arenas.append(arena)
        return arena

    def category(self, error: BaseException) -> ErrorCategory | None:
        """By type, else by the words of torch and CUDA: a driver call that fails raises a plain RuntimeError."""
        if _out_of_memory(error) is not None:
            return "oom"
        text = str(error)
        if "use_count > 0" in text:
            return "pool"
        return "capture" if any(words in text for words in _CAPTURE_WORDS) else None

    def out_of_memory(self, error: BaseException) -> OutOfMemory | None:
        """The figures of the sentence, and the largest blocks as they were when memory ran out."""
        found = _out_of_memory(error)
        if found is None:
            return None
        sight, self.at_oom = self.at_oom, None
        blocks = self.blocks() if sight is None else sight.blocks
        free = torch.cuda.mem_get_info(self.index)[0] if sight is None else sight.free
        said = parse_sentence(str(found))
        if said is None:
            return OutOfMemory(tried_bytes=None if sight is None else sight.tried, free_bytes=free, blocks=blocks)
        return OutOfMemory(
            tried_bytes=said.tried_bytes,
            free_bytes=free if said.free_bytes is None else said.free_bytes,
            allocated_bytes=said.allocated_bytes,
            reserved_unallocated_bytes=said.reserved_unallocated_bytes,
            private_pool_bytes=said.private_pool_bytes,
            blocks=blocks,
        )

    def blocks(self) -> tuple[Mapping[str, Any], ...]:
        """The largest live blocks now, by pool."""
        return largest_blocks(self.index, self._purposes)

    def label(self, text: str) -> None:
        """Stamp what follows in torch's own allocation history, so that memory_viz shows our states."""
        # What an engine caught itself is none of the next state's.
        self.at_oom = None
        stamp(text)

    def holder_test(self, pool: str | None) -> Callable[[Any], bool]:
        """By address: the segments that the pool still has when the test is first used, or the arenas' ranges."""
        ranges: list[tuple[int, int]] = []
        read = False

        def lives_there(tensor: Any) -> bool:
            nonlocal read
            if isinstance(tensor, torch.cuda.CUDAGraph):
                return pool is not None and _captured_into(tensor, pool_key(pool))
            if not read:
                ranges.extend(self._ranges(pool))
                read = True
            if tensor.device.type != "cuda":
                return False
            address = tensor.untyped_storage().data_ptr()
            return any(low <= address < high for low, high in ranges)

        return lives_there

    def _ranges(self, pool: str | None) -> list[tuple[int, int]]:
        if pool is not None:
            return pool_segments(self.index, pool_key(pool))
        return [(arena.base, arena.base + arena.reserved_bytes) for arena in self._arenas if not arena.is_closed]

    def has_graphs(self, pool: str) -> bool:
        """By the graphs of torch that are alive; what only garbage holds counts."""
        key = pool_key(pool)
        return any_graph(lambda graph: _captured_into(graph, key))

    def address(self, tensor: Any) -> int:
        """Of its first byte."""
        return int(tensor.data_ptr())

    def repair(self, pool: Pool | None) -> Repair:
        """End and release the pool that a failed capture left open, and prove that the allocator works again."""
        repaired = repair_allocator(self, cast("CudaPool | None", pool))
        if not repaired.proven:
            for opened in self._pools:
                opened.keep_for_ever()
        return repaired


def _captured_into(graph: Any, key: PoolKey) -> bool:
    try:
        return tuple(graph.pool()) == key
    except RuntimeError:
        # It captured nothing, or was reset.
        return False


def _out_of_memory(error: BaseException) -> BaseException | None:
    """
    The error that says that memory ran out; None where none does.

    The end of a capture raises in place of what ended it, which is then its context.
    """
    one: BaseException | None = error
    while one is not None:
        text = str(one)
        is_device = isinstance(one, RuntimeError)
        if isinstance(one, torch.OutOfMemoryError) or (is_device and any(words in text for words in _OOM_WORDS)):
            return one
        one = one.__context__ if is_device and any(words in text for words in _CAPTURE_WORDS) else None
    return None


__all__ = ["CudaDevice", "CudaGraph", "CudaPool"]
