"""
The instant at which torch runs out of memory, before unwinding frees anything; and names for torch's own traces.

Both rest on private calls, so both are detected. An observer cannot be taken off again, so there is one a process and
it holds devices weakly. A full snapshot for memory_viz may be written beside the journal; nothing of ours reads it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch


class Watched(Protocol):
    """What the observer tells: a device that can list its largest blocks."""

    index: int
    oom_directory: Path | None
    at_oom: Sight | None

    def blocks(self) -> tuple[Mapping[str, Any], ...]:
        """The largest live blocks, by pool."""


@attrs.frozen(kw_only=True)
class Sight:
    """
    What was seen at that instant; bytes.

    Attributes:
        tried: What was asked for.
        free: What the device had.
        blocks: The largest live blocks, by pool.
        dump: File of the full snapshot; None where none was written.
    """

    tried: int
    free: int
    blocks: tuple[Mapping[str, Any], ...] = ()
    dump: str | None = None


_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_attached: list[bool] = []


def watch(device: Watched) -> bool:
    """Tell a device of every out-of-memory on it; False where torch has no observer. CUDA must be initialised."""
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)  # noqa: SLF001 - no public call
    if attach is None:
        return False
    _watched.add(device)
    if not _attached:
        attach(_observed)
        _attached.append(True)
    return True


def _observed(index: int, tried: int, total: int, free: int) -> None:
    for device in list(_watched):
        if device.index == index:
            try:
                device.at_oom = Sight(tried=tried, free=free, blocks=device.blocks(), dump=_dumped(device))
            except Exception:  # noqa: BLE001 - torch raises the error itself; what we miss must not replace it
                device.at_oom = Sight(tried=tried, free=free)


def _dumped(device: Watched) -> str | None:
    if device.oom_directory is None:
        return None
    path = device.oom_directory / f"oom-{time.time_ns()}.pickle"
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call] # noqa: SLF001
    return str(path)


def stamp(text: str) -> bool:
    """Stamp later entries of torch's allocation history with a text; False where torch cannot."""
    call = getattr(torch.cuda.memory, "_set_memory_metadata", None)
    if call is None:
        return False
    call(text)
    return True
