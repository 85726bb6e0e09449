"""
A start as a trace that Perfetto and chrome://tracing open: the JSON object form of the trace event format. Pure.

A process of the trace is a rank. Its first track has the start, in it the states, in them parts, captures and
agreements; each hook has a track. Beside them stand a counter for each account of memory, an instant for each finding,
and a flow through the ranks that agreed on something. Times are microseconds with three decimals: nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from startup_fsm import events
from startup_fsm.clocks import beginnings
from startup_fsm.diagnose import outcome
from startup_fsm.fold import RunState, Visit
from startup_fsm.memory import accounts
from startup_fsm.reports import costs
from startup_fsm.reports.happenings import happenings
from startup_fsm.reports.terminal import clean
from startup_fsm.reports.trace_slices import Flow, Phase, Slice, TraceEvent, microseconds, nested, said
from startup_fsm.starts import Process, Start
from startup_fsm.verdict import RankedFinding, Verdict

#: Tracks of a rank: its states, and from here on its hooks.
_STATES: Final = 1
_HOOKS: Final = 2

#: What lies in what: a start, its states, their parts, captures, agreements.
_START, _STATE, _PART, _CAPTURE, _POINT = range(5)

#: Kinds that are an instant besides the findings: what happened to the start from outside, or turned its way.
_INSTANTS: Final = frozenset(
    {"oom_observed", "signal_received", "peer_failed", "state_stalled", "recovery_chosen", "decision_made"}
)


@attrs.frozen(kw_only=True)
class _Rank:
    """One process on the line of all clocks: ``number`` in the trace, ``offset`` of its clock in ns."""

    number: int
    start: Start
    process: Process
    offset: int
    times: Mapping[int, int | None]

    def at(self, t: int | None) -> int | None:
        return None if t is None else t + self.offset

    def at_seq(self, seq: int) -> int | None:
        return self.at(self.times.get(seq))

    @property
    def run(self) -> RunState:
        return self.process.history


def trace_of(starts: Sequence[Start], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """
    The trace of starts, as plain data.

    Args:
        starts: At least one; starts without a wall clock stand one behind the other.
        verdicts: One for each.
    """
    ranks, base = _ranks(starts)
    flows = _flows(ranks)
    found: list[TraceEvent] = []
    for rank in ranks:
        found += _states(rank, flows)
        found += _hooks(rank)
        found += _counters(rank)
        found += _marks(rank)
    for start, verdict in zip(starts, verdicts, strict=True):
        found += _findings([rank for rank in ranks if rank.start is start], verdict)
    # Stable: what one track has at one time stays in its order.
    found.sort(key=lambda event: event["ts"])
    return {
        "traceEvents": [*_names(ranks, several=len(starts) > 1), *found],
        "displayTimeUnit": "ms",
        "otherData": {
            "wall_ns": base,
            "processes": [_totals(rank) for rank in ranks],
            "verdicts": [{"run": each.run, "attempt": each.attempt, "outcome": each.outcome} for each in verdicts],
            "unseen": [*_UNSEEN, *(clean(each) for start in starts for each in start.unseen)],
        },
    }


_UNSEEN: Final = (
    "memory between two readings: a counter keeps its value until the next",
    "when a hook looked at each event: its runs of a state are one slice of their sum, where they were summed up",
    "how far the wall clocks of several hosts are apart",
)


def _ranks(starts: Sequence[Start]) -> tuple[list[_Rank], int | None]:
    """All processes with their clocks on one line, and the wall clock of its beginning, ns since the epoch."""
    began = [[each.wall_ns for each in beginnings(start.sources)] for start in starts]
    base = min((wall for walls in began for wall in walls if wall is not None), default=None)
    ranks: list[_Rank] = []
    behind = 0
    for start, walls in zip(starts, began, strict=True):
        known = [wall for wall in walls if wall is not None]
        ends = [behind]
        for process, wall in zip(start.processes, walls, strict=True):
            offset = behind if not known else (min(known) if wall is None else wall) - (base or 0)
            times = {record.seq: record.t for record in process.journal.records}
            ranks.append(_Rank(number=len(ranks) + 1, start=start, process=process, offset=offset, times=times))
            ends.append(offset + (process.history.last_t or 0))
        if not known:
            behind = max(ends)
    return ranks, base


def _names(ranks: Sequence[_Rank], *, several: bool) -> Iterator[TraceEvent]:
    for rank in ranks:
        start, started = rank.start, rank.run.started
        label = rank.process.label
        name = f"{label}, {start.run or 'unknown run'} attempt {start.attempt}" if several else label
        facts = [] if started is None else [started.device, started.host, started.pid]
        yield _metadata(rank, 0, "process_name", name=name)
        yield _metadata(rank, 0, "process_labels", labels=", ".join(str(each) for each in facts if each is not None))
        yield _metadata(rank, 0, "process_sort_index", sort_index=rank.number)
        yield _metadata(rank, _STATES, "thread_name", name="states")
        for name, track in _hook_tracks(rank.run).items():
            yield _metadata(rank, track, "thread_name", name=name)


def _metadata(rank: _Rank, track: int, what: str, **args: Any) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": rank.number, "tid": track, "args": said(args)}


def _states(rank: _Rank, flows: Mapping[tuple[int, int], Flow]) -> Iterator[TraceEvent]:
    run = rank.run
    if run.last_t is None:
        return
    whole = Slice(
        begin=rank.offset,
        end=rank.offset + run.last_t,
        level=_START,
        name=f"start: {outcome(rank.process.as_source())}",
        category="start",
        args={
            "run": run.run,
            "attempt": run.attempt,
            "engine": None if run.started is None else run.started.engine,
        },
    )
    slices = [whole]
    rows = costs.times(run, rank.process.label).states
    for visit, row in zip(run.visits, rows, strict=True):
        slices += _visit(rank, visit, row)
    for seq, event in run.agreements:
        if (at := rank.at_seq(seq)) is not None:
            args = {"agreed": event.agreed, "offers": dict(event.offers), "decided_by": event.decided_by}
            name = f"agree on {event.topic}"
            flow = flows.get((rank.number, seq))
            slices.append(Slice(begin=at, end=at, level=_POINT, name=name, category="agreement", args=args, flow=flow))
    yield from nested(slices, rank.number, _STATES)


def _visit(rank: _Rank, visit: Visit, row: costs.StateTime) -> Iterator[Slice]:
    begin = rank.at(row.began_ns)
    if begin is None or row.duration_ns is None:
        return
    end = begin + max(0, row.duration_ns)
    failed = visit.failed
    after = visit.after
    args: dict[str, Any] = {
        "visit": visit.visit,
        "edge": visit.edge,
        "ended": row.ended,
        "duration_ns": row.duration_ns,
        "cpu_ns": row.cpu_ns,
        "bookkeeping_ns": row.bookkeeping_ns,
        "syncing_ns": row.syncing_ns,
        "measuring_ns": row.measuring_ns,
        "used_bytes": None if after is None else after.used_bytes,
    }
    if failed is not None:
        args |= {"category": failed.category, "error": failed.error_type, "message": failed.message}
    yield Slice(begin=begin, end=end, level=_STATE, name=visit.state, category="state", args=args)
    parts = [(at, part) for seq, part in visit.parts if (at := rank.at_seq(seq)) is not None]
    ends = [*(at for at, _ in parts[1:]), end]
    for (at, part), until in zip(parts, ends, strict=False):
        yield Slice(begin=at, end=until, level=_PART, name=part, category="part", args={})
    free = begin
    for seq, event in visit.captures:
        if (at := rank.at_seq(seq)) is not None:
            # It was recorded when it was over; the one before it was over by then.
            yield Slice(
                begin=max(free, at - event.duration_ns),
                end=at,
                level=_CAPTURE,
                name=f"capture {event.size}",
                category="capture",
                args={
                    "duration_ns": event.duration_ns,
                    "part": event.part,
                    "pool": event.pool,
                    "pool_delta_bytes": event.pool_delta_bytes,
                    "outside_delta_bytes": event.outside_delta_bytes,
                },
            )
            free = at


def _hook_tracks(run: RunState) -> dict[str, int]:
    """Track of each hook; what it does at events has one of its own, since those runs are summed up."""
    ran = [_track(event.hook, event.moment) for _, event in run.hooks]
    failed = [_track(event.hook, event.moment) for _, event in run.hook_failures]
    return {name: _HOOKS + at for at, name in enumerate(dict.fromkeys(sorted([*ran, *failed])))}


def _track(hook: str, moment: str) -> str:
    return f"hook {hook}, on_event summed up" if moment == "on_event" else f"hook {hook}"


def _hooks(rank: _Rank) -> Iterator[TraceEvent]:
    run = rank.run
    tracks = _hook_tracks(run)
    slices: dict[str, list[Slice]] = {name: [] for name in tracks}
    happened: list[tuple[int, events.HookRan | events.HookFailed]] = [*run.hooks, *run.hook_failures]
    for seq, event in sorted(happened, key=lambda pair: pair[0]):
        at = rank.at_seq(seq)
        if at is None:
            continue
        args: dict[str, Any] = {"state": event.state, "duration_ns": event.duration_ns}
        if isinstance(event, events.HookFailed):
            args |= {"error": event.error, "policy": event.policy}
        else:
            args["count"] = event.count
        own = slices[_track(event.hook, event.moment)]
        begin = max(rank.offset, at - event.duration_ns)
        if event.moment == "on_event" and own:
            begin = max(begin, own[-1].end)
        own.append(Slice(begin=min(begin, at), end=at, level=_STATE, name=event.moment, category="hook", args=args))
    for name, track in tracks.items():
        yield from nested(slices[name], rank.number, track)


def _counters(rank: _Rank) -> Iterator[TraceEvent]:
    """Bytes by account at every reading; of a log, its figures in bytes."""
    names: dict[str, None] = {}
    for record in rank.process.journal.records:
        at, event = rank.at(record.t), record.event
        if at is None:
            continue
        if isinstance(event, events.SnapshotTaken):
            held: dict[str, int] = {}
            for account in accounts(event.snapshot):
                held[account.account] = held.get(account.account, 0) + account.bytes
            names.update(dict.fromkeys(held))
            for name in names:
                yield _counter(rank, at, name, held.get(name, 0))
            yield _counter(rank, at, "free", event.snapshot.free_bytes)
        elif isinstance(event, events.FigureRead) and event.figure.endswith("_bytes") and type(event.value) is int:
            yield _counter(rank, at, event.figure, event.value)


def _counter(rank: _Rank, at: int, name: str, size: int) -> TraceEvent:
    ts = microseconds(at)
    return {"ph": "C", "name": clean(name), "cat": "memory", "pid": rank.number, "ts": ts, "args": {"bytes": size}}


def _marks(rank: _Rank) -> Iterator[TraceEvent]:
    for record in rank.process.journal.records:
        at = rank.at(record.t)
        if at is not None and record.kind in _INSTANTS:
            text = "; ".join(each.text for each in happenings(record))
            yield _instant(rank, at, record.kind, "event", {"seq": record.seq, "said": text})


def _findings(ranks: Sequence[_Rank], verdict: Verdict) -> Iterator[TraceEvent]:
    for ranked in verdict.findings:
        rank = next((each for each in ranks if each.process.label == ranked.rank), ranks[0])
        at = _place(ranked, rank, ranks)
        if at is None:
            continue
        finding = ranked.finding
        args = {
            "severity": finding.severity,
            "state": finding.state,
            "message": finding.message,
            "scope": finding.scope,
            "bytes": finding.bytes,
        }
        yield _instant(rank, at, finding.code, "finding", args, is_wide=finding.severity == "error")


def _place(ranked: RankedFinding, rank: _Rank, ranks: Iterable[_Rank]) -> int | None:
    """When the last event that shows a finding was recorded; the end of its rank, where nothing tells."""
    seqs = [each["seq"] for each in ranked.evidence if type(each.get("seq")) is int]
    lines = {each["line"] for each in ranked.evidence if type(each.get("line")) is int}
    shown = [at for seq in seqs if (at := rank.at_seq(seq)) is not None]
    if not shown and lines:
        shown = [
            at
            for each in ranks
            for record in each.process.journal.records
            if record.origin is not None and record.origin.line in lines and (at := each.at(record.t)) is not None
        ]
    return max(shown, default=rank.at(rank.run.last_t))


def _instant(
    rank: _Rank, at: int, name: str, category: str, args: dict[str, Any], *, is_wide: bool = False
) -> TraceEvent:
    return {
        "ph": "i",
        "name": clean(name),
        "cat": category,
        "s": "p" if is_wide else "t",
        "pid": rank.number,
        "tid": _STATES,
        "ts": microseconds(at),
        "args": said(args),
    }


def _flows(ranks: Sequence[_Rank]) -> dict[tuple[int, int], Flow]:
    """By rank and seq of its event: the flow through all ranks that agreed on the same thing, in order of time."""
    met: dict[tuple[str | None, int, str, int], list[tuple[int, int, int]]] = {}
    for rank in ranks:
        times: dict[str, int] = {}
        for seq, event in rank.run.agreements:
            times[event.topic] = times.get(event.topic, 0) + 1
            if (at := rank.at_seq(seq)) is not None:
                key = rank.start.run, rank.start.attempt, event.topic, times[event.topic]
                met.setdefault(key, []).append((at, rank.number, seq))
    flows = {}
    for number, (key, points) in enumerate(met.items(), 1):
        ordered = sorted(points)
        for index, (_, rank_number, seq) in enumerate(ordered):
            if len(ordered) > 1:
                phase = _PHASES[(index > 0) + (index == len(ordered) - 1)]
                flows[rank_number, seq] = Flow(number=number, phase=phase, name=key[2])
    return flows


#: A flow starts, passes, finishes.
_PHASES: Final[tuple[Phase, ...]] = ("s", "t", "f")


def _totals(rank: _Rank) -> dict[str, Any]:
    """What ``time`` says of the same process."""
    times = costs.times(rank.run, rank.process.label)
    return {
        "pid": rank.number,
        "process": clean(times.process),
        "run": rank.start.run,
        "attempt": rank.start.attempt,
        "total_ns": times.total_ns,
        "unattributed_ns": times.unattributed_ns,
    }
