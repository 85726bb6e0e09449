"""
Pools, captures and repairs on CUDA. A pool is a ``torch.cuda.MemPool`` object, never a bare handle: it holds one
reference, so its id cannot be opened after its graphs died, and its end releases the segments.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Self, cast

import torch

from startup_fsm.devices.base import Repair
from startup_fsm.devices.cuda_readings import PoolKey, pool_name, pool_segments
from startup_fsm.memory import MIB

if TYPE_CHECKING:
    from startup_fsm.devices.cuda import CudaDevice

_PROBE: Final = 64 * MIB


class CudaPool:
    """One pool of the allocator on one device."""

    def __init__(self, index: int, purpose: str) -> None:
        self._index = index
        self._purpose = purpose
        self._pool: Any = torch.cuda.MemPool()
        self.key: PoolKey = (int(self._pool.id[0]), int(self._pool.id[1]))
        self._scopes: list[ExitStack] = []

    @property
    def id(self) -> str:
        """Identity in snapshots, such as ``0.3``."""
        return pool_name(self.key)

    @property
    def purpose(self) -> str:
        """What it was opened for."""
        return self._purpose

    @property
    def is_released(self) -> bool:
        """Whether our reference is gone."""
        return self._pool is None

    def __enter__(self) -> Self:
        scope = ExitStack()
        scope.enter_context(torch.cuda.use_mem_pool(self._pool, device=self._index))
        self._scopes.append(scope)
        return self

    def __exit__(self, *error: object) -> None:
        self._scopes.pop().close()

    def use_count(self) -> int:
        """References; 1 proves that no graph holds it. 0 after its release."""
        return 0 if self._pool is None else int(self._pool.use_count())

    def release(self) -> None:
        """Give up our reference: the pool's end empties it, which must not happen inside a capture."""
        self._pool = None


class CudaGraph:
    """
    A captured step.

    Attributes:
        instantiate_bytes, upload_bytes: What these two took outside torch; None where they could not be told apart.
    """

    def __init__(self, graph: Any, *, size: int, output: Any, nodes: int | None) -> None:
        self._graph = graph
        self._size = size
        self._output = output
        self._nodes = nodes
        self.instantiate_bytes: int | None = None
        self.upload_bytes: int | None = None

    @property
    def size(self) -> int:
        """Rows of the batch it was captured for."""
        return self._size

    @property
    def nodes(self) -> int | None:
        """Nodes of the graph."""
        return self._nodes

    @property
    def output(self) -> Any:
        """What the body returned; overwritten by every replay."""
        return self._output

    def replay(self) -> None:
        """Run it again on the same addresses."""
        self._graph.replay()

    def reset(self) -> None:
        """Destroy it; its reference to the pool goes with it."""
        self._output = None
        if self._graph is not None:
            self._graph.reset()
            self._graph = None


def capture_graph(
    index: int, stream: Any, body: Callable[[], Any], pool: CudaPool, *, size: int, warmups: int
) -> CudaGraph:
    """
    Warm up and capture ``body`` on ``stream`` into ``pool``.

    One stream for all captures: blocks are kept by stream, and graphs that share a pool can only then share memory.
    """
    with torch.cuda.device(index):
        stream.wait_stream(torch.cuda.current_stream(index))
        with torch.cuda.stream(stream):
            for _ in range(warmups):
                body()
        torch.cuda.current_stream(index).wait_stream(stream)
        graph = _new_graph()
        was_enabled = gc.isenabled()
        # A MemPool that is collected inside a capture would empty itself there, which asserts.
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=cast("Any", pool.key), stream=stream):
                output = body()
        finally:
            if was_enabled:
                gc.enable()
        nodes = _nodes(graph)
        captured = CudaGraph(graph, size=size, output=output, nodes=nodes)
        _instantiate(captured, graph, index, stream)
        return captured


def _new_graph() -> Any:
    try:
        return torch.cuda.CUDAGraph(keep_graph=True)
    except TypeError:
        return torch.cuda.CUDAGraph()


def _nodes(graph: Any) -> int | None:
    try:
        from cuda.bindings import runtime

        raw = graph.raw_cuda_graph()
    except (ImportError, AttributeError, RuntimeError):
        return None
    result = runtime.cudaGraphGetNodes(raw, 0)
    return int(result[-1]) if result[0] == runtime.cudaError_t.cudaSuccess else None


def _instantiate(captured: CudaGraph, graph: Any, index: int, stream: Any) -> None:
    """Instantiate and upload, each with the free memory that it took; 2 MiB is the smallest step that shows."""
    if not hasattr(graph, "instantiate"):
        return
    free = torch.cuda.mem_get_info(index)[0]
    try:
        graph.instantiate()
    except RuntimeError as error:
        # A graph without keep_graph is instantiated by the end of its capture.
        if "keep_graph" not in str(error):
            raise
        return
    instantiated = torch.cuda.mem_get_info(index)[0]
    captured.instantiate_bytes = free - instantiated
    try:
        from cuda.bindings import driver
    except ImportError:
        return
    if driver.cuGraphUpload(graph.raw_cuda_graph_exec(), stream.cuda_stream)[0] == driver.CUresult.CUDA_SUCCESS:
        torch.cuda.synchronize(index)
        captured.upload_bytes = instantiated - torch.cuda.mem_get_info(index)[0]


def repair_allocator(device: CudaDevice, pool: CudaPool) -> Repair:
    """
    End and release a pool that a failed capture left open; then prove it: allocate, free, empty, reserved falls.

    torch ends a capture that was invalidated before it ends the allocation to the pool, so the pool stays open, its
    reference is kept, and the cache of the default pool can no longer be emptied. Both private calls exist for this.
    """
    index, evidence = device.index, dict[str, Any]()
    before = pool.use_count()
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        call = getattr(torch._C, name, None)  # noqa: SLF001 - no public call repairs a capture
        if call is None:
            evidence[name] = "torch has no such call"
            continue
        try:
            # The second only where a reference was left behind: ours must stay.
            if name == "_cuda_endAllocateToPool" or pool.use_count() > 1:
                call(index, pool.key)
                evidence[name] = "done"
        except RuntimeError as error:
            evidence[name] = str(error).splitlines()[0]
    evidence |= {"use_count_before": before, "use_count_after": pool.use_count()}
    try:
        pool.release()
        device.settle()
        evidence |= _proof(index)
    except RuntimeError as error:
        evidence["error"] = str(error).splitlines()[0]
    left = sum(high - low for low, high in pool_segments(index, pool.key))
    evidence["pool_reserved_bytes"] = left
    proven = (
        "error" not in evidence
        and left == 0
        and evidence["reserved_with_probe_bytes"] > evidence["reserved_after_bytes"]
    )
    return Repair(proven=proven, evidence=evidence)


def _proof(index: int) -> dict[str, int]:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(index)
    probe = torch.empty(_PROBE, dtype=torch.uint8, device=torch.device("cuda", index))
    during = torch.cuda.memory_reserved(index)
    del probe
    torch.cuda.empty_cache()
    after = torch.cuda.memory_reserved(index)
    return {"reserved_before_bytes": before, "reserved_with_probe_bytes": during, "reserved_after_bytes": after}
