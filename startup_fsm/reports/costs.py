"""
What a start cost, from its fold: time by state, our own part of it, and bytes by account at every edge. Pure.

Plain rows in bytes and ns; how they are shown is in ``text``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import attrs

from startup_fsm.fold import RunState, Visit
from startup_fsm.memory import Account, Snapshot, accounts


@attrs.frozen(kw_only=True)
class StateTime:
    """
    One visit of a state; all times in ns, None where the source has no time.

    Attributes:
        state, visit, part: Which; the part entered last.
        ended: How; ``open`` where the journal stops inside it.
        began_ns: Since the journal began.
        duration_ns: From entry to end, or to the last event.
        cpu_ns, bookkeeping_ns, syncing_ns, measuring_ns: As in ``state_left``; None while it is open.
    """

    state: str
    visit: int
    part: str | None
    ended: Literal["left", "failed", "open"]
    began_ns: int | None
    duration_ns: int | None
    cpu_ns: int | None
    bookkeeping_ns: int | None
    syncing_ns: int | None
    measuring_ns: int | None


@attrs.frozen(kw_only=True)
class Times:
    """
    One process; all times in ns.

    Attributes:
        process: Its label.
        states: In order.
        total_ns: From the beginning of the journal to its last event.
        unattributed_ns: Outside every state.
        bookkeeping_ns, syncing_ns, measuring_ns: Our own part of the whole.
    """

    process: str
    states: tuple[StateTime, ...]
    total_ns: int
    unattributed_ns: int
    bookkeeping_ns: int
    syncing_ns: int
    measuring_ns: int


def times(run: RunState, process: str) -> Times:
    """How long everything took."""
    states = tuple(_state_time(visit, run.last_t) for visit in run.visits)
    total = run.last_t or 0
    whole = None if run.finished is None else run.finished[1]
    return Times(
        process=process,
        states=states,
        total_ns=total,
        unattributed_ns=max(0, total - sum(each.duration_ns or 0 for each in states)),
        bookkeeping_ns=sum(each.bookkeeping_ns or 0 for each in states) if whole is None else whole.bookkeeping_ns,
        syncing_ns=sum(each.syncing_ns or 0 for each in states) if whole is None else whole.syncing_ns,
        measuring_ns=sum(each.measuring_ns or 0 for each in states) if whole is None else whole.measuring_ns,
    )


def _state_time(visit: Visit, last_t: int | None) -> StateTime:
    end = visit.left or visit.failed
    duration = visit.duration_ns
    if end is None and visit.entered_t is not None and last_t is not None:
        duration = last_t - visit.entered_t
    return StateTime(
        state=visit.state,
        visit=visit.visit,
        part=visit.part,
        ended="left" if visit.left is not None else "failed" if visit.failed is not None else "open",
        began_ns=visit.entered_t,
        duration_ns=duration,
        cpu_ns=None if end is None else end.cpu_ns,
        bookkeeping_ns=None if end is None else end.bookkeeping_ns,
        syncing_ns=None if end is None else end.syncing_ns,
        measuring_ns=None if end is None else end.measuring_ns,
    )


@attrs.frozen(kw_only=True)
class TimeCost:
    """Time that went into one thing in all visits of one state, in ns; ``count`` where there are several."""

    what: str
    state: str | None
    ns: int
    count: int | None = None


def time_costs(run: RunState) -> list[TimeCost]:
    """Where the time went, most first; the rows add up to the whole start."""
    found: list[TimeCost] = []
    names = dict.fromkeys(visit.state for visit in run.visits)
    spent = {name: [_state_time(visit, run.last_t) for visit in run.visits_of(name)] for name in names}
    for name, visits in spent.items():
        rest = sum(each.duration_ns or 0 for each in visits)
        for part in _inside(run, name, visits):
            # Our own part begins a little before the state does: no row may be more than what is left of it.
            found.append(attrs.evolve(part, ns=min(part.ns, rest)))
            rest -= found[-1].ns
        found.append(TimeCost(what="its body", state=name, ns=rest))
    outside = (run.last_t or 0) - sum(each.duration_ns or 0 for visits in spent.values() for each in visits)
    found.append(TimeCost(what="outside every state", state=None, ns=max(0, outside)))
    return sorted((each for each in found if each.ns), key=lambda each: -each.ns)


def _inside(run: RunState, state: str, visits: Iterable[StateTime]) -> Iterator[TimeCost]:
    captures = [event for visit in run.visits_of(state) for _, event in visit.captures]
    if captures:
        yield TimeCost(what="graphs", state=state, ns=sum(each.duration_ns for each in captures), count=len(captures))
    hooks = [event for _, event in run.hooks if event.state == state]
    if hooks:
        count = sum(each.count for each in hooks)
        yield TimeCost(what="hooks", state=state, ns=sum(each.duration_ns for each in hooks), count=count)
    for what in ("measuring", "syncing", "bookkeeping"):
        yield TimeCost(what=f"our {what}", state=state, ns=sum(getattr(each, f"{what}_ns") or 0 for each in visits))


@attrs.frozen(kw_only=True)
class ByteCost:
    """Bytes of one account from the entry of a state to its end; ``after_bytes`` is what it then held."""

    account: str
    state: str
    visit: int
    delta_bytes: int
    after_bytes: int
    source: str


def byte_costs(run: RunState) -> list[ByteCost]:
    """What grew and shrank at which edge, most first; what did not move is left out."""
    found: list[ByteCost] = []
    for visit in run.visits:
        before, after = visit.before, visit.after
        if before is None or after is None:
            continue
        was, now = _held(before), _held(after)
        for name in dict.fromkeys([*was, *now]):
            after_bytes, source = now.get(name, (0, was.get(name, (0, ""))[1]))
            delta = after_bytes - was.get(name, (0, ""))[0]
            found.append(_byte_cost(visit, name, delta, after_bytes, source))
        if "peak" in visit.snapshots:
            # Freed again before the state ends, and still the largest thing that must stay possible.
            peak = visit.snapshots["peak"][1].reserved_peak_bytes
            source = after.sources.get("torch", "allocator")
            found.append(_byte_cost(visit, "transient peak", max(0, peak - before.reserved_bytes), 0, source))
    return sorted((each for each in found if each.delta_bytes), key=lambda each: -abs(each.delta_bytes))


def _held(snapshot: Snapshot) -> dict[str, tuple[int, str]]:
    """Bytes and meter by account; pools of one purpose together."""
    held: dict[str, tuple[int, str]] = {}
    for account in accounts(snapshot):
        held[account.account] = (held.get(account.account, (0, ""))[0] + account.bytes, account.source)
    return held


def _byte_cost(visit: Visit, account: str, delta: int, after: int, source: str) -> ByteCost:
    return ByteCost(
        account=account, state=visit.state, visit=visit.visit, delta_bytes=delta, after_bytes=after, source=source
    )


@attrs.frozen(kw_only=True)
class MemoryEdge:
    """
    Memory as one state ended and the next could begin; all in bytes.

    Attributes:
        state, visit: What ended; None and 0 for the reading before anything was done.
        ended: How.
        total_bytes: The device.
        requested_bytes: What this process may use of it; None where nobody said.
        used_bytes: In use by everybody.
        accounts: Every term of the identity, pools of one purpose together; they add up to what is used.
        peak_bytes: What the state took and gave back before its end, on top of what it kept.
    """

    state: str | None
    visit: int
    ended: Literal["left", "failed"]
    total_bytes: int
    requested_bytes: int | None
    used_bytes: int
    accounts: tuple[Account, ...]
    peak_bytes: int = 0


def memory_edges(run: RunState) -> list[MemoryEdge]:
    """Memory at every edge of a start, in order; empty where no reading was taken."""
    found: list[MemoryEdge] = []
    for visit in run.visits:
        if not found and visit.before is not None:
            found.append(_edge(run, visit.before))
        if visit.after is not None:
            found.append(_edge(run, visit.after, visit))
    return found


def _edge(run: RunState, snapshot: Snapshot, visit: Visit | None = None) -> MemoryEdge:
    peak = 0
    if visit is not None and "peak" in visit.snapshots:
        peak = max(0, visit.snapshots["peak"][1].reserved_peak_bytes - snapshot.reserved_bytes)
    return MemoryEdge(
        state=None if visit is None else visit.state,
        visit=0 if visit is None else visit.visit,
        ended="failed" if visit is not None and visit.failed is not None else "left",
        total_bytes=snapshot.total_bytes,
        requested_bytes=_requested(run, snapshot.total_bytes),
        used_bytes=snapshot.used_bytes,
        accounts=tuple(
            Account(account=name, bytes=size, source=source) for name, (size, source) in _held(snapshot).items()
        ),
        peak_bytes=peak,
    )


def _requested(run: RunState, total: int) -> int | None:
    """What was asked for of the device: as it was computed, else as it was noted, else by the share."""
    if run.budgets:
        return run.budgets[-1][1].requested_bytes
    noted, share = run.note("requested_bytes"), run.knob("gpu_memory_utilization")
    if isinstance(noted, int):
        return noted
    return int(total * share) if isinstance(share, float) and 0 < share <= 1 else None


@attrs.frozen(kw_only=True)
class GraphCost:
    """All graphs of one visit, in bytes and ns; the largest by the growth of its pool."""

    state: str
    visit: int
    count: int
    pool_bytes: int
    outside_bytes: int
    duration_ns: int
    largest_size: int
    largest_bytes: int


def graph_costs(run: RunState) -> list[GraphCost]:
    """Captures, visit by visit."""
    found: list[GraphCost] = []
    for visit in run.visits:
        captures = [event for _, event in visit.captures]
        if captures:
            largest = max(captures, key=lambda each: each.pool_delta_bytes)
            found.append(
                GraphCost(
                    state=visit.state,
                    visit=visit.visit,
                    count=len(captures),
                    pool_bytes=sum(each.pool_delta_bytes for each in captures),
                    outside_bytes=sum(each.outside_delta_bytes for each in captures),
                    duration_ns=sum(each.duration_ns for each in captures),
                    largest_size=largest.size,
                    largest_bytes=largest.pool_delta_bytes,
                )
            )
    return found


@attrs.frozen(kw_only=True)
class Blame:
    """All that one process cost, and memory at every edge."""

    process: str
    time: list[TimeCost]
    edges: list[MemoryEdge]
    bytes: list[ByteCost]
    graphs: list[GraphCost]


def blame(run: RunState, process: str) -> Blame:
    """What cost most, each ranking with the most first."""
    return Blame(
        process=process,
        time=time_costs(run),
        edges=memory_edges(run),
        bytes=byte_costs(run),
        graphs=graph_costs(run),
    )
