"""
Processes of one start on one clock, as far as what was read allows. Pure.

Each journal has a monotonic clock of its own and says once what the wall clock was when it began. Processes of one host
share that wall clock. Wall clocks of different hosts differ; but whenever ranks meet, each of them writes
``ranks_agreed`` at nearly the same instant, so their meetings lay the clocks over each other. Processes of one text log
share its clock already, and its lines tell what came first within one tick.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Final, Literal

import attrs

from startup_fsm.fold import RunState, Visit
from startup_fsm.sources import Source

#: Where ranks of one model work together, so that whoever comes early waits inside.
TOGETHER: Final = frozenset(
    {"init_device", "profile_activations", "capture_throwaway", "size_kv", "warmup", "capture_graphs", "verify"}
)

#: A meeting is found complete up to this much after the last rank came, ns.
LOOK_NS: Final = 100_000_000

#: How the clocks of processes relate: one process, by the wall clock, one log, or not at all.
Clock = Literal["one", "wall", "log", "unknown"]


@attrs.frozen(kw_only=True)
class Beginning:
    """
    When a journal began, by the wall clock of one host of its start.

    Attributes:
        wall_ns: Since the epoch; None where the journal does not tell.
        error_ns: Half the width of what that may be off by; 0 on that host itself, None where nothing tells.
        meetings: How many meetings it rests on; 0 for the wall clock alone.
    """

    wall_ns: int | None
    error_ns: int | None
    meetings: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Stay:
    """
    One visit of a state on the common clock.

    Attributes:
        source: Index of its process.
        place: Which of the visits of that process, from 0.
        visit: As it was folded.
        began, ended: ns since the first process began, and the line of a log, which decides between equal times; the
            last event stands for the end of one that is open.
    """

    source: int
    place: int
    visit: Visit
    began: tuple[int, int]
    ended: tuple[int, int]

    @property
    def key(self) -> tuple[str, int]:
        """State, and which visit of it."""
        return self.visit.state, self.visit.visit


@attrs.frozen(kw_only=True)
class Processes:
    """
    All processes that came to a state, on one clock.

    Attributes:
        sources: All processes.
        clock: How their clocks relate.
        error_ns: What times of two processes may be off by against each other; None where nothing tells.
        has_time: Whether every state has one.
        stays: By index of the process, in order.
        agreed: Visits in which ranks agreed on something.
    """

    sources: Sequence[Source]
    clock: Clock
    error_ns: int | None
    has_time: bool
    stays: Mapping[int, Sequence[Stay]]
    agreed: frozenset[tuple[str, int]]

    def label(self, stay: Stay) -> str:
        """Of the process of a stay."""
        return self.sources[stay.source].label

    def before(self, stay: Stay) -> Stay | None:
        """The stay of the same process before this one."""
        return self.stays[stay.source][stay.place - 1] if stay.place else None

    def groups(self) -> dict[tuple[str, int], list[Stay]]:
        """Stays in the same visit of the same state."""
        found: dict[tuple[str, int], list[Stay]] = {}
        for stays in self.stays.values():
            for stay in stays:
                found.setdefault(stay.key, []).append(stay)
        return found

    def is_together(self, key: tuple[str, int]) -> bool:
        """Whether ranks meet in this visit of a state, and their clocks can say when."""
        return self.clock in ("wall", "log") and (key[0] in TOGETHER or key in self.agreed)


def on_one_clock(sources: Sequence[Source]) -> Processes:
    """
    The processes of one attempt of one run.

    Args:
        sources: All of them; those that came to no state have no stays.
    """
    taking = {at: source for at, source in enumerate(sources) if source.run.visits}
    timed = all(visit.entered_t is not None for source in taking.values() for visit in source.run.visits)
    clock = _clock(list(taking.values()), has_time=timed)
    began = dict(zip(taking, beginnings(list(taking.values())), strict=True))
    first = min((each.wall_ns for each in began.values() if each.wall_ns is not None), default=0)
    stays = {
        at: _placed(at, source, (began[at].wall_ns or 0) - first if clock == "wall" else 0)
        for at, source in taking.items()
    }
    errors = [each.error_ns for each in began.values()]
    error = max((each for each in errors if each is not None), default=0) if None not in errors else None
    agreed = {(visit.state, visit.visit) for source in taking.values() for visit in _agreeing(source.run)}
    return Processes(
        sources=sources,
        clock=clock,
        error_ns=error if clock == "wall" else 0,
        has_time=timed,
        stays=stays,
        agreed=frozenset(agreed),
    )


def beginnings(sources: Sequence[Source]) -> list[Beginning]:
    """
    When each process of one attempt of one run began, by one wall clock: that of the host of the first that tells.

    Args:
        sources: Of different hosts, where ``boot_id`` of their ``run_started`` differs.
    """
    reference = next((source for source in sources if _wall(source) is not None), None)
    if reference is None:
        return [Beginning(wall_ns=None, error_ns=None) for _ in sources]
    return [_beginning(source, reference) for source in sources]


def _beginning(source: Source, reference: Source) -> Beginning:
    started, other = source.run.started, reference.run.started
    own, theirs = _wall(source), _wall(reference)
    if started is None or other is None or own is None or theirs is None:
        return Beginning(wall_ns=None, error_ns=None)
    if source is reference or (started.boot_id is not None and started.boot_id == other.boot_id):
        return Beginning(wall_ns=own, error_ns=0)
    both = source.meetings.keys() & reference.meetings.keys()
    apart = [own + source.meetings[key] - theirs - reference.meetings[key] for key in both]
    if not apart:
        return Beginning(wall_ns=own, error_ns=None)
    error = max((max(apart) - min(apart)) // 2, LOOK_NS)
    return Beginning(wall_ns=own - round(median(apart)), error_ns=error, meetings=len(apart))


def _clock(sources: Sequence[Source], *, has_time: bool) -> Clock:
    if len(sources) < 2:
        return "one"
    if all(source.is_imported for source in sources):
        return "log"
    return "wall" if has_time and all(_wall(source) is not None for source in sources) else "unknown"


def _wall(source: Source) -> int | None:
    return None if source.run.started is None else source.run.started.wall_ns


def _agreeing(run: RunState) -> Iterator[Visit]:
    """Visits in which ranks agreed on something."""
    for seq, _ in run.agreements:
        for visit in run.visits:
            if visit.entered_seq <= seq <= (run.last_seq if visit.ended_seq is None else visit.ended_seq):
                yield visit


def _placed(at: int, source: Source, offset: int) -> list[Stay]:
    stays = []
    for place, visit in enumerate(source.run.visits):
        end_seq = source.run.last_seq if visit.ended_seq is None else visit.ended_seq
        end_t = source.run.last_t if visit.ended_t is None else visit.ended_t
        began = (visit.entered_t or 0) + offset, _line(source, visit.entered_seq)
        ended = (end_t or 0) + offset, _line(source, end_seq)
        stays.append(Stay(source=at, place=place, visit=visit, began=began, ended=max(began, ended)))
    return stays


def _line(source: Source, seq: int) -> int:
    origin = source.origins.get(seq)
    return 0 if origin is None or origin.line is None else origin.line
