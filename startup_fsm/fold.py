"""
Events to state: the only place where the state of a start is derived. Pure.

    state = fold(records)

The fold never rejects: it folds facts and records violations. The live machine folds its own events with the same
code and refuses before it writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

import attrs

from startup_fsm import events
from startup_fsm.errors import PlanError
from startup_fsm.memory import Snapshot
from startup_fsm.plan import Plan

#: ``before`` any state, inside an ``open`` one, after one that was ``left`` or has ``failed``, or at an end.
Position = Literal["before", "open", "left", "failed", "ended"]


@attrs.define(kw_only=True)
class Visit:
    """
    One stay in one state.

    Attributes:
        state, visit, edge, source: As in ``state_entered``.
        entered_seq, entered_t: Where and when it began; ``t`` in ns since the file began.
        ended_seq, ended_t: Where and when it ended; None while it is open.
        left, failed: How it ended; None while it is open.
        parts: Named parts entered, in order, with their seq.
        snapshots: By label, with their seq; the last of a label wins.
        notes: Facts by name.
        captures: Graphs, with their seq.
        probes: By name, the last of each, with its seq.
        workspaces: Persistent workspaces that the engine named, in order.
    """

    state: str
    visit: int
    edge: str | None
    source: str | None
    entered_seq: int
    entered_t: int | None
    ended_seq: int | None = None
    ended_t: int | None = None
    left: events.StateLeft | None = None
    failed: events.StateFailed | None = None
    parts: list[tuple[int, str]] = attrs.field(factory=list)
    snapshots: dict[str, tuple[int, Snapshot]] = attrs.field(factory=dict)
    notes: dict[str, Any] = attrs.field(factory=dict)
    captures: list[tuple[int, events.GraphCaptured]] = attrs.field(factory=list)
    probes: dict[str, tuple[int, events.ProbeRecorded]] = attrs.field(factory=dict)
    workspaces: list[tuple[int, events.ProbeRecorded]] = attrs.field(factory=list)

    @property
    def is_open(self) -> bool:
        """True while no event ended it."""
        return self.left is None and self.failed is None

    @property
    def part(self) -> str | None:
        """The part entered last, or None."""
        return self.parts[-1][1] if self.parts else None

    @property
    def before(self) -> Snapshot | None:
        """Memory as the state was entered."""
        return self.snapshots["enter"][1] if "enter" in self.snapshots else None

    @property
    def after(self) -> Snapshot | None:
        """Memory as the state was left, or as it failed."""
        for label in ("leave", "fail"):
            if label in self.snapshots:
                return self.snapshots[label][1]
        return None

    @property
    def duration_ns(self) -> int | None:
        """Time from entry to end; None where it is open or the source has no time."""
        if self.entered_t is None or self.ended_t is None:
            return None
        return self.ended_t - self.entered_t


@attrs.define(kw_only=True)
class PoolLife:
    """One life of a pool: from its opening to its release; a pool opened again has more than one."""

    pool: str
    purpose: str
    state: str | None
    opened_seq: int
    released: events.PoolReleased | None = None
    released_seq: int | None = None


@attrs.frozen
class Violation:
    """An event that the plan, or the one before it, does not allow."""

    seq: int
    expected: tuple[str, ...]
    found: str
    message: str


@attrs.define(kw_only=True)
class RunState:
    """
    All that a journal says of one process and attempt.

    Attributes:
        records: How many were folded.
        position: Where the start stands.
        edges_taken: (source, edge) to how often.
        last_seq, last_t: Of the last record.
    """

    run: str | None = None
    process: str | None = None
    rank: int | None = None
    attempt: int = 1
    records: int = 0
    last_seq: int = -1
    last_t: int | None = None
    position: Position = "before"
    started: events.RunStarted | None = None
    plan: Plan | None = None
    plan_trouble: str | None = None
    attempts: list[events.AttemptStarted] = attrs.field(factory=list)
    visits: list[Visit] = attrs.field(factory=list)
    edges_taken: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    pools: list[PoolLife] = attrs.field(factory=list)
    arena: tuple[int, events.ArenaMapped] | None = None
    figures: dict[str, tuple[int, events.FigureRead]] = attrs.field(factory=dict)
    estimates: list[tuple[int, events.EstimateMade]] = attrs.field(factory=list)
    budgets: list[tuple[int, events.BudgetComputed]] = attrs.field(factory=list)
    checks: list[tuple[int, events.CheckJudged]] = attrs.field(factory=list)
    decisions: list[tuple[int, events.DecisionMade]] = attrs.field(factory=list)
    recoveries: list[tuple[int, events.RecoveryChosen]] = attrs.field(factory=list)
    agreements: list[tuple[int, events.RanksAgreed]] = attrs.field(factory=list)
    hooks: list[tuple[int, events.HookRan]] = attrs.field(factory=list)
    hook_failures: list[tuple[int, events.HookFailed]] = attrs.field(factory=list)
    ooms: list[tuple[int, events.OomObserved]] = attrs.field(factory=list)
    stalls: list[tuple[int, events.StateStalled]] = attrs.field(factory=list)
    signals: list[tuple[int, events.SignalReceived]] = attrs.field(factory=list)
    peer_failures: list[tuple[int, events.PeerFailed]] = attrs.field(factory=list)
    finished: tuple[int, events.RunFinished] | None = None
    unknown: Counter[str] = attrs.field(factory=Counter)
    violations: list[Violation] = attrs.field(factory=list)

    @property
    def current(self) -> Visit | None:
        """The visit that is open, or the last one; None before the first state."""
        return self.visits[-1] if self.visits else None

    @property
    def state(self) -> str | None:
        """Name of the state that is open or was last."""
        return self.visits[-1].state if self.visits else None

    def visits_of(self, state: str) -> list[Visit]:
        """All visits of a state, in order."""
        return [visit for visit in self.visits if visit.state == state]

    def last(self, state: str) -> Visit | None:
        """The last visit of a state, or None."""
        return next((visit for visit in reversed(self.visits) if visit.state == state), None)

    def note(self, name: str) -> Any:
        """The last note of that name in any state; None where there is none."""
        return next((visit.notes[name] for visit in reversed(self.visits) if name in visit.notes), None)

    def knob(self, name: str, default: Any = None) -> Any:
        """A setting as it was at the start."""
        return default if self.started is None else self.started.knobs.get(name, default)

    def apply(self, record: events.Record) -> None:
        """Fold one more record."""
        self.records += 1
        self.last_seq = record.seq
        if record.t is not None:
            self.last_t = record.t
        folded = _FOLDS.get(record.kind)
        if folded is None:
            if isinstance(record.event, events.UnknownEvent):
                self.unknown[record.kind] += 1
            return
        folded(self, record, record.event)

    def violated(self, seq: int, expected: Iterable[str], found: str, message: str) -> None:
        """Record that an event does not fit."""
        self.violations.append(Violation(seq, tuple(expected), found, message))


def fold(records: Iterable[events.Record]) -> RunState:
    """The state that a sequence of records says."""
    state = RunState()
    for record in records:
        state.apply(record)
    return state


def _run_started(run: RunState, record: events.Record, event: events.RunStarted) -> None:
    if run.started is not None:
        run.violated(record.seq, (), "run_started", "the run began twice in one file")
    run.run, run.process, run.rank, run.attempt = record.run, record.process, record.rank, record.attempt
    run.started = event
    if event.plan:
        try:
            run.plan = Plan.from_data(event.plan)
        except PlanError as error:
            run.plan_trouble = error.message


def _state_entered(run: RunState, record: events.Record, event: events.StateEntered) -> None:
    _judge_entry(run, record.seq, event)
    if event.source is not None and event.edge is not None:
        run.edges_taken[event.source, event.edge] += 1
    run.visits.append(
        Visit(
            state=event.state,
            visit=event.visit,
            edge=event.edge,
            source=event.source,
            entered_seq=record.seq,
            entered_t=record.t,
        )
    )
    run.position = "open"


def _judge_entry(run: RunState, seq: int, event: events.StateEntered) -> None:
    plan, here = run.plan, run.state
    if run.position == "ended":
        run.violated(seq, (), event.state, f"{event.state} entered after the end")
    elif run.position == "open":
        run.violated(seq, (f"state_left {here}",), event.state, f"{event.state} entered while {here} is open")
    elif plan is None or plan.is_free:
        return
    elif here is None:
        if event.state != plan.start:
            run.violated(seq, (plan.start,), event.state, f"the start is {plan.start}, not {event.state}")
    elif not _is_allowed(run, plan, here, event):
        allowed = allowed_targets(run)
        text = f"{here} -> {event.state} by {event.edge!r} is not allowed; allowed: {', '.join(allowed) or 'nothing'}"
        run.violated(seq, allowed, event.state, text)


def _is_allowed(run: RunState, plan: Plan, here: str, event: events.StateEntered) -> bool:
    edge = plan.edge(here, event.edge or "")
    if edge is None or edge.target != event.state:
        return False
    fits = ("recover", "fail") if run.position == "failed" else ("advance", "degrade")
    return edge.policy in fits and plan.allows(here, edge.name, taken=run.edges_taken[here, edge.name])


def allowed_targets(run: RunState) -> tuple[str, ...]:
    """States and ends that may come next."""
    plan, here = run.plan, run.state
    if plan is None or run.position in ("open", "ended"):
        return ()
    if plan.is_free:
        return tuple(state.name for state in plan.states)
    if here is None:
        return (plan.start,)
    fits = ("recover", "fail") if run.position == "failed" else ("advance", "degrade")
    return tuple(
        edge.target
        for edge in plan.edges_from(here)
        if edge.policy in fits and plan.allows(here, edge.name, taken=run.edges_taken[here, edge.name])
    )


def _ended(run: RunState, record: events.Record, event: Any, to: Position) -> Visit | None:
    visit = run.current
    if visit is None or not visit.is_open or visit.state != event.state:
        run.violated(record.seq, (), record.kind, f"{record.kind} {event.state}, which is not open")
        return None
    visit.ended_seq, visit.ended_t = record.seq, record.t
    if run.position == "ended":
        run.violated(record.seq, (), record.kind, f"{record.kind} {event.state} after the end")
    else:
        run.position = to
    return visit


def _state_left(run: RunState, record: events.Record, event: events.StateLeft) -> None:
    if (visit := _ended(run, record, event, "left")) is not None:
        visit.left = event


def _state_failed(run: RunState, record: events.Record, event: events.StateFailed) -> None:
    if (visit := _ended(run, record, event, "failed")) is not None:
        visit.failed = event


def _part_entered(run: RunState, record: events.Record, event: events.PartEntered) -> None:
    if run.visits:
        run.visits[-1].parts.append((record.seq, event.part))


def _snapshot_taken(run: RunState, record: events.Record, event: events.SnapshotTaken) -> None:
    if run.visits:
        run.visits[-1].snapshots[event.label] = (record.seq, event.snapshot)


def _probe_recorded(run: RunState, record: events.Record, event: events.ProbeRecorded) -> None:
    if run.visits:
        run.visits[-1].probes[event.probe] = (record.seq, event)
        if event.probe == "workspace":
            run.visits[-1].workspaces.append((record.seq, event))


def _note_added(run: RunState, record: events.Record, event: events.NoteAdded) -> None:
    if run.visits:
        run.visits[-1].notes.update(event.note)


def _graph_captured(run: RunState, record: events.Record, event: events.GraphCaptured) -> None:
    if run.visits:
        run.visits[-1].captures.append((record.seq, event))


def _pool_opened(run: RunState, record: events.Record, event: events.PoolOpened) -> None:
    run.pools.append(PoolLife(pool=event.pool, purpose=event.purpose, state=event.state, opened_seq=record.seq))


def _pool_released(run: RunState, record: events.Record, event: events.PoolReleased) -> None:
    for life in reversed(run.pools):
        if life.pool == event.pool and life.released is None:
            life.released, life.released_seq = event, record.seq
            return
    run.violated(record.seq, (), event.pool, f"pool {event.pool} released, which is not open")


def _arena_mapped(run: RunState, record: events.Record, event: events.ArenaMapped) -> None:
    run.arena = (record.seq, event)


def _figure_read(run: RunState, record: events.Record, event: events.FigureRead) -> None:
    run.figures[event.figure] = (record.seq, event)


def _run_finished(run: RunState, record: events.Record, event: events.RunFinished) -> None:
    plan, here = run.plan, run.state
    if run.position == "ended":
        run.violated(record.seq, (), event.end, "the run ended twice")
    elif run.position == "open" and event.end == "ready":
        run.violated(record.seq, (f"state_left {here}",), event.end, f"ready while {here} is open")
    elif event.end == "ready" and plan is not None and not plan.is_free and event.end not in allowed_targets(run):
        run.violated(record.seq, allowed_targets(run), event.end, f"{here} -> ready is not allowed")
    run.finished = (record.seq, event)
    run.position = "ended"


def _listed(name: str) -> Callable[[RunState, events.Record, Any], None]:
    def folded(run: RunState, record: events.Record, event: Any) -> None:
        getattr(run, name).append((record.seq, event))

    return folded


_FOLDS: Final[dict[str, Callable[[RunState, events.Record, Any], None]]] = {
    "run_started": _run_started,
    "attempt_started": lambda run, _, event: run.attempts.append(event),
    "state_entered": _state_entered,
    "part_entered": _part_entered,
    "snapshot_taken": _snapshot_taken,
    "probe_recorded": _probe_recorded,
    "figure_read": _figure_read,
    "note_added": _note_added,
    "pool_opened": _pool_opened,
    "pool_released": _pool_released,
    "arena_mapped": _arena_mapped,
    "graph_captured": _graph_captured,
    "estimate_made": _listed("estimates"),
    "check_judged": _listed("checks"),
    "budget_computed": _listed("budgets"),
    "ranks_agreed": _listed("agreements"),
    "decision_made": _listed("decisions"),
    "hook_ran": _listed("hooks"),
    "hook_failed": _listed("hook_failures"),
    "state_stalled": _listed("stalls"),
    "oom_observed": _listed("ooms"),
    "signal_received": _listed("signals"),
    "peer_failed": _listed("peer_failures"),
    "state_left": _state_left,
    "state_failed": _state_failed,
    "recovery_chosen": _listed("recoveries"),
    "run_finished": _run_finished,
}
