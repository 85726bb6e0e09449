"""
What would poison the process of the tests. Each function runs in a process of its own and returns plain data.

Run by the fixture `child`, which sets `wanted` and `answer`.
"""

from __future__ import annotations

import importlib

import torch

from startup_fsm.devices.cuda import CudaDevice
from startup_fsm.devices.cuda_arena import CudaArena
from startup_fsm.devices.cuda_readings import pool_segments, segments
from startup_fsm.memory import MIB

CLEAR = torch._C._cuda_clearCublasWorkspaces


def first_line(error):
    """The sentence of an error."""
    return (str(error) or type(error).__name__).splitlines()[0]


def captured(pool, stream, body):
    """A graph of plain torch, and what its body returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        output = body()
    return graph, output


def zombie():
    """Drop the only graph of a bare handle while its output lives, then capture into the handle again."""
    device = CudaDevice(use_nvml=False)
    values, handle = torch.ones(MIB, device="cuda"), torch.cuda.graph_pool_handle()
    graph, output = captured(handle, device.capture_stream, lambda: values * 2)
    graph.replay()
    graph.reset()
    try:
        captured(handle, device.capture_stream, lambda: values * 3)
    except RuntimeError as error:
        return {"error": first_line(error), "category": device.category(error), "output": float(output[0])}
    return {"error": None}


def cleared():
    """Clear workspaces after a capture, as nobody may, and see whose memory the replay writes to then."""
    stream, rows = torch.cuda.Stream(), []
    for m, k, n, dtype in ((64, 65_536, 64, torch.bfloat16), (64, 16_384, 64, torch.float32)):
        left, right = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(k, n, device="cuda", dtype=dtype)
        CLEAR()
        torch.cuda.empty_cache()
        with torch.cuda.stream(stream):
            left @ right
        graph, _ = captured(None, stream, lambda left=left, right=right: left @ right)
        torch.cuda.synchronize()
        address, size = largest_block(stream)
        CLEAR()
        with torch.cuda.stream(stream):
            victim = torch.full((size,), 7, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        overwritten = int((victim != 7).sum())
        rows.append({"bytes": size, "reused": victim.data_ptr() == address, "overwritten": overwritten})
        graph.reset()
        del victim
    return {"rows": rows}


def largest_block(stream):
    """Address and bytes of the largest live block of a stream in the default pool: its workspace."""
    blocks = [
        (block["size"], block["address"])
        for segment in segments(0)
        if tuple(segment["segment_pool_id"]) == (0, 0) and segment["stream"] == stream.cuda_stream
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    size, address = max(blocks)
    return address, size


def empties():
    """Whether the cache of the default pool can be emptied."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    probe = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    during = torch.cuda.memory_reserved()
    del probe
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() <= before < during


def draws():
    """What drawing a random number raises; None where it works."""
    try:
        torch.rand(1, device="cuda")
    except RuntimeError as error:
        return first_line(error)
    return None


def waits(values):
    """What no capture may do: wait for the device."""

    def body():
        values * 2
        torch.cuda.synchronize()

    return body


def crippled():
    """A capture of plain torch that failed."""
    stream, pool, graph = torch.cuda.Stream(), torch.cuda.MemPool(), torch.cuda.CUDAGraph()
    values, before, message = torch.ones(MIB, device="cuda"), torch.cuda.current_stream(), None
    try:
        with torch.cuda.graph(graph, pool=pool.id, stream=stream):
            waits(values)()
    except RuntimeError as error:
        message = first_line(error)
    left = torch.cuda.current_stream() == stream
    torch.cuda.set_stream(before)
    found = {"error": message, "stream_left_current": left}
    found |= {"use_count": pool.use_count(), "empties": empties(), "random": draws()}
    torch._C._cuda_endAllocateToPool(0, pool.id)
    torch._C._cuda_releasePool(0, pool.id)
    found |= {"use_count_ended": pool.use_count(), "empties_ended": empties(), "random_ended": draws()}
    generator = torch.cuda.default_generators[0]
    generator.graphsafe_set_state(generator.clone_state())
    return found | {"random_new_state": draws()}


def abandoned():
    """The end of another MemPool, while a failed capture counts as open."""
    stream, pool, graph, other = torch.cuda.Stream(), torch.cuda.MemPool(), torch.cuda.CUDAGraph(), torch.cuda.MemPool()
    try:
        with torch.cuda.graph(graph, pool=pool.id, stream=stream):
            waits(torch.ones(MIB, device="cuda"))()
    except RuntimeError:
        pass
    del other
    return {"survived": pool.use_count()}


def failed(body, *, raises=Exception):
    """A capture of ours that fails, with another graph of its pool alive; then the repair."""
    device = CudaDevice(use_nvml=False)
    values = torch.ones(MIB, device="cuda")
    pool = device.open_pool("throwaway_graphs")
    other = device.capture(lambda: values + 1, pool, size=1)
    found = {}
    try:
        device.capture(body(values), pool, size=2, warmups=0)
    except raises as error:
        facts = device.out_of_memory(error)
        found |= {"type": type(error).__name__, "error": first_line(error), "category": device.category(error)}
        found["tried_bytes"] = None if facts is None else facts.tried_bytes
    found["stream_restored"] = torch.cuda.current_stream() == torch.cuda.default_stream()
    found["empties_at_once"] = empties()
    other.replay()
    found["other_graph_right"] = bool((other.output == 2).all())
    other.reset()
    repair = device.repair(pool)
    found |= {"proven": repair.proven, "evidence": dict(repair.evidence), "empties": empties()}
    found["random"] = 0 <= float(torch.rand(1, device="cuda")) < 1
    again = device.open_pool("throwaway_graphs")
    graph = device.capture(lambda: values + torch.rand_like(values), again, size=1)
    graph.replay()
    found["captures_random"] = bool(((graph.output >= 1) & (graph.output <= 2)).all())
    return found


def forbidden():
    """An operation that no capture may do."""
    return failed(waits)


def own_error():
    """The body raises by itself; the capture is fine."""

    def body(values):
        def raising():
            values * 2
            raise KeyError("the body's own")

        return raising

    return failed(body)


def out_of_memory():
    """A capture that asks for 1 TiB."""
    return failed(lambda _: lambda: torch.empty(1 << 40, dtype=torch.uint8, device="cuda"))


def unmapped():
    """Copy from what an arena has not mapped, then let a kernel read it."""
    _, tensor = half_mapped()
    found = {"inside": int(tensor[31 * MIB]), "copied": raised(tensor[48 * MIB].item)}
    found["goes_on"] = float(torch.ones(4, device="cuda").sum())
    return found | {"read": raised(lambda: int((tensor[48 * MIB : 49 * MIB] + 1).sum()))}


def half_mapped():
    """64 MiB of addresses, of which 32 are mapped."""
    arena = CudaArena(0, count=1, block_bytes=MIB, blocks=64)
    arena.map_blocks(32)
    return arena, arena.buffers()[0]


def raised(body):
    """The sentence of what a body raised; None where it did not."""
    try:
        body()
    except RuntimeError as error:
        return first_line(error)
    return None


def nodes_over_unmapped():
    """Capture a kernel, a memset and a copy on addresses without memory."""
    runtime = importlib.import_module("cuda.bindings.runtime")
    arena, tensor = half_mapped()
    stream, far, found = torch.cuda.Stream(), tensor[48 * MIB : 49 * MIB], {}
    source = torch.ones(MIB, dtype=torch.uint8, device="cuda")
    source.add_(3)
    torch.cuda.synchronize()

    def checked(result):
        if int(result[0]) != 0:
            raise RuntimeError(str(result[0]))

    to_device = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    addresses = far.data_ptr(), source.data_ptr()
    bodies = {
        "kernel": lambda: far.add_(3),
        "memset": lambda: checked(runtime.cudaMemsetAsync(addresses[0], 0, MIB, stream.cuda_stream)),
        "copy": lambda: checked(runtime.cudaMemcpyAsync(*addresses, MIB, to_device, stream.cuda_stream)),
    }
    graphs = {}
    for name, body in bodies.items():
        graph = graphs[name] = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, stream=stream):
            found[name] = raised(body)
    found["kernel_instantiated"] = raised(graphs["kernel"].instantiate)
    found["memset_instantiated"] = raised(graphs["memset"].instantiate)
    arena.map_blocks(64)
    graphs["kernel"].replay()
    return found | {"kernel_right": bool((far == 3).all())}


def first_capture():
    """What the first capture of a process leaves reserved, and what the second does."""
    device = CudaDevice(use_nvml=False)
    values = torch.ones(MIB, device="cuda")
    device.settle(clear_workspaces=True)
    reserved = [torch.cuda.memory_reserved()]
    for _ in range(2):
        pool = device.open_pool("throwaway_graphs")
        graph = device.capture(lambda: values * 2, pool, size=1)
        graph.reset()
        pool.release()
        device.settle(clear_workspaces=True)
        reserved.append(torch.cuda.memory_reserved())
    return {"first": reserved[1] - reserved[0], "second": reserved[2] - reserved[1]}


def expandable():
    """Pools of ours where torch was told to use expandable segments."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    device, left = CudaDevice(use_nvml=False), []
    for sizes in ((30,), (30, 50, 24, 70)):
        pool = device.open_pool("throwaway_graphs")
        graph = device.capture(
            lambda sizes=sizes: [torch.zeros(size * MIB, dtype=torch.uint8, device="cuda") for size in sizes],
            pool,
            size=1,
        )
        graph.reset()
        pool.release()
        device.settle(clear_workspaces=True)
        left.append(sum(high - low for low, high in pool_segments(0, pool.key)))
    return {"left": left}


def neighbour():
    """Hold 512 MiB until the other end of the pipe is closed."""
    pipe = globals()["answer"]
    held = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    pipe.send("held")
    try:
        pipe.recv()
    except EOFError:
        del held


if __name__ == "child":
    found = globals()[globals()["wanted"]]()
    if found is not None:
        globals()["answer"].send(found)
