"""
The journals of several ranks as one stream, on one clock.

Each journal has a monotonic clock of its own and says once what the wall clock was when it began. Ranks of one host
share that wall clock. Wall clocks of different hosts differ; but whenever all ranks meet, each of them writes
``ranks_agreed`` at nearly the same instant, so the meetings lay the clocks over each other.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

import attrs

from startup_fsm.events import RanksAgreed, Record, RunStarted

#: A meeting is found complete up to this much after the last rank came, ns.
LOOK_NS = 100_000_000


@attrs.frozen(kw_only=True)
class Clock:
    """
    How the clock of one journal lies on the common one.

    Attributes:
        offset_ns: To be added to ``t``; the earliest journal has 0.
        error_ns: Half the width of what that may be off by; 0 on one host, None where nothing tells.
        meetings: How many meetings it rests on; 0 for the wall clock alone.
    """

    offset_ns: int
    error_ns: int | None
    meetings: int = 0


@attrs.frozen(kw_only=True)
class Merged:
    """
    One record on the common clock.

    Attributes:
        at_ns: Since the earliest journal began.
        source: Index of the journal it is from.
        record: As it was read.
    """

    at_ns: int
    source: int
    record: Record


def clocks(journals: Sequence[Sequence[Record]]) -> list[Clock]:
    """The clock of each journal; those without a wall clock begin with the earliest."""
    starts = [_started(records) for records in journals]
    reference = next((at for at, started in enumerate(starts) if started and started.wall_ns is not None), None)
    if reference is None:
        return [Clock(offset_ns=0, error_ns=None) for _ in journals]
    met = [_meetings(records, started) for records, started in zip(journals, starts, strict=True)]
    walls = [_corrected(starts[at], met[at], starts[reference], met[reference]) for at in range(len(journals))]
    first = min(wall.offset_ns for wall in walls if wall is not None)
    return [
        Clock(offset_ns=0, error_ns=None) if wall is None else attrs.evolve(wall, offset_ns=wall.offset_ns - first)
        for wall in walls
    ]


def _corrected(
    started: RunStarted | None,
    met: dict[tuple[str, int], int],
    other: RunStarted | None,
    theirs: dict[tuple[str, int], int],
) -> Clock | None:
    """The wall clock at the beginning of a journal, as the host of the other one would have read it."""
    if started is None or other is None or started.wall_ns is None:
        return None
    if started is other or (started.boot_id is not None and started.boot_id == other.boot_id):
        return Clock(offset_ns=started.wall_ns, error_ns=0)
    apart = [met[key] - theirs[key] for key in met.keys() & theirs.keys()]
    if not apart:
        return Clock(offset_ns=started.wall_ns, error_ns=None)
    error = max((max(apart) - min(apart)) // 2, LOOK_NS)
    return Clock(offset_ns=started.wall_ns - round(median(apart)), error_ns=error, meetings=len(apart))


def _started(records: Sequence[Record]) -> RunStarted | None:
    first = records[0].event if records else None
    return first if isinstance(first, RunStarted) else None


def _meetings(records: Iterable[Record], started: RunStarted | None) -> dict[tuple[str, int], int]:
    """Wall clock of every meeting, by its topic and which of that topic it was."""
    if started is None or started.wall_ns is None:
        return {}
    found: dict[tuple[str, int], int] = {}
    seen: Counter[str] = Counter()
    for record in records:
        # What was written down beside another meeting did not wait.
        if isinstance(record.event, RanksAgreed) and record.event.waited_ns and record.t is not None:
            found[record.event.topic, seen[record.event.topic]] = started.wall_ns + record.t
            seen[record.event.topic] += 1
    return found


def merged(journals: Sequence[Sequence[Record]]) -> Iterator[Merged]:
    """All records in the order in which they were written, as far as the clocks tell; that of each journal is kept."""
    found = clocks(journals)
    streams = [_placed(at, records, found[at].offset_ns) for at, records in enumerate(journals)]
    return heapq.merge(*streams, key=lambda each: (each.at_ns, each.source))


def _placed(source: int, records: Iterable[Record], offset: int) -> Iterator[Merged]:
    latest = 0
    for record in records:
        latest = max(latest, latest if record.t is None else record.t)
        yield Merged(at_ns=offset + latest, source=source, record=record)
