"""Torch's operators and storages, as far as following them needs to know."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

# Linux; the module mmap names it from Python 3.13 on.
_MAP_NORESERVE = 0x4000

FUSED = frozenset({torch.rms_norm, torch.nn.functional.rms_norm})
"""One kernel on a GPU, several operations on a CPU: followed as one. The result is like the first argument."""

_GEMMS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_scaled_mm", "_int_mm", "_grouped_mm"})
_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
_FRESH = frozenset({"lift_fresh", "lift"})
# Rows up to this length are sorted inside one block of threads.
_SORTED_IN_PLACE = 4096
_SORTS = frozenset({"sort", "argsort", "msort"})
# Operators whose CUDA form copies a size or a value to the host, beyond those that carry torch's own tags for it.
_SYNCHRONIZE = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "item"})


class Kind:
    """What following must know of one operator; without one, a plain kernel that returns new tensors."""

    __slots__ = ("composite", "empty", "forbidden", "fresh", "gemm", "indexed", "moves_views", "mutable", "sorts")

    def __init__(self, operation: Any = None) -> None:
        if operation is None:
            for name in self.__slots__:
                setattr(self, name, False)
            return
        name = operation.overloadpacket.__name__
        tags = operation.tags
        self.composite = has_parts(operation)
        self.gemm = name in _GEMMS
        self.empty = name in _EMPTY
        self.fresh = name in _FRESH
        self.sorts = name in _SORTS
        self.mutable = operation._schema.is_mutable  # noqa: SLF001
        self.moves_views = torch.Tag.inplace_view in tags
        self.indexed = name in {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
        dynamic = torch.Tag.dynamic_output_shape in tags and not self.indexed
        self.forbidden = dynamic or torch.Tag.data_dependent_output in tags or name in _SYNCHRONIZE


def sort_scratch(keys: torch.Tensor) -> int:
    """
    Bytes that a sort of many rows takes beside its results, which no operation shows.

    torch sorts all rows at once by radix: for each element its place and row (8 bytes), and the sorter's second
    buffers of key and place. Read off torch's sort kernels; one row, or short ones, take less.
    """
    rows = keys.numel() // max(1, keys.shape[-1]) if keys.dim() else 1
    return keys.numel() * (16 + keys.element_size()) if rows > 1 and keys.shape[-1] > _SORTED_IN_PLACE else 0


def flat(results: Any) -> list[Any]:
    """Results of an operator as a list, in order: nothing, one value, or values in tuples and lists."""
    if isinstance(results, (tuple, list)):
        return [leaf for result in results for leaf in flat(result)]
    return [results]


def over(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """A tensor over a storage."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


def alias(owner: torch.Tensor, aliases: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """
    A tensor over the same bytes as *owner* with a storage of its own, which does not keep the bytes alive.

    *aliases* holds the storages made so far for the outputs of one operation, which may share one.
    """
    storage = owner.untyped_storage()
    key = storage_key(storage)
    if key not in aliases:
        made: Any = torch._C._construct_storage_from_data_pointer(  # noqa: SLF001 - the one way without a copy
            storage.data_ptr(), storage.device, storage.nbytes()
        )
        aliases[key] = made
    return over(aliases[key], owner.dtype, int(owner.storage_offset()), tuple(owner.size()), tuple(owner.stride()))


def storage_key(storage: torch.UntypedStorage) -> int:
    """What names a storage while it lives: two Python objects may stand for one storage, this is one number."""
    return int(storage._cdata)  # noqa: SLF001


def has_parts(operation: Any) -> bool:
    """Whether an operator is defined by calling others."""
    name, key = operation.name(), "CompositeImplicitAutograd"
    # Operators of TorchScript, such as prim::device, are not known to the dispatcher, which raises then.
    known = torch._C._dispatch_has_kernel(name)  # noqa: SLF001
    return bool(known and torch._C._dispatch_has_kernel_for_dispatch_key(name, key))  # noqa: SLF001


def storage_of(tensor: Any) -> torch.UntypedStorage | None:
    """The storage of a strided tensor that is not on meta; None for anything else."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return None
    # Asking a fake for its device is an operation of its own; a fake is never meant to be on meta.
    if type(tensor) is not FakeTensor and tensor.is_meta:
        return None
    return tensor.untyped_storage()


def tensors_in(holder: Any) -> Iterator[torch.Tensor]:
    """Tensors in lists, tuples and dicts; parameters and buffers of modules."""
    if isinstance(holder, torch.Tensor):
        yield holder
    elif isinstance(holder, (tuple, list)):
        for part in holder:
            yield from tensors_in(part)
    elif isinstance(holder, dict):
        for part in holder.values():
            yield from tensors_in(part)
    elif isinstance(holder, torch.nn.Module):
        yield from holder.parameters()
        yield from holder.buffers()


def rebuilt(result: Any, leaf: Callable[[Any], Any]) -> Any:
    """Replace the leaves of an operator's result, in the order of ``flat``."""
    if isinstance(result, (tuple, list)):
        return type(result)(rebuilt(part, leaf) for part in result)
    return leaf(result)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run torch without any mode: nothing is followed, nothing is a fake."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():  # noqa: SLF001 - modes of both kinds
        yield


def zeroed(size: int) -> torch.Tensor:
    """A ``uint8`` tensor whose pages the host gives only when they are touched: a KV cache larger than its memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
