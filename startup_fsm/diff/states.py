"""State by state: how long it took and which bytes it left where, in two starts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import attrs

from startup_fsm.fold import RunState, Visit
from startup_fsm.memory import Snapshot, accounts

#: Account of what a state took and gave back before it ended.
PEAK: Final = "transient peak"


@attrs.frozen(kw_only=True)
class StateSide:
    """
    All visits of one state in one start.

    Attributes:
        visits: How many.
        duration_ns: All of them together, in ns; None where the source has no time.
        has_failed: Whether the last of them failed, or was open when the journal ended.
        captures: Graphs.
        captured_bytes: Growth of their pools and outside torch.
        capturing_ns: Time that they took, in ns.
    """

    visits: int
    duration_ns: int | None
    has_failed: bool
    captures: int
    captured_bytes: int
    capturing_ns: int


@attrs.frozen(kw_only=True)
class AccountDifference:
    """One account of memory over one state: bytes as it was entered and as it ended; None where nothing was read."""

    account: str
    a_before: int | None
    a_after: int | None
    b_before: int | None
    b_after: int | None

    @property
    def moved_bytes(self) -> int | None:
        """How much more it grew in B than in A; None where one of them was not read."""
        ends = (self.a_before, self.a_after, self.b_before, self.b_after)
        if any(each is None for each in ends):
            return None
        a_before, a_after, b_before, b_after = (each or 0 for each in ends)
        return (b_after - b_before) - (a_after - a_before)


@attrs.frozen(kw_only=True)
class StateDifference:
    """
    One state in both starts.

    Attributes:
        state: Its name.
        a, b: What each did; None where it did not come to it, or leaves it out.
        accounts: Bytes by account, of those where both or either were read.
    """

    state: str
    a: StateSide | None
    b: StateSide | None
    accounts: tuple[AccountDifference, ...] = ()

    @property
    def longer_ns(self) -> int | None:
        """How much longer B took; None where one of them has no time."""
        if self.a is None or self.b is None or self.a.duration_ns is None or self.b.duration_ns is None:
            return None
        return self.b.duration_ns - self.a.duration_ns


def by_state(a: RunState, b: RunState) -> tuple[StateDifference, ...]:
    """All states of both, in the order of the first; what only the second has stands behind what came before it."""
    names = _merged([visit.state for visit in a.visits], [visit.state for visit in b.visits])
    return tuple(
        StateDifference(state=name, a=_side(a, name), b=_side(b, name), accounts=tuple(_accounts(a, b, name)))
        for name in names
    )


def _merged(first: Sequence[str], second: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(first))
    before: str | None = None
    for name in dict.fromkeys(second):
        if name not in names:
            names.insert(names.index(before) + 1 if before is not None else 0, name)
        before = name
    return names


def _side(run: RunState, state: str) -> StateSide | None:
    visits = run.visits_of(state)
    if not visits:
        return None
    durations = [_duration(visit, run) for visit in visits]
    captures = [event for visit in visits for _, event in visit.captures]
    return StateSide(
        visits=len(visits),
        duration_ns=None if None in durations else sum(each or 0 for each in durations),
        has_failed=visits[-1].left is None,
        captures=len(captures),
        captured_bytes=sum(each.pool_delta_bytes + each.outside_delta_bytes for each in captures),
        capturing_ns=sum(each.duration_ns for each in captures),
    )


def _duration(visit: Visit, run: RunState) -> int | None:
    if visit.is_open and visit.entered_t is not None and run.last_t is not None:
        return run.last_t - visit.entered_t
    return visit.duration_ns


def _accounts(a: RunState, b: RunState, state: str) -> Iterable[AccountDifference]:
    ends = [_ends(run.visits_of(state)) for run in (a, b)]
    names = dict.fromkeys(name for end in ends for shot in end if shot is not None for name in shot)
    for name in names:
        (a_before, a_after), (b_before, b_after) = (
            tuple(None if shot is None else shot.get(name, 0) for shot in end) for end in ends
        )
        yield AccountDifference(account=name, a_before=a_before, a_after=a_after, b_before=b_before, b_after=b_after)


def _ends(visits: Sequence[Visit]) -> tuple[dict[str, int] | None, dict[str, int] | None]:
    """Bytes by account as the first visit began and as the last one ended."""
    before = next((visit.before for visit in visits if visit.before is not None), None)
    after = next((visit.after for visit in reversed(visits) if visit.after is not None), None)
    held = _held(before), _held(after)
    peaks = [
        visit.snapshots["peak"][1].reserved_peak_bytes - visit.before.reserved_bytes
        for visit in visits
        if "peak" in visit.snapshots and visit.before is not None
    ]
    if peaks and held[0] is not None and held[1] is not None:
        # Freed again before the state ends, and still the largest thing that must stay possible.
        held[0][PEAK], held[1][PEAK] = 0, max(0, *peaks)
    return held


def _held(snapshot: Snapshot | None) -> dict[str, int] | None:
    """Bytes by account; pools of one purpose together."""
    if snapshot is None:
        return None
    held: dict[str, int] = {}
    for account in accounts(snapshot):
        held[account.account] = held.get(account.account, 0) + account.bytes
    return held
