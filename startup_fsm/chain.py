"""
The critical chain of a start: which state of which rank everybody waited for, and which rank is slower than the others.

A state that ranks do together begins in earnest when the last of them comes: until then the others wait, and the chain
runs through the one that is late. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Final, Literal

import attrs

from startup_fsm.clocks import TOGETHER, Clock, Processes, Stay, on_one_clock
from startup_fsm.findings import Finding
from startup_fsm.fold import RunState, Visit
from startup_fsm.sources import Source

#: A rank is a straggler in a state where it took longer than the median by more than this share, and this time.
_SHARE: Final = 5
_LEAST_NS: Final = 1_000_000_000

#: Categories of failures that are somebody else's.
_NOT_ITS_OWN: Final = frozenset({"peer", "signal"})


@attrs.frozen(kw_only=True)
class Step:
    """
    One piece of the chain.

    Attributes:
        process: Label of the rank or process that everybody waited for.
        state, visit: What it did; None and 0 for time outside every state.
        ended: How; ``open`` where the journal stops inside it.
        began_ns: Since the first process began; None where the source has no time.
        took_ns: In ns; of a state that ranks do together, from when the last of them came.
        waited_for: Label of that last one, where it is another.
        what, what_ns: What took most of the whole state; None where nothing tells.
    """

    process: str
    state: str | None
    visit: int = 0
    ended: Literal["left", "failed", "open"] = "left"
    began_ns: int | None
    took_ns: int | None
    waited_for: str | None = None
    what: str | None = None
    what_ns: int | None = None


@attrs.frozen(kw_only=True)
class Meeting:
    """
    A state that ranks did together.

    Attributes:
        state, visit: Which.
        last: Label of the rank that came last.
        began_ns: When it came, since the first process began.
        waited_ns: How long the others waited for it, by label.
    """

    state: str
    visit: int
    last: str
    began_ns: int
    waited_ns: Mapping[str, int]

    @property
    def longest_ns(self) -> int:
        """The longest that anybody waited."""
        return max(self.waited_ns.values(), default=0)


@attrs.frozen(kw_only=True)
class Straggler:
    """
    A rank that took longer in a state than the others.

    Attributes:
        source: Index of its process.
        process: Its label.
        state, visit: Where.
        took_ns, median_ns: What it took itself, waiting left out, and the median of all.
        evidence: Sequence numbers of the entry, and of the end where there is one.
    """

    source: int
    process: str
    state: str
    visit: int
    took_ns: int
    median_ns: int
    evidence: tuple[int, ...]

    @property
    def over_ns(self) -> int:
        """By how much it is over the median."""
        return self.took_ns - self.median_ns


@attrs.frozen(kw_only=True)
class Chain:
    """
    The way through a start that decided how long it took.

    Attributes:
        clock: How the clocks of its processes relate; where that is unknown the chain is the longest process alone.
        processes: How many came to a state.
        total_ns: From the beginning of the first process to the end of the chain; None where there is no time.
        steps: In order.
        meetings: In order; empty for one process, and where clocks cannot be related.
        stragglers: The slowest first.
        unseen: What it cannot tell.
    """

    clock: Clock
    processes: int
    total_ns: int | None
    steps: tuple[Step, ...]
    meetings: tuple[Meeting, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    unseen: tuple[str, ...] = ()


def chain(sources: Sequence[Source]) -> Chain:
    """
    The critical chain of one attempt of one run.

    Args:
        sources: All its processes; at least one.
    """
    start = on_one_clock(sources)
    steps = _steps(start)
    total = None
    if steps and (last := steps[-1]).began_ns is not None:
        total = last.began_ns + (last.took_ns or 0)
    return Chain(
        clock=start.clock,
        processes=len(start.stays),
        total_ns=total,
        steps=steps,
        meetings=tuple(_meetings(start)),
        # A log begins and ends its states where a line happens to be.
        stragglers=() if any(each.is_imported for each in sources) else tuple(_stragglers(start)),
        unseen=tuple(_unseen(start)),
    )


def straggler_findings(sources: Sequence[Source]) -> tuple[tuple[int, Finding], ...]:
    """
    ``time.straggler`` for every rank that is much slower in a state than the others, the slowest first.

    Args:
        sources: All processes of one start.

    Returns:
        The index of the process, and the finding with sequence numbers of its journal.
    """
    found = []
    if any(each.is_imported for each in sources):
        return ()
    for each in _stragglers(on_one_clock(sources)):
        text = f"{each.process} took {each.took_ns / 1e9:.1f} s in {each.state}, {each.over_ns / 1e9:.1f} s more than"
        finding = Finding(
            code="time.straggler",
            severity="note",
            state=each.state,
            message=f"{text} the median of the ranks",
            observed=each.took_ns,
            expected=each.median_ns,
            tolerance=_tolerance(each.median_ns),
            evidence=each.evidence,
        )
        found.append((each.source, finding))
    return tuple(found)


def _steps(start: Processes) -> tuple[Step, ...]:
    """From the end backwards: where ranks met, the chain goes on with the one that came last."""
    if not start.stays:
        return ()
    groups = start.groups()
    end = _end(start)
    steps = list(_afterwards(start, end))
    stay: Stay | None = end
    seen: set[tuple[int, int]] = set()
    # A journal that goes against its own order must not send us in a circle.
    while stay is not None and (stay.source, stay.place) not in seen:
        seen.add((stay.source, stay.place))
        last = _last_to_come(start, groups, stay)
        steps.append(_step(start, stay, last))
        steps += _outside(start, last)
        stay = start.before(last)
    return tuple(reversed(steps))


def _end(start: Processes) -> Stay:
    """Where the chain ends: with the first that failed of its own, else with the process that took longest."""
    lasts = [stays[-1] for stays in start.stays.values()]
    failed = [stay for stay in lasts if (error := stay.visit.failed) is not None and error.category not in _NOT_ITS_OWN]
    return min(failed, key=lambda stay: stay.ended) if failed else max(lasts, key=lambda stay: stay.ended)


def _last_to_come(start: Processes, groups: Mapping[tuple[str, int], Sequence[Stay]], stay: Stay) -> Stay:
    if not start.is_together(stay.key):
        return stay
    # Who came when this one had left was not waited for.
    last = max((each for each in groups[stay.key] if each.began <= stay.ended), key=lambda each: each.began)
    return last if last.began > stay.began else stay


def _step(start: Processes, stay: Stay, last: Stay) -> Step:
    visit = stay.visit
    what, what_ns = _dominant(visit, start.sources[stay.source].run) if start.has_time else (None, None)
    return Step(
        process=start.label(stay),
        state=visit.state,
        visit=visit.visit,
        ended="left" if visit.left is not None else "failed" if visit.failed is not None else "open",
        began_ns=last.began[0] if start.has_time else None,
        took_ns=stay.ended[0] - last.began[0] if start.has_time else None,
        waited_for=None if last is stay else start.label(last),
        what=what,
        what_ns=what_ns,
    )


def _afterwards(start: Processes, stay: Stay) -> Iterator[Step]:
    """Time between the last state and the last event of its process."""
    source, ended = start.sources[stay.source].run, stay.ended[0]
    until = (source.last_t or 0) + stay.began[0] - (stay.visit.entered_t or 0)
    if start.has_time and until > ended:
        yield Step(process=start.label(stay), state=None, began_ns=ended, took_ns=until - ended)


def _outside(start: Processes, stay: Stay) -> Iterator[Step]:
    """Time between a stay and the one before it, or the beginning of its journal."""
    before = start.before(stay)
    since = stay.began[0] - (stay.visit.entered_t or 0) if before is None else before.ended[0]
    if start.has_time and stay.began[0] > since:
        yield Step(process=start.label(stay), state=None, began_ns=since, took_ns=stay.began[0] - since)


def _dominant(visit: Visit, run: RunState) -> tuple[str | None, int | None]:
    """What took most of a state: its graphs, hooks, our own part, or the rest of its body."""
    end, whole = visit.left or visit.failed, visit.duration_ns
    if end is None or not whole or not end.cpu_ns:
        # A log tells nothing of what happens inside.
        return None, None
    hooks = [event for seq, event in run.hooks if visit.entered_seq <= seq <= (visit.ended_seq or seq)]
    graphs = [event.duration_ns for _, event in visit.captures]
    parts = {
        f"{len(graphs)} graphs" if len(graphs) != 1 else "1 graph": sum(graphs),
        "hooks": sum(event.duration_ns for event in hooks),
        "our measuring": end.measuring_ns,
        "our syncing": end.syncing_ns,
        "our bookkeeping": end.bookkeeping_ns,
    }
    rest = max(0, whole - sum(parts.values()))
    if rest >= max(parts.values()):
        # Little time on the processor is waiting: for a disk, a lock, a device, another rank.
        return f"its body, cpu {min(100, round(100 * end.cpu_ns / whole))}%", rest
    what = max(parts, key=lambda name: parts[name])
    return what, parts[what]


def _meetings(start: Processes) -> Iterator[Meeting]:
    if not start.has_time:
        return
    met = [stays for key, stays in start.groups().items() if len(stays) > 1 and start.is_together(key)]
    for stays in sorted(met, key=lambda each: max(stay.began for stay in each)):
        last = max(stays, key=lambda stay: stay.began)
        yield Meeting(
            state=last.visit.state,
            visit=last.visit.visit,
            last=start.label(last),
            began_ns=last.began[0],
            waited_ns={start.label(each): _waited(each, last) for each in stays if each is not last},
        )


def _waited(stay: Stay, last: Stay) -> int:
    """How long a stay waited for the last to come; nobody waits longer than it stays."""
    return min(last.began[0], stay.ended[0]) - stay.began[0]


def _stragglers(start: Processes) -> list[Straggler]:
    found: list[Straggler] = []
    for key, stays in start.groups().items():
        waits = start.is_together(key)
        # Without a common clock waiting looks like working.
        if len(stays) < 2 or not start.has_time or (key[0] in TOGETHER and not waits):
            continue
        last = max(stays, key=lambda stay: stay.began)
        took = [each.ended[0] - each.began[0] - (_waited(each, last) if waits else 0) for each in stays]
        middle = round(median(took))
        found += [
            _straggler(start, stay, own, middle)
            for stay, own in zip(stays, took, strict=True)
            if own - middle > _tolerance(middle) + (start.error_ns or 0)
        ]
    return sorted(found, key=lambda each: -each.over_ns)


def _straggler(start: Processes, stay: Stay, took: int, middle: int) -> Straggler:
    ends = stay.visit.entered_seq, stay.visit.ended_seq
    return Straggler(
        source=stay.source,
        process=start.label(stay),
        state=stay.visit.state,
        visit=stay.visit.visit,
        took_ns=took,
        median_ns=middle,
        evidence=tuple(seq for seq in ends if seq is not None),
    )


def _tolerance(middle: int) -> int:
    return max(middle // _SHARE, _LEAST_NS)


def _unseen(start: Processes) -> Iterator[str]:
    yield "what a process did before its first event: imports, the launcher"
    if not start.has_time:
        yield "times: what was read has none, so states are in order and no more"
    if start.clock == "unknown":
        yield "how the clocks of the processes relate: the chain is that of the longest alone, and no meeting is shown"
    if start.clock in ("wall", "log") and start.has_time:
        yield "whether a rank that came early could have gone on: in states that ranks do together it counts as waiting"
    hosts = {source.run.started.host for source in start.sources if source.run.started is not None} - {None}
    if start.clock == "wall" and len(hosts) > 1:
        if start.error_ns is None:
            yield f"how far the clocks of {len(hosts)} hosts are apart: they are taken as they are"
        else:
            by = f"{start.error_ns / 1e6:.0f} ms"
            yield f"what lies within {by}: the clocks of {len(hosts)} hosts are laid over each other by their meetings"
    if start.clock == "wall":
        yield from _skewed(start)


def _skewed(start: Processes) -> Iterator[str]:
    """Nobody leaves an agreement before all have come to it."""
    for key, stays in start.groups().items():
        left = [each for each in stays if each.visit.left is not None]
        if key not in start.agreed or not left:
            continue
        first, last = min(left, key=lambda each: each.ended), max(stays, key=lambda each: each.began)
        if first.ended[0] < last.began[0]:
            apart = f"{(last.began[0] - first.ended[0]) / 1e6:.1f} ms"
            who = f"{start.label(first)} left {key[0]} {apart} before {start.label(last)} came to it"
            yield f"the true order of events within {apart}: by their clocks {who}"
