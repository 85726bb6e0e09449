"""
A device without a device: the caching allocator as a model, a capacity, and what a driver takes beside it.

This module counts bytes and imports no torch; an engine that knows its own sizes calls ``malloc``, ``free`` and
``launch``. ``following`` adds the tensors. Costs outside torch were measured on one H200 (driver 580, torch 2.11).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import attrs

from startup_fsm.allocator import Allocator
from startup_fsm.devices.arena import CountedArena
from startup_fsm.devices.base import ErrorCategory, OutOfMemory, Repair, Settled, pool_key
from startup_fsm.devices.costs import (
    DRIVER_OOM_WORDS,
    FORBIDDEN_WORDS,
    INVALIDATED_WORDS,
    Costs,
    DriverMemory,
    category_of,
)
from startup_fsm.devices.holdings import (
    ArenaBuffer,
    Recording,
    SimulatedBuffer,
    SimulatedGraph,
    SimulatedPool,
)
from startup_fsm.devices.readings import read_out_of_memory, read_snapshot
from startup_fsm.devices.repair import repair
from startup_fsm.engine import Graph, Pool
from startup_fsm.memory import Snapshot
from startup_fsm.pages import (
    DEFAULT_POOL,
    GIB,
    NEIGHBOUR,
    DeviceMemory,
    PoolId,
    TraceEntry,
    format_size,
)
from startup_fsm.probes import collect_garbage

DEFAULT_STREAM = 0
CAPTURE_STREAM = 1


class SimulatedDevice:
    """
    One accelerator as a model; the ``Device`` protocol without tensors.

    Args:
        total_bytes: Capacity as ``cudaMemGetInfo`` gives it; an H200 has 143,155.9 MiB.
        costs: What is taken outside torch and for workspaces.
        neighbours: Other processes that are there already, by label, in bytes.
        limit_bytes: What this process may reserve, or None.
        trace: Called with every entry of the allocator's history.

    Attributes:
        identity: What tells this device from others, for starts over several ranks; None where each has its own.

    Raises:
        RuntimeError: The context does not fit, in CUDA's words.
    """

    kind = "simulated"
    has_values = False
    identity: str | None = None

    def __init__(
        self,
        total_bytes: int,
        *,
        costs: Costs | None = None,
        neighbours: Mapping[str, int] | None = None,
        limit_bytes: int | None = None,
        trace: Callable[[TraceEntry], None] | None = None,
    ) -> None:
        self.costs = costs or Costs()
        self.memory = DeviceMemory(total_bytes)
        self.driver = DriverMemory(self.memory)
        self.allocator = Allocator(self.memory, limit_bytes=limit_bytes, trace=trace)
        self.stream = DEFAULT_STREAM
        self.kernels = 0
        self._lock = threading.RLock()
        self._busy = False
        self._waiting: deque[Callable[[], None]] = deque()
        self._purposes: dict[PoolId, str] = {DEFAULT_POOL: "default"}
        self._next_pool = 1
        self._workspaces: dict[int, int] = {}
        self._arenas: list[CountedArena] = []
        self._recording: Recording | None = None
        self._failed: set[PoolId] = set()
        self._next_arena = 1 << 49
        for label, nbytes in (neighbours or {}).items():
            self.neighbour_takes(label, nbytes)
        if not self.memory.take("context", self.costs.context_bytes, exact=True):
            raise RuntimeError(DRIVER_OOM_WORDS)

    @property
    def name(self) -> str:
        """For people and journals, such as ``simulated 80 GiB``."""
        return f"simulated {self.memory.total_bytes / GIB:.4g} GiB"

    @property
    def capturing(self) -> bool:
        """Whether a capture is open now."""
        return self._recording is not None

    # What an engine that counts calls itself.

    def malloc(self, nbytes: int) -> int:
        """
        Allocate on the current stream, from the pool that is open, and return the address.

        Raises:
            DeviceOutOfMemoryError: In torch's words.
        """
        with self._lock:
            self._busy = True
            try:
                return self.allocator.malloc(nbytes, self.stream)
            finally:
                self._busy = False
                self._catch_up()

    def free(self, address: int) -> None:
        """Free a block."""
        self._soon(lambda: self.allocator.free(address))

    def launch(self, kernels: int = 1, *, gemm: bool = False) -> None:
        """
        Run kernels. A capture counts them as nodes. The first matrix product loads the libraries' code, and the first
        of a stream takes a workspace.

        Raises:
            RuntimeError: The driver is out of memory.
        """
        if self._recording is not None:
            self._recording.nodes += kernels
        self.kernels += kernels
        if gemm:
            self.driver.take_once("modules", self.costs.modules_bytes)
        if gemm and self.stream not in self._workspaces and self.costs.workspace_bytes:
            self._workspaces[self.stream] = self.malloc(self.costs.workspace_bytes)

    def forbid_in_capture(self) -> None:
        """Invalidate the open capture, as an operation does that may not be captured; nothing when none is open."""
        if self._recording is not None:
            self._recording.invalidated = True
            raise RuntimeError(FORBIDDEN_WORDS)

    def neighbour_takes(self, label: str, nbytes: int) -> None:
        """Another process takes memory; ``label`` is its name in snapshots and in the out-of-memory sentence."""
        if not self.memory.take(NEIGHBOUR + label, nbytes):
            raise ValueError(f"neighbour {label} asked for {nbytes} bytes, {self.memory.free_bytes} are free")

    def neighbour_frees(self, label: str, nbytes: int | None = None) -> None:
        """Another process gives memory back; None is all of it."""
        held = self.memory.held(NEIGHBOUR + label)
        self.memory.give_back(NEIGHBOUR + label, held if nbytes is None else nbytes)

    # The protocol.

    def scope(self) -> AbstractContextManager[None]:
        """Bodies of states run inside this; a count of bytes has nothing to follow."""
        return nullcontext()

    def snapshot(self, *, settled: bool = False) -> Snapshot:
        """Read memory now, without changing anything."""
        begun = time.perf_counter_ns()
        taken = read_snapshot(self.allocator, self._purposes, self._arenas)
        return attrs.evolve(taken, settled=settled, cost_ns=time.perf_counter_ns() - begun)

    def settle(self, *, clear_workspaces: bool = False) -> Settled:
        """
        Collect garbage, empty the cache, let the driver trim what its graphs left.

        Raises:
            RuntimeError: A capture is open.
        """
        begun = time.perf_counter_ns()
        self.synchronize()
        collect_garbage()
        if clear_workspaces:
            self.clear_workspaces()
        self.allocator.empty_cache()
        late = self.driver.trim() if self.costs.graphs_return else 0
        return Settled(
            polls=2 if late else 1,
            late_return_bytes=late,
            duration_ns=time.perf_counter_ns() - begun,
            workspaces_cleared=clear_workspaces,
        )

    def clear_workspaces(self) -> None:
        """Drop the cuBLAS workspaces of all streams; the next matrix product of a stream takes a new one."""
        held, self._workspaces = self._workspaces, {}
        for address in held.values():
            self.free(address)

    def label(self, text: str) -> None:
        """The model keeps no trace of its own."""

    def reset_peaks(self) -> None:
        """Peaks of the allocator start again from what it holds now."""
        self.allocator.reset_peaks()

    def synchronize(self) -> None:
        """Wait for everything that was launched; a model is always done, but a capture forbids it."""
        self.forbid_in_capture()

    def open_pool(self, purpose: str) -> SimulatedPool:
        """A new pool of its own."""
        key = (0, self._next_pool)
        self._next_pool += 1
        self._purposes[key] = purpose
        return SimulatedPool(self, key, purpose)

    def capture(self, body: Callable[[], Any], pool: Pool, *, size: int, warmups: int = 1) -> Graph:
        """
        Warm up and capture *body* on the one capture stream into *pool*.

        As in torch, an error of the body ends the capture cleanly, unless it invalidated the capture: then the
        allocator is left as torch leaves it, with the pool still open, until :meth:``repair``.

        Raises:
            RuntimeError: An operation that may not be captured, or the driver is out of memory.
        """
        key = cast("SimulatedPool", pool).key
        if self._recording is not None:
            self.forbid_in_capture()
        with self.on_stream(CAPTURE_STREAM):
            for _ in range(warmups):
                body()
            # What `torch.cuda.graph` does on entry; it does not collect garbage.
            self.allocator.empty_cache()
            self.allocator.begin_allocate_to_pool(key, frozenset({CAPTURE_STREAM}))
            recording = self._recording = self._new_recording(key)
            try:
                output = body()
            except BaseException:
                self._end_capture(recording)
                if not recording.invalidated:
                    self.allocator.release_pool(key)
                raise
            self._end_capture(recording)
        if recording.invalidated:
            # The body swallowed the error; ending the capture finds it.
            raise RuntimeError(INVALIDATED_WORDS)
        return self._instantiate(recording, size, output)

    def buffers(self, count: int, size: int) -> list[Any]:
        """*count* buffers of *size* bytes from the pool that is open."""
        return [SimulatedBuffer(self, size) for _ in range(count)]

    def reserve(self, count: int, block_bytes: int, blocks: int) -> CountedArena:
        """An arena of *count* sub-ranges for *blocks* blocks of *block_bytes* bytes each, as a byte counter."""
        base = self._next_arena
        arena = CountedArena(
            self.memory,
            count=count,
            block_bytes=block_bytes,
            blocks=blocks,
            base=base,
            refuse=self._mapping_refused,
            full=self._arena_full,
            buffer=ArenaBuffer,
        )
        self._next_arena += arena.reserved_bytes
        self._arenas.append(arena)
        return arena

    def category(self, error: BaseException) -> ErrorCategory | None:
        """How this device reads an exception."""
        return category_of(error)

    def out_of_memory(self, error: BaseException) -> OutOfMemory | None:
        """The figures of an out-of-memory error; None when it is none. Blocks are the largest that live now."""
        return read_out_of_memory(error, self.allocator) if self.category(error) == "oom" else None

    def holder_test(self, pool: str | None) -> Callable[[Any], bool]:
        """A test for "does this buffer live in the pool of that id (None: in the arena)"."""
        key = None if pool is None else pool_key(pool)

        def lives_there(buffer: Any) -> bool:
            address = getattr(buffer, "address", None)
            return isinstance(address, int) and self._lives_in(address, key)

        return lives_there

    def has_graphs(self, pool: str) -> bool:
        """Whether somebody holds the pool of that id: the model has references where torch has graphs."""
        use = self.allocator.pools().get(pool_key(pool))
        return use is not None and use.use_count > 0

    def address(self, tensor: Any) -> int:
        """Device address of a buffer's first byte."""
        return int(tensor.address)

    def repair(self, pool: Pool | None) -> Repair:
        """After a failed capture: end and release *pool*, settle, and prove that the allocator works again."""
        return repair(self, cast("SimulatedPool | None", pool))

    # For graphs, repair and the torch part.

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Allocate and launch on *stream* inside."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def drop_graph(self, key: PoolId, driver_bytes: int) -> None:
        """Give up what one graph held: its reference to the pool, its memory in the driver."""

        def drop() -> None:
            self.allocator.release_pool(key)
            self.driver.give_back(driver_bytes)

        self._soon(drop)

    def abandon_pool(self, key: PoolId) -> None:
        """Release a pool whose object died; while a capture is open torch would abort, the model waits."""

        def release() -> None:
            self.allocator.release_pool(key)
            if not self.allocator.captures_underway:
                self.allocator.empty_cache(key)

        self._soon(release)

    def end_failed_capture(self, key: PoolId) -> bool:
        """End and release the pool that an invalidated capture left open; False if it left none."""
        if key not in self._failed:
            return False
        self._failed.discard(key)
        self.allocator.end_allocate_to_pool(key)
        self.allocator.release_pool(key)
        return True

    def _end_capture(self, recording: Recording) -> None:
        self._recording = None
        if recording.invalidated:
            self._failed.add(recording.key)
        else:
            self.allocator.end_allocate_to_pool(recording.key)

    def _new_recording(self, key: PoolId) -> Recording:
        return Recording(key)

    def _instantiate(self, recording: Recording, size: int, output: Any) -> SimulatedGraph:
        nbytes = self.costs.graph_bytes + self.costs.node_bytes * recording.nodes
        try:
            self.driver.take_once("capture", self.costs.capture_bytes)
            self.driver.take(nbytes)
        except RuntimeError:
            self.allocator.release_pool(recording.key)
            raise
        return SimulatedGraph(self, recording, size=size, output=output, driver_bytes=nbytes)

    def _soon(self, action: Callable[[], None]) -> None:
        # A finalizer may run in the middle of an allocation, because the collector does: then it waits for its end.
        with self._lock:
            self._waiting.append(action)
            if not self._busy:
                self._catch_up()

    def _catch_up(self) -> None:
        self._busy = True
        try:
            while self._waiting:
                self._waiting.popleft()()
        finally:
            self._busy = False

    def _arena_full(self, nbytes: int) -> Exception:
        return RuntimeError(
            f"{DRIVER_OOM_WORDS}: mapping {format_size(nbytes)}, {format_size(self.memory.free_bytes)} free"
        )

    def _mapping_refused(self) -> str | None:
        if self._recording is None:
            return None
        return "mapping memory while a capture is open\nhint: grow the arena in a state of its own"

    def _lives_in(self, address: int, key: PoolId | None) -> bool:
        if key is None:
            return any(arena.owns(address) for arena in self._arenas)
        return self.allocator.is_allocated(address) and self.allocator.pool_of(address) == key
