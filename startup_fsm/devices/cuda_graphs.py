"""
Pools, captures and repairs on CUDA. A pool is a ``torch.cuda.MemPool`` object, never a bare handle: it holds one
reference, so its id cannot be opened after its graphs died, and its end releases the segments.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Self, cast

import torch

from startup_fsm.devices.base import Repair
from startup_fsm.devices.cuda_readings import PoolKey, pool_name, pool_segments
from startup_fsm.memory import MIB

if TYPE_CHECKING:
    from startup_fsm.devices.cuda import CudaDevice

_PROBE: Final = 64 * MIB
_END, _RELEASE = "_cuda_endAllocateToPool", "_cuda_releasePool"


class CudaPool:
    """
    One pool of the allocator on one device.

    Attributes:
        key: Its id, as torch has it.
        ended: What was done when a capture into it failed, by private call; empty where none did.
    """

    def __init__(self, index: int, purpose: str) -> None:
        self._index = index
        self._purpose = purpose
        with torch.cuda.device(index):
            self._pool: Any = torch.cuda.MemPool()
        self.key: PoolKey = (int(self._pool.id[0]), int(self._pool.id[1]))
        self._scopes: list[ExitStack] = []
        self.ended: dict[str, str] = {}

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

    def keep_for_ever(self) -> None:
        """Never let it end: while torch takes a capture for open, the end of any pool aborts the process."""
        if self._pool is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pool))


class CudaGraph:
    """
    A captured step.

    Attributes:
        instantiate_bytes, upload_bytes: What these two took outside torch; None where they could not be told apart.
        duration_ns: Capture, instantiation and upload; the warm-up is not in it.
    """

    def __init__(self, graph: Any, *, size: int, output: Any, nodes: int | None) -> None:
        self._graph = graph
        self._size = size
        self._output = output
        self._nodes = nodes
        self.instantiate_bytes: int | None = None
        self.upload_bytes: int | None = None
        self.duration_ns = 0

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
    index: int, stream: Any, body: Callable[[], Any], pool: CudaPool, graph: Any, *, size: int, warmups: int = 1
) -> CudaGraph:
    """
    Warm up and capture ``body`` on ``stream`` into ``pool``, with a graph of :func:`new_graph`.

    One stream for all captures: blocks are kept by stream, and graphs that share a pool can only then share memory.
    A capture that fails leaves the pool open: see :func:`end_left_open`.
    """
    with torch.cuda.device(index):
        stream.wait_stream(torch.cuda.current_stream(index))
        # Where the end of a capture raises, torch.cuda.graph leaves its stream the current one; this scope does not.
        with torch.cuda.stream(stream):
            for _ in range(warmups):
                body()
            began = time.perf_counter_ns()
            with _uncollected(), torch.cuda.graph(graph, pool=cast("Any", pool.key), stream=stream):
                output = body()
        torch.cuda.current_stream(index).wait_stream(stream)
        captured = CudaGraph(graph, size=size, output=output, nodes=_nodes(graph))
        _instantiate(captured, graph, index, stream)
        captured.duration_ns = time.perf_counter_ns() - began
        return captured


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection: a MemPool that is collected inside a capture empties itself there, which asserts."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def new_graph() -> Any:
    """A graph of torch's that keeps its nodes, where torch can: they are counted, and instantiated apart."""
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


def end_left_open(index: int, pool: CudaPool) -> None:
    """
    End what a failed capture left open in the allocator; harmless where it left nothing.

    torch ends a capture that was invalidated before it ends the allocation to the pool. Then the pool stays open, one
    reference to it is never given back, the cache of the default pool can no longer be emptied, and random numbers
    cannot be drawn: the default generator still counts as captured. Two private calls and a new state cure that.
    """
    for name in (_END, _RELEASE):
        call = getattr(torch._C, name, None)  # noqa: SLF001 - no public call repairs a capture
        if call is None:
            pool.ended[name] = "torch has no such call"
            return
        try:
            call(index, pool.key)
        except RuntimeError as error:
            # Not open: the capture ended, and its reference is the graph's own.
            pool.ended.setdefault(name, str(error).splitlines()[0])
            return
        pool.ended[name] = "done"
    with suppress(RuntimeError):
        pool.ended["generator"] = _revive_generator(index)


def repair_allocator(device: CudaDevice, pool: CudaPool | None) -> Repair:
    """
    End and release a pool that a failed capture left open; then prove that the allocator works again.

    A capture of the engine's own went into no pool of ours, and cannot be ended from here: only the proof is tried.

    Proof: an allocation is freed, the cache emptied and reserved bytes fall; the pool is gone; random numbers are
    drawn; a capture into a new pool replays.
    """
    index = device.index
    evidence: dict[str, Any] = {}
    if pool is not None:
        end_left_open(index, pool)
        evidence |= pool.ended
        if evidence[_END] == "torch has no such call":
            return Repair(proven=False, evidence=evidence)
        evidence["use_count"] = pool.use_count()
    try:
        if pool is not None:
            pool.release()
        device.settle()
        evidence |= _proof(index)
        if evidence["reserved_with_probe_bytes"] > evidence["reserved_after_bytes"]:
            # Only now: these make a pool and end it.
            evidence.setdefault("generator", _revive_generator(index))
            evidence["captures_again"] = _captures_again(device)
    except RuntimeError as error:
        evidence["error"] = str(error).splitlines()[0]
    left = 0 if pool is None else sum(high - low for low, high in pool_segments(index, pool.key))
    evidence["pool_reserved_bytes"] = left
    proven = "error" not in evidence and left == 0 and evidence.get("captures_again", False)
    return Repair(proven=proven, evidence=evidence)


def _proof(index: int) -> dict[str, int]:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(index)
    # On a stream of its own, so that no cached block can serve it.
    with torch.cuda.stream(torch.cuda.Stream(index)):  # type: ignore[no-untyped-call]
        probe = torch.empty(_PROBE, dtype=torch.uint8, device=torch.device("cuda", index))
    during = torch.cuda.memory_reserved(index)
    del probe
    torch.cuda.empty_cache()
    after = torch.cuda.memory_reserved(index)
    return {"reserved_before_bytes": before, "reserved_with_probe_bytes": during, "reserved_after_bytes": after}


def _revive_generator(index: int) -> str:
    """
    Draw a random number; where the default generator still thinks that it is captured, give it a new state.

    Returns:
        ``works`` or ``new state``.
    """
    probe = torch.empty(1, device=torch.device("cuda", index))
    try:
        probe.uniform_()
    except RuntimeError:
        generator: Any = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())
        probe.uniform_()
        return "new state"
    return "works"


def _captures_again(device: CudaDevice) -> bool:
    count = torch.zeros(1, device=device.device)
    pool = CudaPool(device.index, "repair")
    graph = capture_graph(device.index, device.capture_stream, lambda: count.add_(1), pool, new_graph(), size=1)
    count.zero_()
    graph.replay()
    replayed = bool(count.item() == 1)
    graph.reset()
    pool.release()
    return replayed
