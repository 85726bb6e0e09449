"""
Processes of one start on one clock, as far as what was read allows. Pure.

Clocks are laid over each other by the wall clock at which each journal began; processes of one text log share its clock
already, and its lines tell what came first within one tick.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

import attrs

from startup_fsm.fold import RunState, Visit
from startup_fsm.sources import Source

#: Where ranks of one model work together, so that whoever comes early waits inside.
TOGETHER: Final = frozenset(
    {"init_device", "profile_activations", "capture_throwaway", "size_kv", "warmup", "capture_graphs", "verify"}
)

#: How the clocks of processes relate: one process, by the wall clock, one log, or not at all.
Clock = Literal["one", "wall", "log", "unknown"]


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
        has_time: Whether every state has one.
        stays: By index of the process, in order.
        agreed: Visits in which ranks agreed on something.
    """

    sources: Sequence[Source]
    clock: Clock
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
    walls = {at: _wall(source) or 0 for at, source in taking.items()}
    first = min(walls.values(), default=0)
    stays = {at: _placed(at, source, walls[at] - first if clock == "wall" else 0) for at, source in taking.items()}
    agreed = {(visit.state, visit.visit) for source in taking.values() for visit in _agreeing(source.run)}
    return Processes(sources=sources, clock=clock, has_time=timed, stays=stays, agreed=frozenset(agreed))


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
