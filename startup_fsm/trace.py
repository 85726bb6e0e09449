"""
A recorded history of torch's allocator, played through the model of it, and whether both took the same segments.

A history is what ``torch.cuda.memory._snapshot()`` has under ``device_traces``, and beside it the calls that leave no
entry there: a pool that opens, a capture that begins or ends, a cache that is emptied. Imports attrs and the standard
library only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import attrs

from startup_fsm.allocator import Allocator
from startup_fsm.pages import DEFAULT_POOL, DeviceMemory, PoolId, TraceEntry

#: Calls that a history does not show. ``open_pool`` is what making a ``torch.cuda.MemPool`` does; ``begin`` and ``end``
#: are those of a capture or of ``torch.cuda.use_mem_pool``; ``release`` gives one reference back.
CallName = Literal["open_pool", "begin", "end", "release", "empty_cache"]

#: Actions in the order of their numbers in a file.
ACTIONS: Final = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "oom", "snapshot")
_SEGMENTS: Final = frozenset({"segment_alloc", "segment_free"})


@attrs.frozen(kw_only=True)
class Call:
    """
    One call that left no entry.

    Attributes:
        at: How many entries came before it.
        call: Its name.
        pool: The pool it was about.
        stream: The only stream whose allocations go to the pool, for ``begin`` of a capture; None for all.
    """

    at: int
    call: CallName
    pool: PoolId = DEFAULT_POOL
    stream: int | None = None


class Segment(NamedTuple):
    """A segment that was asked for or given back: address, bytes, stream."""

    action: str
    addr: int
    size: int
    stream: int


@attrs.frozen(kw_only=True)
class History:
    """
    What was recorded on one device.

    Attributes:
        torch, device: Version and product name.
        total_bytes: Capacity of the device.
        entries: In the order in which they were recorded.
        calls: In the order of ``at``.
    """

    torch: str
    device: str
    total_bytes: int
    entries: tuple[TraceEntry, ...]
    calls: tuple[Call, ...]

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> History:
        """
        A history out of plain data: ``entries`` are rows of action number, address, bytes and stream.

        Raises:
            KeyError: A part is missing.
            ValueError: A row has another shape.
        """
        return cls(
            torch=str(data["torch"]),
            device=str(data["device"]),
            total_bytes=int(data["total_bytes"]),
            entries=tuple(
                TraceEntry(ACTIONS[action], addr, size, stream, DEFAULT_POOL)
                for action, addr, size, stream in data["entries"]
            ),
            calls=tuple(
                Call(at=each["at"], call=each["call"], pool=tuple(each["pool"]), stream=each["stream"])
                for each in data["calls"]
            ),
        )

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What was asked of the driver and given back to it."""
        return _segments(self.entries)


@attrs.frozen(kw_only=True)
class Comparison:
    """
    A history beside the model of it.

    Attributes:
        recorded, modelled: Segments asked for and given back, in order.
        moved: Blocks that the model placed at another address.
        unknown: Frees of blocks that were allocated before the history began.
    """

    recorded: tuple[Segment, ...]
    modelled: tuple[Segment, ...]
    moved: int
    unknown: int

    @property
    def is_equal(self) -> bool:
        """Whether both asked for the same segments in the same order."""
        return self.recorded == self.modelled

    @property
    def first_difference(self) -> tuple[int, Segment | None, Segment | None] | None:
        """Position, recorded and modelled, where they part; None where they do not."""
        pairs = itertools.zip_longest(self.recorded, self.modelled)
        return next(((place, one, two) for place, (one, two) in enumerate(pairs) if one != two), None)


def compare(history: History) -> Comparison:
    """
    Do with the model what was done with torch.

    The model is told only what was allocated, freed and called; new segments get the addresses that were recorded, as
    long as the two agree, so that best fit among equal blocks decides by the same addresses.
    """
    recorded, modelled = history.segments, list[Segment]()
    # What the model takes beyond what was recorded lies at addresses that no device has.
    elsewhere = itertools.count(1 << 60, 1 << 40)
    agreed = True

    def seen(entry: TraceEntry) -> None:
        nonlocal agreed
        for segment in _segments([entry]):
            agreed = agreed and recorded[len(modelled) : len(modelled) + 1] == (segment,)
            modelled.append(segment)

    def place(nbytes: int) -> int:
        expected = recorded[len(modelled)] if agreed and len(modelled) < len(recorded) else None
        is_expected = expected is not None and (expected.action, expected.size) == ("segment_alloc", nbytes)
        return expected.addr if expected is not None and is_expected else next(elsewhere)

    allocator = Allocator(DeviceMemory(history.total_bytes), trace=seen, place=place)
    where: dict[int, int] = {}
    moved = unknown = 0
    for entry, following, calls in _steps(history):
        for call in calls:
            _make(allocator, call)
        if entry is None:
            continue
        if entry.action == "alloc":
            where[entry.addr] = allocator.malloc(entry.size, entry.stream)
            moved += where[entry.addr] != entry.addr
        elif entry.action == "free_requested":
            address = where.pop(entry.addr, None)
            if address is None:
                unknown += 1
                continue
            if following is None or (following.action, following.addr) != ("free_completed", entry.addr):
                # Not completed at once: another stream used it.
                allocator.record_stream(address, entry.stream + 1)
            allocator.free(address)
    return Comparison(recorded=recorded, modelled=tuple(modelled), moved=moved, unknown=unknown)


def _segments(entries: Sequence[TraceEntry]) -> tuple[Segment, ...]:
    taken = (entry for entry in entries if entry.action in _SEGMENTS)
    return tuple(Segment(entry.action, entry.addr, entry.size, entry.stream) for entry in taken)


def _steps(history: History) -> Iterator[tuple[TraceEntry | None, TraceEntry | None, list[Call]]]:
    """Every entry with the one that follows, and the calls that came before it; at the end the calls that are left."""
    waiting = sorted(history.calls, key=lambda call: call.at)
    for at, entry in enumerate(history.entries):
        calls: list[Call] = []
        while waiting and waiting[0].at <= at:
            calls.append(waiting.pop(0))
        yield entry, history.entries[at + 1] if at + 1 < len(history.entries) else None, calls
    yield None, None, waiting


def _make(allocator: Allocator, call: Call) -> None:
    match call.call:
        case "open_pool":
            allocator.create_or_incref_pool(call.pool)
        case "begin":
            streams = None if call.stream is None else frozenset({call.stream})
            allocator.begin_allocate_to_pool(call.pool, streams)
        case "end":
            allocator.end_allocate_to_pool(call.pool)
        case "release":
            allocator.release_pool(call.pool)
        case "empty_cache":
            allocator.empty_cache(call.pool)
