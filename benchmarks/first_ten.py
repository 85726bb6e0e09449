"""
Ten questions about graph memory, asked of the card itself.

    python benchmarks/first_ten.py [LETTER ...] [--out DIRECTORY]

Prints one JSON object for each question on stdout and a table on stderr. With ``--out`` the objects are also written to
``first_ten.jsonl``, and the allocator history of question (i) to ``trace.json``. Every case runs in a process of its
own, forked from one that has imported torch and not touched the device: some of them end the process, or leave an
allocator or a context that nothing else may use. Bytes are ints in bytes, times ints in ns.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from startup_fsm.devices.cuda import CudaDevice
from startup_fsm.devices.cuda_arena import CudaArena
from startup_fsm.devices.cuda_readings import pool_segments, segments, trim_graph_memory
from startup_fsm.memory import MIB
from startup_fsm.trace import ACTIONS

Facts = dict[str, Any]

QUESTIONS = {
    "a": "does a MemPool object keep its id safe, and what pins a pool?",
    "b": "what do capture, instantiation, upload and first replay take outside torch?",
    "c": "what does loading kernels take, once or each time?",
    "d": "which tensors work over a half-mapped range, and what may be captured over it?",
    "e": "may memory be mapped or unmapped inside a capture?",
    "f": "does NVML know this process, and how far does it follow?",
    "g": "how late does memory come back after graphs are destroyed?",
    "h": "what does a failed capture break, and what repairs it?",
    "i": "what does the allocator ask of the driver over a small start?",
    "j": "do private pools come back with expandable segments?",
}
TIMEOUT_S = 120


def bindings(name: str) -> Any:
    """A module of cuda-python."""
    return importlib.import_module(f"cuda.bindings.{name}")


def free() -> int:
    """Free bytes of the device."""
    return int(torch.cuda.mem_get_info()[0])


def rest() -> int:
    """Free bytes after garbage, workspaces and caches are gone."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    trim_graph_memory(0)
    time.sleep(0.05)
    return free()


def held(key: tuple[int, int]) -> int:
    """Bytes of segments that a pool has."""
    return sum(high - low for low, high in pool_segments(0, key))


def words(error: BaseException) -> str:
    """Type and first line."""
    return f"{type(error).__name__}: {(str(error) or '-').splitlines()[0]}"


def attempt(body: Callable[[], Any]) -> str | None:
    """What a body raised; None where it did not."""
    try:
        body()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return words(error)
    return None


def captured(pool: Any, stream: Any, body: Callable[[], Any], *, keep: bool = False) -> tuple[Any, Any]:
    """A graph and what its body returned."""
    graph = torch.cuda.CUDAGraph(keep_graph=keep)
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        output = body()
    return graph, output


# (a) pools


def pools() -> Facts:
    """Capture, drop, empty: what is left, by owner of the pool, with and without a GEMM, cleared or not."""
    values, weights = torch.ones(MIB, device="cuda"), torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    weights @ weights
    stream = torch.cuda.Stream()
    rows = [
        _cycle(values, weights, stream, owner, gemm=gemm, clear=clear)
        for owner in ("MemPool", "handle")
        for gemm in (False, True)
        for clear in (False, True)
    ]
    pinned = [row for row in rows if row["left_bytes"]]
    return {
        "rows": rows,
        "recaptured_with_object": _recapture(values, stream, torch.cuda.MemPool()),
        "recaptured_with_handle": _recapture(values, stream, None),
        "answer": f"{len(pinned)} of {len(rows)} pools pinned, all by a workspace: "
        f"{all(row['gemm'] and not row['clear'] for row in pinned)}",
    }


def _cycle(values: Any, weights: Any, stream: Any, owner: str, *, gemm: bool, clear: bool) -> Facts:
    rest()
    pool = torch.cuda.MemPool() if owner == "MemPool" else None
    key = torch.cuda.graph_pool_handle() if pool is None else pool.id
    graph, output = captured(key, stream, lambda: (values * 2, weights @ weights if gemm else None))
    row: Facts = {"owner": owner, "gemm": gemm, "clear": clear, "held_bytes": held(key)}
    row["use_count_with_graph"] = None if pool is None else pool.use_count()
    del output
    graph.reset()
    row["use_count_without"] = None if pool is None else pool.use_count()
    if clear:
        torch._C._cuda_clearCublasWorkspaces()
    del pool
    torch.cuda.empty_cache()
    row["left_bytes"] = held(key)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    row["left_after_clearing_bytes"] = held(key)
    return row


def _recapture(values: Any, stream: Any, pool: Any) -> Facts:
    """Drop the only graph of a pool while its output lives, then capture into the same id."""
    key = torch.cuda.graph_pool_handle() if pool is None else pool.id
    graph, output = captured(key, stream, lambda: values * 2)
    graph.replay()
    graph.reset()
    error = attempt(lambda: captured(key, stream, lambda: values * 3))
    return {"error": error, "output_still_right": bool((output == 2).all())}


def cleared() -> Facts:
    """Clear workspaces after a capture, then allocate: the replay may write into what was allocated."""
    stream, rows = torch.cuda.Stream(), []
    for m, k, n, kind in (
        (16, 32_768, 16, "bfloat16"),
        (64, 65_536, 64, "bfloat16"),
        (64, 16_384, 64, "float32"),
        (256, 65_536, 128, "float32"),
        (8, 8_192, 4_096, "bfloat16"),
    ):
        left = torch.randn(m, k, device="cuda", dtype=getattr(torch, kind))
        right = torch.randn(k, n, device="cuda", dtype=getattr(torch, kind))
        rest()
        with torch.cuda.stream(stream):
            left @ right
        graph, output = captured(None, stream, lambda left=left, right=right: left @ right)
        graph.replay()
        torch.cuda.synchronize()
        before = output.clone()
        address, size = workspace(stream)
        torch._C._cuda_clearCublasWorkspaces()
        with torch.cuda.stream(stream):
            victim = torch.full((size,), 7, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        rows.append(
            {
                "shape": [m, k, n],
                "dtype": kind,
                "workspace_bytes": size,
                "reused": victim.data_ptr() == address,
                "overwritten_bytes": int((victim != 7).sum()),
                "result_differs": not torch.equal(before, output),
            }
        )
        graph.reset()
        del victim, output
    spoilt = sum(bool(row["overwritten_bytes"]) for row in rows)
    return {"rows": rows, "answer": f"replay wrote into another tensor for {spoilt} of {len(rows)} shapes"}


def workspace(stream: Any) -> tuple[int, int]:
    """Address and bytes of the largest live block of a stream in the default pool."""
    blocks = [
        (block["size"], block["address"])
        for segment in segments(0)
        if tuple(segment["segment_pool_id"]) == (0, 0) and segment["stream"] == stream.cuda_stream
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    size, address = max(blocks, default=(0, 0))
    return address, size


# (b) costs outside torch


def costs(nodes: int) -> Facts:
    """Free memory before and after each step of 64 graphs of so many nodes; and the same once more."""
    device, stream = CudaDevice(), torch.cuda.Stream()
    _costs_of(device, stream, 1, count=1)
    rows = [_costs_of(device, stream, nodes, count=64) for _ in range(2)]
    taken, kept, again = rows[0]["taken_bytes"], rows[0]["kept_bytes"], rows[1]["taken_bytes"]
    return {
        "rows": rows,
        "answer": f"64 graphs of {nodes} nodes: {taken / MIB:.0f} MiB, {taken / 64 / 1024:.1f} KiB a graph (upload "
        f"{rows[0]['upload_bytes']}, first replay {rows[0]['replay_bytes']}); kept after their end "
        f"{kept / MIB:.0f} MiB, the same again takes {again / MIB:.0f}",
    }


def _costs_of(device: CudaDevice, stream: Any, nodes: int, *, count: int) -> Facts:
    driver, number = bindings("driver"), torch.zeros(1, device="cuda")
    pool = torch.cuda.MemPool()

    def body() -> None:
        for _ in range(nodes):
            number.add_(1)

    start, owned, reserved = rest(), device.snapshot().process_bytes, torch.cuda.memory_reserved()
    times, readings = [time.perf_counter_ns()], [start]

    def mark() -> None:
        torch.cuda.synchronize()
        readings.append(free())
        times.append(time.perf_counter_ns())

    graphs = [captured(pool.id, stream, body, keep=True)[0] for _ in range(count)]
    mark()
    for graph in graphs:
        graph.instantiate()
    mark()
    for graph in graphs:
        driver.cuGraphUpload(graph.raw_cuda_graph_exec(), stream.cuda_stream)
    mark()
    for _ in range(2):
        for graph in graphs:
            graph.replay()
        mark()
    owns = device.snapshot().process_bytes
    found = bindings("runtime").cudaGraphGetNodes(graphs[0].raw_cuda_graph(), 0)[-1]
    for graph in graphs:
        graph.reset()
    # One that was reset and is still held keeps the state of the generator: a small segment of torch's.
    del graph, graphs, pool
    steps = [before - after for before, after in itertools.pairwise(readings)]
    names = ("capture", "instantiate", "upload", "replay", "second_replay")
    return {
        "nodes": nodes,
        "nodes_found": int(found),
        "count": count,
        **{f"{name}_bytes": step for name, step in zip(names, steps, strict=True)},
        **{f"{name}_ns": times[place + 1] - times[place] for place, name in enumerate(names)},
        "taken_bytes": sum(steps[1:]),
        "process_delta_bytes": None if owns is None or owned is None else owns - owned,
        "kept_bytes": start - rest(),
        "kept_by_torch_bytes": torch.cuda.memory_reserved() - reserved,
    }


# (c) kernels


def loading(mode: str) -> Facts:
    """The same capture twice, with kernels loaded when they are first used or all at once."""
    os.environ["CUDA_MODULE_LOADING"] = mode
    # cuDNN makes its handle at first use, which no capture may do.
    torch.backends.cuda.enable_cudnn_sdp(False)
    began = time.perf_counter_ns()
    weights = torch.randn(1_024, 1_024, device="cuda", dtype=torch.bfloat16)
    weights @ weights
    torch.cuda.synchronize()
    took = time.perf_counter_ns() - began
    total = torch.cuda.mem_get_info()[1]
    start = rest()
    context = total - start - torch.cuda.memory_reserved()
    stream, rows = torch.cuda.Stream(), []

    def body() -> Any:
        values = torch.nn.functional.rms_norm(weights, (1_024,))
        heads = values.view(1, 1_024, 8, 128).transpose(1, 2)
        values = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).sum(1).float()
        ordered = torch.nn.functional.silu(values).softmax(-1).sort(-1, descending=True)
        return ordered.values.cumsum(-1).argmax(-1), ordered.indices.flip(-1), values.log_softmax(-1).topk(8)

    for _ in range(2):
        before, clock = free(), time.perf_counter_ns()
        graph, output = captured(None, stream, body)
        seconds = time.perf_counter_ns() - clock
        alive = free()
        graph.reset()
        del output, graph
        rows.append({"taken_bytes": before - alive, "capture_ns": seconds, "kept_bytes": before - rest()})
    mode_now = bindings("driver").cuModuleGetLoadingMode()[1]
    return {
        "mode": str(mode_now),
        "first_use_ns": took,
        "outside_torch_at_start_bytes": context,
        "rows": rows,
        "answer": f"{mode}: {context / MIB:.0f} MiB outside torch at the start, first capture kept "
        f"{rows[0]['kept_bytes'] / MIB:.0f} MiB, the second {rows[1]['kept_bytes'] / MIB:.0f}",
    }


# (d) tensors over a range


def half_mapped() -> tuple[CudaArena, Any]:
    """64 MiB of addresses, of which 32 are mapped."""
    arena = CudaArena(0, count=1, block_bytes=MIB, blocks=64)
    arena.map_blocks(32)
    return arena, arena.buffers()[0]


def wraps() -> Facts:
    """Four ways from an address to a tensor over a range of which the first half is mapped."""
    torch.zeros(1, device="cuda")
    early = CudaArena(0, count=1, block_bytes=MIB, blocks=64)
    size, device = 64 * MIB, torch.device("cuda", 0)
    unmapped = {
        "storage": attempt(lambda: _by_storage(early.base, size, device)),
        "dlpack": attempt(lambda: _by_dlpack(early.base, size)),
        "array_interface": attempt(lambda: torch.as_tensor(_Interface(early.base, size), device=device)),
    }
    mapped = {}
    ways: dict[str, Callable[[int], Any]] = {
        "storage": lambda base: _by_storage(base, size, device),
        "dlpack": lambda base: _by_dlpack(base, size),
        "array_interface": lambda base: torch.as_tensor(_Interface(base, size), device=device),
        "pool": lambda base: _by_pool(base, size),
    }
    for name, way in ways.items():
        arena, _ = half_mapped()
        try:
            tensor = way(arena.base)
            tensor[: 32 * MIB].fill_(3)
            right = bool((tensor[: 32 * MIB] == 3).all())
            mapped[name] = {"same_address": tensor.data_ptr() == arena.base, "mapped_half_works": right}
        except RuntimeError as error:
            mapped[name] = {"error": words(error)}
    works = [name for name, each in mapped.items() if each.get("same_address") and each.get("mapped_half_works")]
    return {
        "before_mapping": unmapped,
        "half_mapped": mapped,
        "answer": f"over a half-mapped range: {', '.join(works)}",
    }


class _Interface:
    def __init__(self, address: int, size: int) -> None:
        layout = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None}
        self.__cuda_array_interface__ = layout


def _by_storage(address: int, size: int, device: torch.device) -> Any:
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,))


class _DLDevice(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DLType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("pointer", ctypes.c_void_p),
        ("device", _DLDevice),
        ("dimensions", ctypes.c_int32),
        ("element", _DLType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("owner", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_KEPT: list[Any] = []


def _by_dlpack(address: int, size: int) -> Any:
    shape = (ctypes.c_int64 * 1)(size)
    strides = (ctypes.c_int64 * 1)(1)
    tensor = _DLTensor(address, _DLDevice(2, 0), 1, _DLType(1, 8, 1), shape, strides, 0, None, None)
    _KEPT.extend((shape, strides, tensor))
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return torch.utils.dlpack.from_dlpack(make(ctypes.addressof(tensor), b"dltensor", None))


def _by_pool(address: int, size: int) -> Any:
    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    def allocate(_size: int, _device: int, _stream: int) -> int:
        return address

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    def release(_pointer: int, _size: int, _device: int, _stream: int) -> None: ...

    pointers = [ctypes.cast(each, ctypes.c_void_p).value for each in (allocate, release)]
    pool = torch.cuda.MemPool(torch._C._cuda_customAllocator(*pointers))
    _KEPT.extend((allocate, release, pool))
    with torch.cuda.use_mem_pool(pool):
        return torch.empty(size, dtype=torch.uint8, device="cuda")


def unmapped(kind: str) -> Facts:
    """Capture an operation on addresses without memory, map them, replay."""
    arena, tensor = half_mapped()
    source, runtime = torch.arange(MIB, device="cuda").to(torch.uint8), bindings("runtime")
    copy = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice

    def now() -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    operations: dict[str, Callable[[Any], Any]] = {
        "kernel": lambda part: part.add_(3),
        "memset": lambda part: checked(runtime.cudaMemsetAsync(part.data_ptr(), 0, MIB, now())),
        "memcpy": lambda part: checked(runtime.cudaMemcpyAsync(part.data_ptr(), source.data_ptr(), MIB, copy, now())),
    }
    operation, near, far = operations[kind], tensor[MIB : 2 * MIB], tensor[48 * MIB : 49 * MIB]
    operation(near)
    stream, graphs = torch.cuda.Stream(), list[Any]()
    facts: Facts = {"kind": kind}
    torch.cuda.synchronize()
    facts["capture_error"] = attempt(
        lambda: graphs.append(captured(None, stream, lambda: operation(far), keep=True)[0])
    )
    if graphs:
        facts["nodes"] = _kinds(graphs[0])
        facts["instantiate_error"] = attempt(graphs[0].instantiate)
        arena.map_blocks(64)
        expected = {"kernel": torch.full_like(far, 3), "memset": torch.zeros_like(far), "memcpy": source}[kind]
        if kind == "memset":
            far.fill_(9)
        facts["replay_error"] = attempt(graphs[0].replay)
        facts["right"] = bool(torch.equal(far, expected))
    instantiated = (facts.get("instantiate_error") or "instantiated") if graphs else "not instantiated"
    return facts | {
        "answer": f"{kind}: {facts['capture_error'] or 'captured'}; while unmapped {instantiated}; "
        f"right after mapping: {facts.get('right')}"
    }


def _kinds(graph: Any) -> list[str]:
    runtime = bindings("runtime")
    count = runtime.cudaGraphGetNodes(graph.raw_cuda_graph(), 0)[-1]
    nodes = runtime.cudaGraphGetNodes(graph.raw_cuda_graph(), count)[1]
    return [str(runtime.cudaGraphNodeGetType(node)[1]).rpartition(".")[2] for node in nodes]


def checked(result: tuple[Any, ...]) -> None:
    """Raise what a call of the runtime returned."""
    if int(result[0]) != 0:
        raise RuntimeError(str(result[0]))


def touched() -> Facts:
    """Copy from what is not mapped, then let a kernel read it, then anything."""
    _, tensor = half_mapped()
    copied, read = attempt(tensor[48 * MIB].item), attempt(lambda: tensor[48 * MIB : 49 * MIB] + 1)
    afterwards = attempt(lambda: torch.zeros(1, device="cuda"))
    facts = {"copied": copied, "read": read, "afterwards": afterwards}
    return facts | {"answer": f"a copy: {copied}; a kernel: {read}; after that: {afterwards}"}


# (e) mapping inside a capture


def mapped_inside(kind: str) -> Facts:
    """Map, or unmap, while a capture of another stream's kind is open."""
    arena, _ = half_mapped()
    number, stream = torch.zeros(1, device="cuda"), torch.cuda.Stream()
    facts: Facts = {"kind": kind}

    def body() -> None:
        number.add_(1)
        if kind == "map":
            facts["error"] = attempt_quietly(lambda: arena._map(arena.base + 32 * MIB, 2 * MIB))
        else:
            facts["error"] = attempt_quietly(lambda: arena._unmap(0))
        number.add_(1)

    graphs: list[Any] = []
    facts["capture_error"] = attempt(lambda: graphs.append(captured(None, stream, body)[0]))
    facts["replay_error"] = attempt(graphs[0].replay) if graphs else "nothing to replay"
    return facts | {"answer": f"{kind}: {facts['error'] or 'allowed'}; the capture: {facts['capture_error'] or 'fine'}"}


def attempt_quietly(body: Callable[[], Any]) -> str | None:
    """As ``attempt``, but without waiting for the device: a capture is open."""
    try:
        body()
    except RuntimeError as error:
        return words(error)
    return None


# (f) NVML


def own_process() -> Facts:
    """Find this process in the list, then let a tensor, an arena and graphs grow."""
    device = CudaDevice()
    nvml = device.nvml
    if nvml is None or nvml.trouble is not None:
        return {"answer": f"no NVML: {nvml and nvml.trouble}"}
    began = time.perf_counter_ns()
    listed = nvml.processes()
    cost = time.perf_counter_ns() - began
    rows: list[Facts] = []

    def grown(name: str, body: Callable[[], Any]) -> Any:
        before = device.snapshot()
        kept = body()
        torch.cuda.synchronize()
        after = device.snapshot()
        time.sleep(0.1)
        later = device.snapshot()
        owned = [each.process_bytes or 0 for each in (before, after, later)]
        rows.append(
            {
                "what": name,
                "used_delta_bytes": after.used_bytes - before.used_bytes,
                "process_delta_bytes": owned[1] - owned[0],
                "process_delta_later_bytes": owned[2] - owned[0],
            }
        )
        return kept

    number = torch.zeros(1, device="cuda")

    def graphs() -> list[Any]:
        def body() -> None:
            for _ in range(1_000):
                number.add_(1)

        made = [captured(None, device.capture_stream, body)[0] for _ in range(64)]
        for graph in made:
            graph.replay()
        return made

    def arena() -> Any:
        made = device.reserve(4, MIB, 1_024)
        made.map_blocks(128)
        return made

    kept = [
        grown("tensor", lambda: torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")),
        grown("arena", arena),
        grown("graphs", graphs),
    ]
    last, memory, settled = device.snapshot(), nvml.memory(), device.settle()
    del kept
    return {
        "pid": os.getpid(),
        "own_pid": nvml.own_pid,
        "own_source": nvml.own_source,
        "listed": {str(pid): size for pid, size in listed.items()},
        "processes_ns": cost,
        "rows": rows,
        "used_bytes": last.used_bytes,
        "process_bytes": last.process_bytes,
        "nvml_used_bytes": last.nvml_used_bytes,
        "nvml_reserved_bytes": last.nvml_reserved_bytes,
        "nvml_total_bytes": None if memory is None else memory.total,
        "total_bytes": last.total_bytes,
        "unexplained_bytes": last.unexplained_bytes,
        "snapshot_ns": last.cost_ns,
        "settle_ns": settled.duration_ns,
        "answer": f"found by {nvml.own_source}; used less this process {last.unexplained_bytes / MIB:.1f} MiB",
    }


# (g) settling


def late() -> Facts:
    """Destroy 64 graphs of 1,000 nodes and watch free memory; then graphs that own memory, before and after a trim."""
    number, stream = torch.zeros(1, device="cuda"), torch.cuda.Stream()

    def body() -> None:
        for _ in range(1_000):
            number.add_(1)

    before = rest()
    graphs = [captured(None, stream, body)[0] for _ in range(64)]
    for graph in graphs:
        graph.replay()
    torch.cuda.synchronize()
    alive = free()
    for graph in graphs:
        graph.reset()
    began, readings = time.perf_counter_ns(), [(0, free())]
    while time.perf_counter_ns() - began < 500_000_000:
        now = free()
        if now != readings[-1][1]:
            readings.append((time.perf_counter_ns() - began, now))
        time.sleep(0.002)
    trimmed = trim_graph_memory(0)
    owned = _graph_owned(stream)
    back = readings[-1][1] - readings[0][1]
    return {
        "taken_bytes": before - alive,
        "free_changes": readings,
        "kept_bytes": before - rest(),
        "trim_had_something": trimmed,
        "graph_owned": owned,
        "answer": f"{back} bytes came later than at once ({len(readings) - 1} changes); owned by graphs: "
        f"{owned['reserved_bytes']}, after reset {owned['after_reset_bytes']}, trimmed {owned['after_trim_bytes']}",
    }


def _graph_owned(stream: Any) -> Facts:
    """A capture with an allocation of the driver's own in it."""
    driver, runtime = bindings("driver"), bindings("runtime")
    attribute = driver.CUgraphMem_attribute.CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT

    def reserved() -> int:
        return int(driver.cuDeviceGetGraphMemAttribute(0, attribute)[1])

    def body() -> None:
        pointer = runtime.cudaMallocAsync(64 * MIB, stream.cuda_stream)[1]
        runtime.cudaMemsetAsync(pointer, 0, 64 * MIB, stream.cuda_stream)
        runtime.cudaFreeAsync(pointer, stream.cuda_stream)

    graph, _ = captured(None, stream, body)
    graph.replay()
    torch.cuda.synchronize()
    facts = {"reserved_bytes": reserved()}
    graph.reset()
    torch.cuda.synchronize()
    facts["after_reset_bytes"] = reserved()
    trim_graph_memory(0)
    return facts | {"after_trim_bytes": reserved()}


# (h) failed captures


def failing(pool: Any, stream: Any, graph: Any) -> str | None:
    """A capture that waits for the device, which no capture may."""
    values = torch.ones(MIB, device="cuda")

    def body() -> None:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            values * 2
            torch.cuda.synchronize()

    return attempt_quietly(body)


def broken() -> Facts:
    """What a failed capture leaves behind in plain torch, and what the two private calls repair."""
    stream, pool, graph = torch.cuda.Stream(), torch.cuda.MemPool(), torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream()
    facts: Facts = {"error": failing(pool.id, stream, graph)}
    facts["stream_left_current"] = torch.cuda.current_stream() == stream
    torch.cuda.set_stream(current)
    key = pool.id
    facts["broken"] = _health(pool)
    facts["end"] = attempt_quietly(lambda: torch._C._cuda_endAllocateToPool(0, key))
    facts["release"] = attempt_quietly(lambda: torch._C._cuda_releasePool(0, key))
    facts["repaired"] = _health(pool)
    generator: Any = torch.cuda.default_generators[0]
    facts["new_generator_state"] = attempt_quietly(lambda: generator.graphsafe_set_state(generator.clone_state()))
    facts["random_after_new_state"] = attempt(lambda: torch.rand(1, device="cuda"))
    facts["end_again"] = attempt_quietly(lambda: torch._C._cuda_endAllocateToPool(0, key))
    del pool
    torch.cuda.empty_cache()
    facts["left_bytes"] = held(key)
    values = torch.ones(16, device="cuda")
    facts["captures_again"] = attempt(lambda: captured(None, stream, lambda: values * 2))
    was, now, random = facts["broken"], facts["repaired"], facts["random_after_new_state"]
    return facts | {
        "answer": f"cache empties: {was['empties']}, repaired {now['empties']}; random numbers: "
        f"{was['random'] or 'work'}, repaired {now['random'] or 'work'}, new state {random or 'work'}"
    }


def _health(pool: Any) -> Facts:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    probe = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    during = torch.cuda.memory_reserved()
    del probe
    torch.cuda.empty_cache()
    return {
        "use_count": pool.use_count(),
        "empties": torch.cuda.memory_reserved() <= before < during,
        "random": attempt(lambda: torch.rand(1, device="cuda")),
    }


def repaired() -> Facts:
    """Our device: a capture that fails by an operation, by the body's own error, and for want of memory."""
    device, facts = CudaDevice(), {}
    values = torch.ones(MIB, device="cuda")

    def waits() -> Any:
        values * 2
        torch.cuda.synchronize()

    def raises() -> Any:
        values * 2
        raise KeyError("the body's own")

    def takes() -> Any:
        return torch.empty(1 << 40, dtype=torch.uint8, device="cuda")

    for name, body in (("operation", waits), ("body", raises), ("memory", takes)):
        pool = device.open_pool(name)
        kept = device.capture(lambda: values + 1, pool, size=1)
        row: Facts = {}
        try:
            device.capture(body, pool, size=2, warmups=0)
        except Exception as error:  # noqa: BLE001 - whatever it raises is the answer
            row |= {"error": words(error), "category": device.category(error)}
            row["context"] = None if error.__context__ is None else words(error.__context__)
            found = device.out_of_memory(error)
            row["tried_bytes"] = None if found is None else found.tried_bytes
        row["stream_restored"] = torch.cuda.current_stream() == torch.cuda.default_stream()
        kept.reset()
        repair = device.repair(pool)
        facts[name] = row | {"proven": repair.proven, "evidence": dict(repair.evidence)}
    return facts | {"answer": f"repair proven: {[facts[name]['proven'] for name in ('operation', 'body', 'memory')]}"}


def abandoned() -> Facts:
    """A failed capture that nobody repairs: the end of its MemPool, and that of another."""
    stream, pool, graph, other = torch.cuda.Stream(), torch.cuda.MemPool(), torch.cuda.CUDAGraph(), torch.cuda.MemPool()
    key, error = pool.id, failing(pool.id, stream, graph)
    del pool
    print(
        f"abandoned: {error}; its own MemPool ended, {held(key)} bytes left; now another", file=sys.stderr, flush=True
    )
    del other
    return {"error": error, "answer": "the end of another MemPool was survived"}


# (i) history


class Recorder:
    """The calls that leave no entry in the allocator's history, with their places in it."""

    def __init__(self) -> None:
        self.calls: list[Facts] = []

    def entries(self) -> list[Facts]:
        """The history of the device, without what snapshots add to it."""
        listed = torch.cuda.memory._snapshot()["device_traces"][0]
        return [entry for entry in listed if entry["action"] != "snapshot"]

    def call(self, name: str, pool: tuple[int, int] = (0, 0), stream: int | None = None) -> None:
        """Note a call that is made next, or, for ``begin`` and ``end``, was made last."""
        self.calls.append({"at": 0, "call": name, "pool": list(pool), "stream": stream})
        # Entries carry it, so that the place of every call is known afterwards.
        torch.cuda.memory._set_memory_metadata(str(len(self.calls)))

    def placed(self, entries: list[Facts]) -> list[Facts]:
        """The calls with the number of entries before each."""
        passed = [int(entry.get("user_metadata") or 0) for entry in entries]
        return [
            call | {"at": next((at for at, count in enumerate(passed) if count > place), len(entries))}
            for place, call in enumerate(self.calls)
        ]

    def empty(self) -> None:
        """Empty the cache."""
        gc.collect()
        torch.cuda.synchronize()
        self.call("empty_cache")
        torch.cuda.empty_cache()

    def open(self) -> Any:
        """A new pool."""
        pool = torch.cuda.MemPool()
        self.call("open_pool", pool.id)
        return pool

    @contextmanager
    def inside(self, pool: Any) -> Iterator[None]:
        """The scope of a pool."""
        with torch.cuda.use_mem_pool(pool):
            self.call("begin", pool.id)
            yield
        self.call("end", pool.id)
        self.call("release", pool.id)

    def capture(self, pool: Any, stream: Any, body: Callable[[], Any]) -> tuple[Any, Any]:
        """Warm up and capture, as ``torch.cuda.graph`` does it."""
        with torch.cuda.stream(stream):
            body()
        self.empty()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool.id)
            self.call("begin", pool.id, stream.cuda_stream)
            output = body()
            graph.capture_end()
        self.call("end", pool.id)
        return graph, output

    def end(self, pool_id: tuple[int, int], graphs: list[Any]) -> None:
        """Destroy graphs; the pool object is dropped by whoever holds it, right after this."""
        for graph in graphs:
            graph.reset()
            self.call("release", pool_id)
        self.call("release", pool_id)
        self.call("empty_cache", pool_id)


def history(out: str | None) -> Facts:
    """Load, one eager step, a KV cache and graphs in pools of their own, teardown; and the last two again."""
    stream, recorder = torch.cuda.Stream(), Recorder()
    torch.cuda.memory._set_memory_metadata("0")
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=100_000)
    width, layers = 1_024, 6
    embedding = torch.zeros(16_000, width, device="cuda", dtype=torch.bfloat16)
    weights = [
        [torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16) for rows in (width, 4 * width)]
        + [torch.ones(width, device="cuda", dtype=torch.bfloat16)]
        for _ in range(layers)
    ]

    def step(rows: int) -> Any:
        values = embedding[:rows]
        for square, wide, norm in weights:
            attention = torch.nn.functional.rms_norm(values, (width,), norm) @ square
            values = values + torch.nn.functional.silu(attention @ wide.T) @ wide
        return values @ embedding.T

    step(2_048)
    recorder.empty()
    for _ in range(2):
        cache, pool = recorder.open(), recorder.open()
        with recorder.inside(cache):
            blocks = [torch.zeros(6 * MIB + 512, dtype=torch.uint8, device="cuda") for _ in range(2 * layers)]
        made = [recorder.capture(pool, stream, lambda rows=rows: step(rows)) for rows in (256, 64, 8, 1)]
        torch._C._cuda_clearCublasWorkspaces()
        graphs = [graph for graph, _ in made]
        made.clear()
        recorder.end(pool.id, graphs)
        del pool
        recorder.empty()
        del blocks
        recorder.call("release", cache.id)
        recorder.call("empty_cache", cache.id)
        del cache
        recorder.empty()
    entries = recorder.entries()
    torch.cuda.memory._record_memory_history(None)
    rows = [[ACTIONS.index(entry["action"]), entry.get("addr", 0), entry["size"], entry["stream"]] for entry in entries]
    recorded = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(0),
        "total_bytes": torch.cuda.mem_get_info()[1],
        "calls": recorder.placed(entries),
        "entries": rows,
    }
    text = json.dumps(recorded, separators=(",", ":"))
    if out is not None:
        (Path(out) / "trace.json").write_text(text + "\n", encoding="utf-8")
    count = sum(ACTIONS[row[0]].startswith("segment") for row in rows)
    return {
        "keys": sorted(entries[0]),
        "entries": len(rows),
        "bytes": len(text),
        "answer": f"{len(rows)} entries, {count} of them segments",
    }


# (j) expandable segments


def expandable() -> Facts:
    """Capture, drop and release with expandable segments, for one allocation and for several that merge."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    device, facts = CudaDevice(), {}
    torch.cuda.empty_cache()
    for name, sizes in (("one", (30,)), ("several", (30, 50, 24, 70)), ("small_and_large", (1, 30, 1, 50))):
        before = device.snapshot()
        pool: Any = device.open_pool(name)
        graph = device.capture(
            lambda sizes=sizes: [torch.zeros(size * MIB, dtype=torch.uint8, device="cuda") for size in sizes],
            pool,
            size=1,
        )
        kinds = {bool(each["is_expandable"]) for each in segments(0) if tuple(each["segment_pool_id"]) == pool.key}
        graph.reset()
        error = attempt(pool.release)
        device.settle(clear_workspaces=True)
        left, key = held(pool.key), pool.key
        # Entering a pool that is released and not erased asserts; one that is erased is made anew.
        known = attempt_quietly(lambda key=key: torch._C._cuda_beginAllocateCurrentThreadToPool(0, key))
        if known is None:
            torch._C._cuda_endAllocateToPool(0, key)
            torch._C._cuda_releasePool(0, key)
        after = device.snapshot()
        facts[name] = {
            "expandable": sorted(kinds),
            "release_error": error,
            "left_bytes": left,
            "reserved_delta_bytes": after.reserved_bytes - before.reserved_bytes,
            "free_delta_bytes": before.free_bytes - after.free_bytes,
            "zombie": known,
        }
    return facts | {
        "answer": f"bytes left: {[each['left_bytes'] for each in facts.values()]}, released pools still known: "
        f"{[name for name, each in facts.items() if each['zombie']]}"
    }


CASES: dict[str, dict[str, Callable[[str | None], Facts]]] = {
    "a": {"pools": lambda _: pools(), "cleared": lambda _: cleared()},
    "b": {"10": lambda _: costs(10), "100": lambda _: costs(100), "1000": lambda _: costs(1_000)},
    "c": {"lazy": lambda _: loading("LAZY"), "eager": lambda _: loading("EAGER")},
    "d": {
        "wraps": lambda _: wraps(),
        "kernel": lambda _: unmapped("kernel"),
        "memset": lambda _: unmapped("memset"),
        "memcpy": lambda _: unmapped("memcpy"),
        "touch": lambda _: touched(),
    },
    "e": {"map": lambda _: mapped_inside("map"), "unmap": lambda _: mapped_inside("unmap")},
    "f": {"own": lambda _: own_process()},
    "g": {"late": lambda _: late()},
    "h": {"torch": lambda _: broken(), "ours": lambda _: repaired(), "abandoned": lambda _: abandoned()},
    "i": {"history": history},
    "j": {"expandable": lambda _: expandable()},
}


def run_case(letter: str, case: str, out: str | None, answer: Connection) -> None:
    """In a process of its own."""
    try:
        answer.send(CASES[letter][case](out))
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is told
        answer.send({"error": words(error), "where": traceback.format_exc().splitlines()[-8:]})


def ask(letter: str, case: str, out: str | None) -> Facts:
    """One case: what it found, how long it took, how its process ended."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_case, args=(letter, case, out, theirs))
    began = time.perf_counter_ns()
    process.start()
    theirs.close()
    found: Facts = {"error": f"no answer in {TIMEOUT_S} s"}
    try:
        if ours.poll(TIMEOUT_S):
            found = ours.recv()
    except EOFError:
        found = {"error": "the process ended without an answer"}
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join()
    return found | {"exit_code": process.exitcode, "duration_ns": time.perf_counter_ns() - began}


def main() -> None:
    """Ask, print, write."""
    parser = argparse.ArgumentParser(description="Ten questions about graph memory, asked of the card.")
    parser.add_argument("letters", nargs="*", metavar="LETTER", help=f"of {''.join(QUESTIONS)}; default: all")
    parser.add_argument("--out", help="directory for first_ten.jsonl and trace.json")
    given = parser.parse_args()
    multiprocessing.set_forkserver_preload(["torch", "startup_fsm.devices.cuda"])
    lines, table = [], []
    for letter in given.letters or QUESTIONS:
        cases = {case: ask(letter, case, given.out) for case in CASES[letter]}
        lines.append(json.dumps({"test": letter, "question": QUESTIONS[letter], "cases": cases}))
        print(lines[-1], flush=True)
        table += [(letter, case, found.get("answer") or found.get("error")) for case, found in cases.items()]
    for letter, case, answer in table:
        print(f"{letter}  {case:<10}  {answer}", file=sys.stderr)
    if given.out is not None:
        (Path(given.out) / "first_ten.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
