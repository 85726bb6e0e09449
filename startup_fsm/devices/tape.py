"""
A captured graph without a GPU: the operations of one capture, and the storages that they wrote.

The engine's tensors are aliases of memory that the tape owns, so that a storage dies for the allocator when the engine
drops it, as on a GPU, and its bytes are still there for a replay. What the capture only used is held weakly: a graph
does not keep the KV cache alive, it only holds its address.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import torch
from torch.utils._pytree import tree_map_only

from startup_fsm.devices.holdings import Recording
from startup_fsm.devices.operators import flat, over, undisturbed
from startup_fsm.pages import PoolId


@attrs.frozen
class Borrowed:
    """A tensor over a storage that the tape does not own."""

    storage: weakref.ref[torch.UntypedStorage]
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def living(self) -> torch.UntypedStorage:
        """
        The storage.

        Raises:
            RuntimeError: It is gone; on a GPU the replay would use memory that may be somebody else's.
        """
        storage = self.storage()
        if storage is None:
            raise RuntimeError(
                f"CUDA error: an illegal memory access was encountered: the graph uses a {self.dtype} tensor of shape "
                f"{self.size} that was freed after the capture\nhint: keep its inputs, weights and KV cache alive"
            )
        return storage

    def tensor(self) -> torch.Tensor:
        """The tensor again, over the same storage."""
        return over(self.living(), self.dtype, self.offset, self.size, self.stride)


class Source(NamedTuple):
    """
    Where the storage of an operation's input comes from.

    Attributes:
        own: It was made in the capture that is open.
        owner: What holds its bytes, where it is our own and there are values.
        seen: The storage as the engine sees it.
    """

    own: bool
    owner: torch.UntypedStorage | None
    seen: weakref.ref[torch.UntypedStorage]


class _Step(NamedTuple):
    """One kernel: what to call, with what, and where its new outputs go."""

    operation: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[tuple[int, torch.Tensor]]


class Tape(Recording):
    """
    The recording of one capture.

    Args:
        key: Pool that the capture allocates to.
        source_of: Returns where the storage of an input comes from.
    """

    def __init__(
        self,
        key: PoolId,
        source_of: Callable[[torch.Tensor], Source],
    ) -> None:
        super().__init__(key)
        self._source_of = source_of
        self._steps: list[_Step] = []
        self._borrowed: dict[int, Borrowed] = {}

    @property
    def borrowed_storages(self) -> int:
        """Storages that the graph uses and does not own: weights, inputs, KV cache."""
        return len(self._borrowed)

    def add(
        self,
        operation: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[tuple[int, torch.Tensor]] | None,
    ) -> None:
        """
        Record one kernel.

        The operator and its arguments are as the engine called it. *outputs* holds the position among the flattened
        results and the tensor that owns the bytes; None when there are no values, and then only what it uses is noted.
        """
        held_args, held_kwargs = tree_map_only(torch.Tensor, self._hold, (args, kwargs))
        if outputs is not None:
            self._steps.append(_Step(operation, held_args, held_kwargs, outputs))

    def replay(self) -> None:
        """Run every kernel again into the same storages, on the values that its inputs have now."""
        for borrowed in self._borrowed.values():
            borrowed.living()
        with undisturbed(), torch.inference_mode():
            for step in self._steps:
                args, kwargs = tree_map_only(Borrowed, Borrowed.tensor, (step.args, step.kwargs))
                results = flat(step.operation(*args, **kwargs))
                for place, owner in step.outputs:
                    owner.copy_(results[place])

    def _hold(self, tensor: torch.Tensor) -> Any:
        source = self._source_of(tensor)
        size, stride, offset = tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset())
        if source.own:
            return None if source.owner is None else over(source.owner, tensor.dtype, offset, size, stride)
        borrowed = Borrowed(source.seen, tensor.dtype, size, stride, offset)
        self._borrowed.setdefault(id(source.seen), borrowed)
        return borrowed
