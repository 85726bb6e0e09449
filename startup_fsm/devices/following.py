"""
The simulated device for torch: it follows the storages of real CPU tensors, or of fake ones, and allocates for them.

A storage takes a block when an operation returns it and gives it back when its last tensor is gone. What no operation
shows is ``adopt``-ed; what is first seen as an input is adopted too, and counted as unseen. Not seen at all: scratch
memory inside kernels, tensors of other threads until they are used here, and buffers of libraries.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from startup_fsm.devices.arena import CountedArena, HostArena
from startup_fsm.devices.base import pool_key
from startup_fsm.devices.costs import INVALIDATED_WORDS, Costs
from startup_fsm.devices.holdings import Recording
from startup_fsm.devices.operators import (
    FUSED,
    Kind,
    alias,
    flat,
    rebuilt,
    sort_scratch,
    storage_key,
    storage_of,
    tensors_in,
    undisturbed,
    zeroed,
)
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.devices.tape import Source, Tape
from startup_fsm.pages import DeviceOutOfMemoryError, PoolId, TraceEntry


@attrs.frozen(kw_only=True)
class Untracked:
    """
    What following did not see being made.

    Attributes:
        unseen_storages, unseen_bytes: First seen as the input of an operation, and adopted then.
        thread_storages, thread_bytes: Made by an operation on a thread that had not entered the scope itself.
    """

    unseen_storages: int = 0
    unseen_bytes: int = 0
    thread_storages: int = 0
    thread_bytes: int = 0


class _Followed(weakref.ref[torch.UntypedStorage]):
    """A storage that has a block: the weak reference whose end frees it."""

    __slots__ = ("address", "key", "nbytes", "owner", "recording")

    address: int
    key: int
    nbytes: int
    # For a storage made in a capture with values: what really holds its bytes, and for which tape.
    owner: torch.UntypedStorage | None
    recording: Recording | None


class _Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, device: FollowingDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "prim":
            # A fake being asked for its device: no memory, no kernel.
            return func(*args, **(kwargs or {}))
        kind = self._device.kind_of(func)
        if kind.composite:
            # In inference mode composite operators arrive whole; a GPU's allocator sees their parts.
            with self:
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        return self._device.run(func, kind, args, kwargs or {})


class _Fuse(TorchFunctionMode):
    def __init__(self, device: FollowingDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in FUSED and not torch.is_grad_enabled():
            return self._device.run_fused(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class FollowingDevice(SimulatedDevice):
    """
    A simulated device for engines that are written in torch; the whole ``Device`` protocol.

    Inside ``scope`` every strided tensor is taken for a tensor of the device. Out of memory is
    ``torch.OutOfMemoryError`` with the model's sentence, its numbers as attributes, and the model's error as cause.

    Args:
        total_bytes: Capacity as ``cudaMemGetInfo`` gives it.
        fake: Tensors are fakes: shapes and bytes without values, so a 70B engine starts on a laptop.
        costs, neighbours, limit_bytes, trace: As for ``SimulatedDevice``.
    """

    def __init__(
        self,
        total_bytes: int,
        *,
        fake: bool = False,
        costs: Costs | None = None,
        neighbours: Mapping[str, int] | None = None,
        limit_bytes: int | None = None,
        trace: Callable[[TraceEntry], None] | None = None,
    ) -> None:
        super().__init__(total_bytes, costs=costs, neighbours=neighbours, limit_bytes=limit_bytes, trace=trace)
        self.untracked = Untracked()
        self._fake_mode = FakeTensorMode() if fake else None
        self._live: dict[int, _Followed] = {}
        self._mapped: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._kinds: dict[Any, Kind] = {}
        self._threads: set[int] = set()

    @property
    def has_values(self) -> bool:  # type: ignore[override]
        """False when tensors are fakes and nothing can be compared."""
        return self._fake_mode is None

    def scope(self) -> AbstractContextManager[None]:
        """Follow this thread's tensors inside; with fakes, make them fakes. Scopes of one thread may be nested."""
        return nullcontext() if threading.get_ident() in self._threads else self._outermost_scope()

    @contextmanager
    def _outermost_scope(self) -> Iterator[None]:
        thread = threading.get_ident()
        with ExitStack() as stack:
            if self._fake_mode is not None:
                stack.enter_context(self._fake_mode)
            stack.enter_context(_Follow(self))
            stack.enter_context(_Fuse(self))
            self._threads.add(thread)
            try:
                yield
            finally:
                self._threads.discard(thread)

    def malloc(self, nbytes: int) -> int:
        """
        Allocate on the current stream, from the pool that is open, and return the address.

        Raises:
            torch.OutOfMemoryError: In torch's words.
        """
        try:
            return super().malloc(nbytes)
        except DeviceOutOfMemoryError as error:
            raised = torch.OutOfMemoryError(str(error))
            for name in ("tried_bytes", "free_bytes", "total_bytes", "process_bytes", "private_pool_bytes"):
                setattr(raised, name, getattr(error, name))
            raise raised from error

    def adopt(self, *holders: Any) -> int:
        """
        Allocate for tensors that no operation showed, such as what a loader read; returns the bytes that are new.

        Args:
            holders: Modules, tensors, or lists, tuples and dicts of them. A storage that is known is passed over.
        """
        before = self.allocator.requested_bytes
        for tensor in tensors_in(holders):
            self._follow(tensor)
        return self.allocator.requested_bytes - before

    def buffers(self, count: int, size: int) -> list[Any]:
        """*count* zeroed ``uint8`` tensors of *size* bytes from the pool that is open."""
        made = []
        for _ in range(count):
            with self._unfollowed():
                buffer = zeroed(size) if self.has_values else torch.empty(size, dtype=torch.uint8)
            self._follow(buffer)
            made.append(buffer)
        return made

    def reserve(self, count: int, block_bytes: int, blocks: int) -> CountedArena:
        """An arena for *blocks* blocks: host memory under real tensors, a byte counter under fakes."""
        if self._fake_mode is not None:
            arena = super().reserve(count, block_bytes, blocks)
            arena.make_buffers_with(self._fake_buffer)
            return arena
        host = HostArena(
            self.memory,
            count=count,
            block_bytes=block_bytes,
            blocks=blocks,
            refuse=self._mapping_refused,
            full=self._arena_full,
        )
        tensor = host.buffer
        host.make_buffers_with(lambda address, size: self._map(address, lambda: tensor(address, size)))
        self._arenas.append(host)
        return host

    def holder_test(self, pool: str | None) -> Callable[[Any], bool]:
        """A test for "does its storage live in the pool of that id (None: in the arena)"; it makes nothing."""
        key = None if pool is None else pool_key(pool)

        def lives_there(tensor: Any) -> bool:
            storage = storage_of(tensor)
            if storage is None:
                return False
            if key is None:
                return storage_key(storage) in self._mapped
            followed = self._live.get(storage_key(storage))
            return followed is not None and self._lives_in(followed.address, key)

        return lives_there

    def address(self, tensor: Any) -> int:
        """
        Device address of a tensor's first byte.

        Raises:
            ValueError: The tensor is not followed.
        """
        storage = storage_of(tensor)
        key = None if storage is None else storage_key(storage)
        offset = tensor.storage_offset() * tensor.element_size()
        if key in self._mapped:
            return self._mapped[key][1] + int(offset)
        if key not in self._live:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not on {self.name}\nhint: adopt() it")
        return self._live[key].address + int(offset)

    # For the dispatch mode.

    def kind_of(self, operation: Any) -> Kind:
        """What is known of an operator."""
        kind = self._kinds.get(operation)
        if kind is None:
            kind = self._kinds[operation] = Kind(operation)
        return kind

    def run_fused(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of several operations as the one kernel that it is on a GPU."""

        def on_fakes(first: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return torch.empty_like(first)

        with self._unfollowed():
            return self.run(function if self.has_values else on_fakes, Kind(), args, kwargs)

    def run(self, operation: Any, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation: adopt what it reads, allocate what it returns, count and record its kernel."""
        recording = self._recording
        if recording is not None:
            self._check_capturable(recording, kind, args)
        read = self._note_inputs(kind, args, kwargs)
        result = operation(*args, **kwargs)
        fresh = [
            (place, output)
            for place, output in enumerate(flat(result))
            if isinstance(output, torch.Tensor)
            and (storage := storage_of(output)) is not None
            and storage_key(storage) not in read
        ]
        tape = recording if isinstance(recording, Tape) else None
        values = not any(isinstance(output, FakeTensor) for _, output in fresh) and self._fake_mode is None
        if tape is not None and values and fresh:
            result = self._alias_outputs(result, fresh)
        else:
            for _, output in fresh:
                self._follow(output, made=True)
        if kind.mutable:
            self._follow_resized(flat(result))
        if kind.sorts and (scratch := sort_scratch(args[0])):
            self.free(self.malloc(scratch))
        if (fresh and not kind.empty) or (kind.mutable and not kind.moves_views):
            self.launch(gemm=kind.gemm)
            if tape is not None:
                tape.add(operation, args, kwargs, fresh if values else None)
        return result

    def _check_capturable(self, recording: Recording, kind: Kind, args: tuple[Any, ...]) -> None:
        if recording.invalidated:
            raise RuntimeError(INVALIDATED_WORDS)
        masked = kind.indexed and any(mask.dtype in {torch.bool, torch.uint8} for mask in tensors_in(args[1:2]))
        if kind.forbidden or masked:
            self.forbid_in_capture()

    def _note_inputs(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
        read = set()
        for tensor in tensors_in((args, kwargs)):
            storage = storage_of(tensor)
            if storage is None:
                continue
            key = storage_key(storage)
            read.add(key)
            if key in self._live or key in self._mapped or not storage.nbytes():
                continue
            if kind.fresh:
                # A constant: a capture keeps a copy of it, whatever the engine does with the tensor.
                keep = self._recording is not None and self.has_values
                self._follow(tensor, owner=tensor.clone().untyped_storage() if keep else None, made=True)
            else:
                self._count_unseen(storage.nbytes())
                self._follow(tensor)
        return read

    def _count_unseen(self, nbytes: int) -> None:
        seen = self.untracked
        self.untracked = attrs.evolve(
            seen, unseen_storages=seen.unseen_storages + 1, unseen_bytes=seen.unseen_bytes + nbytes
        )

    def _alias_outputs(self, result: Any, fresh: list[tuple[int, torch.Tensor]]) -> Any:
        aliases: dict[int, torch.UntypedStorage] = {}
        replaced = {}
        for place, output in fresh:
            if output.untyped_storage().nbytes():
                replaced[place] = alias(output, aliases)
                self._follow(replaced[place], owner=output.untyped_storage(), made=True)
        places = iter(range(len(flat(result))))
        return rebuilt(result, lambda leaf: replaced.get(next(places), leaf))

    def _follow_resized(self, outputs: list[Any]) -> None:
        for output in outputs:
            storage = storage_of(output)
            followed = None if storage is None else self._live.get(storage_key(storage))
            if storage is not None and followed is not None and followed.nbytes != storage.nbytes():
                address, nbytes = followed.address, storage.nbytes()
                followed.address, followed.nbytes = self.malloc(nbytes), nbytes
                self.free(address)

    def _follow(self, tensor: torch.Tensor, *, owner: torch.UntypedStorage | None = None, made: bool = False) -> None:
        storage = storage_of(tensor)
        if storage is None:
            return
        key, nbytes = storage_key(storage), storage.nbytes()
        if not nbytes or key in self._live or key in self._mapped:
            return
        address = self.malloc(nbytes)
        followed = _Followed(storage, self._forget)
        followed.key, followed.address, followed.nbytes = key, address, nbytes
        followed.owner, followed.recording = owner, self._recording if made else None
        self._live[key] = followed
        if made and threading.get_ident() not in self._threads:
            seen = self.untracked
            self.untracked = attrs.evolve(
                seen, thread_storages=seen.thread_storages + 1, thread_bytes=seen.thread_bytes + nbytes
            )

    def _forget(self, followed: weakref.ref[torch.UntypedStorage]) -> None:
        gone = cast("_Followed", followed)
        if self._live.get(gone.key) is gone:
            del self._live[gone.key]
        self.free(gone.address)

    def _new_recording(self, key: PoolId) -> Recording:
        return Tape(key, self._source_of)

    def _source_of(self, tensor: torch.Tensor) -> Source:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        followed = self._live.get(key)
        if followed is not None:
            own = followed.recording is not None and followed.recording is self._recording
            return Source(own, followed.owner if own else None, followed)
        return Source(False, None, self._mapped[key][0] if key in self._mapped else weakref.ref(storage))

    @contextmanager
    def _unfollowed(self) -> Iterator[None]:
        with undisturbed(), self._fake_mode or nullcontext():
            yield

    def _map(self, address: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        with self._unfollowed():
            tensor = make()
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        self._mapped[key] = (weakref.ref(storage, lambda _: self._mapped.pop(key, None)), address)
        return tensor

    def _fake_buffer(self, address: int, size: int) -> torch.Tensor:
        return self._map(address, lambda: torch.empty(size, dtype=torch.uint8))
