"""
Events of one process become OpenTelemetry spans, with the times of the events and not of the clock.

    the start -> its states -> captures and hooks

Attributes have the names of the semantic conventions where those have one, else ``startup_fsm.*``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context

from startup_fsm import events
from startup_fsm.findings import Finding
from startup_fsm.memory import Snapshot, accounts
from startup_fsm.verdict import Verdict

#: Names of the semantic conventions, release 1.44 (error and service stable, the others in development).
SERVICE_NAME: Final = "service.name"
SERVICE_VERSION: Final = "service.version"
SERVICE_INSTANCE_ID: Final = "service.instance.id"
HOST_NAME: Final = "host.name"
PROCESS_PID: Final = "process.pid"
ERROR_TYPE: Final = "error.type"
EXCEPTION: Final = "exception"
EXCEPTION_TYPE: Final = "exception.type"
EXCEPTION_MESSAGE: Final = "exception.message"
EXCEPTION_STACKTRACE: Final = "exception.stacktrace"

#: What is ours in front of names.
OURS: Final = "startup_fsm"

#: Longest text of an attribute, in characters.
_TEXT: Final = 2_000
#: What the wire can hold of an integer.
_LARGEST: Final = 1 << 63

#: Kinds whose plain fields are an event of the span that is open.
_TOLD: Final = frozenset(
    {
        "attempt_started",
        "budget_computed",
        "decision_made",
        "estimate_made",
        "oom_observed",
        "peer_failed",
        "ranks_agreed",
        "recovery_chosen",
        "signal_received",
        "state_stalled",
    }
)

Value = str | bool | int | float


class Spans:
    """
    The spans of one process.

    Args:
        tracer: Makes them.
        parent: What the start is a part of; None for nothing.
        wall_ns: Wall clock at ``t = 0``, ns since the epoch, where the journal does not tell it.
        attributes: More about the start, on its span.
    """

    def __init__(
        self,
        tracer: Tracer,
        *,
        parent: Context | None = None,
        wall_ns: int = 0,
        attributes: Mapping[str, Value] | None = None,
    ) -> None:
        self._tracer = tracer
        self._parent = Context() if parent is None else parent
        self._wall = wall_ns
        self._attributes = dict(attributes or {})
        self._root: Span | None = None
        self._state: Span | None = None
        self._now = wall_ns
        self._end: int | None = None
        self._takes: dict[str, Callable[[Any], None]] = {
            "state_entered": self._entered,
            "state_left": self._left,
            "state_failed": self._failed,
            "part_entered": self._part,
            "snapshot_taken": self._snapshot,
            "graph_captured": self._captured,
            "hook_ran": self._hook,
            "hook_failed": self._hook_failed,
            "check_judged": self._judged,
        }

    @property
    def end_ns(self) -> int:
        """When the start ended, or its last event so far; ns since the epoch."""
        return self._now if self._end is None else self._end

    def take(self, record: events.Record) -> None:
        """One more event, in order."""
        event = record.event
        if isinstance(event, events.RunStarted) and event.wall_ns is not None:
            self._wall = event.wall_ns
        if record.t is not None:
            self._now = self._wall + record.t
        if self._root is None:
            self._begin(record)
        if record.kind in self._takes:
            self._takes[record.kind](event)
        elif record.kind in _TOLD:
            self._tell(f"{OURS}.{record.kind}", plain_fields(event))
        elif isinstance(event, events.RunFinished):
            # Hooks are summed up after it.
            self._end = self._now

    def _begin(self, record: events.Record) -> None:
        started = record.event if isinstance(record.event, events.RunStarted) else None
        begin = self._wall if started is not None else self._now
        given = start_attributes(record, started) | self._attributes
        self._root = self._tracer.start_span("startup", self._parent, SpanKind.INTERNAL, given, start_time=begin)

    @property
    def _here(self) -> Span | None:
        return self._state or self._root

    def _tell(self, name: str, attributes: Mapping[str, Value]) -> None:
        if self._here is not None:
            self._here.add_event(name, dict(attributes), self._now)

    def _child(self, name: str, parent: Span | None, begin: int, attributes: Mapping[str, Value]) -> Span:
        context = self._parent if parent is None else set_span_in_context(parent, Context())
        return self._tracer.start_span(name, context, SpanKind.INTERNAL, dict(attributes), start_time=begin)

    def _entered(self, event: events.StateEntered) -> None:
        # One that is open still was never left: it ends where the next begins.
        self._end_state(unfinished=True)
        self._state = self._child(text(event.state), self._root, self._now, plain_fields(event))

    def _end_state(self, *, unfinished: bool = False) -> None:
        state, self._state = self._state, None
        if state is not None:
            if unfinished:
                state.set_attribute(f"{OURS}.unfinished", value=True)
            state.end(self._now)

    def _left(self, event: events.StateLeft) -> None:
        if self._state is not None:
            self._state.set_attributes(plain_fields(event))
        self._end_state()

    def _failed(self, event: events.StateFailed) -> None:
        if self._state is not None:
            self._state.set_attributes({**plain_fields(event), ERROR_TYPE: text(event.error_type)})
            self._state.set_status(Status(StatusCode.ERROR, _first(event.message) or text(event.error_type)))
            thrown = {EXCEPTION_TYPE: text(event.error_type), EXCEPTION_MESSAGE: text(event.message)}
            if event.where:
                thrown[EXCEPTION_STACKTRACE] = text("\n".join(event.where))
            self._tell(EXCEPTION, thrown)
        self._end_state()

    def _part(self, event: events.PartEntered) -> None:
        self._tell(f"{OURS}.part", {f"{OURS}.part": text(event.part)})

    def _snapshot(self, event: events.SnapshotTaken) -> None:
        memory = memory_attributes(event.snapshot)
        self._tell(f"{OURS}.memory", {f"{OURS}.memory.label": text(event.label), **memory})
        if self._state is not None and event.label in ("leave", "fail"):
            self._state.set_attributes(memory)

    def _captured(self, event: events.GraphCaptured) -> None:
        span = self._child("capture", self._here, self._now - event.duration_ns, plain_fields(event))
        span.end(self._now)

    def _hook(self, event: events.HookRan) -> None:
        span = self._child(f"hook {text(event.hook)}", self._here, self._now - event.duration_ns, plain_fields(event))
        span.end(self._now)

    def _hook_failed(self, event: events.HookFailed) -> None:
        span = self._child(f"hook {text(event.hook)}", self._here, self._now - event.duration_ns, plain_fields(event))
        span.set_status(Status(StatusCode.ERROR, _first(event.error)))
        span.end(self._now)

    def _judged(self, event: events.CheckJudged) -> None:
        for finding in event.findings:
            self._tell(f"{OURS}.finding", finding_attributes(finding) | {f"{OURS}.check": text(event.check)})

    def close(self, verdict: Verdict | None) -> None:
        """
        End what is open, where the last event was.

        Args:
            verdict: On the whole start; None where nobody knows how it ended, as when a program stops in between.
        """
        outcome = "running" if verdict is None else verdict.outcome
        if self._state is not None:
            if outcome not in ("ready", "running"):
                self._state.set_status(Status(StatusCode.ERROR, f"ended without a trace: {outcome}"))
            self._end_state(unfinished=True)
        root, self._root = self._root, None
        if root is None:
            return
        if verdict is not None:
            conclude(root, verdict, self.end_ns)
        if outcome in ("running", "incomplete"):
            root.set_attribute(f"{OURS}.unfinished", value=True)
        root.end(self.end_ns)


def conclude(root: Span, verdict: Verdict, now: int) -> None:
    """What the verdict says, on the span of the start; ``now`` is in ns since the epoch."""
    root.set_attribute(f"{OURS}.outcome", verdict.outcome)
    for ranked in verdict.findings:
        whose: dict[str, Value] = {} if ranked.rank is None else {f"{OURS}.finding.rank": text(ranked.rank)}
        root.add_event(f"{OURS}.finding", finding_attributes(ranked.finding) | whose, now)
    if verdict.outcome in ("ready", "running"):
        return
    if verdict.failed_state is not None:
        root.set_attribute(f"{OURS}.failed_state", text(verdict.failed_state))
    first = verdict.findings[0].finding.code if verdict.findings else verdict.outcome
    root.set_attribute(ERROR_TYPE, text(first))
    root.set_status(Status(StatusCode.ERROR, headline(verdict)))


def headline(verdict: Verdict) -> str:
    """A verdict in one line: how it ended, where, and its first finding."""
    line = {"oom": "out of memory", "error": "failed"}.get(verdict.outcome, verdict.outcome)
    if verdict.failed_state is not None:
        line += f" in {verdict.failed_state}"
    if verdict.failed_rank is not None:
        line += f", {verdict.failed_rank}"
    if verdict.findings:
        finding = verdict.findings[0].finding
        line += f": {finding.code}: {finding.message}"
    return text(line)


def start_attributes(record: events.Record, started: events.RunStarted | None) -> dict[str, Value]:
    """Of the span of a start: which it is, and what it was asked for."""
    found: dict[str, Value | None] = {
        f"{OURS}.run": text(record.run),
        f"{OURS}.attempt": record.attempt,
        f"{OURS}.process": text(record.process),
        f"{OURS}.rank": record.rank,
    }
    if started is not None:
        plan = started.plan.get("name")
        found |= {
            f"{OURS}.engine": started.engine,
            f"{OURS}.engine_version": started.engine_version,
            f"{OURS}.device": started.device,
            f"{OURS}.plan": plan if isinstance(plan, str) else None,
            f"{OURS}.mode": started.mode,
            f"{OURS}.source": started.source,
            f"{OURS}.label": started.label,
            f"{OURS}.fingerprint": started.fingerprint,
        }
        found |= {f"{OURS}.knob.{text(name)}": plain(value) for name, value in started.knobs.items()}
    return {
        name: text(value) if isinstance(value, str) else value for name, value in found.items() if value is not None
    }


def place_attributes(started: events.RunStarted) -> dict[str, Value]:
    """Host and process, as the semantic conventions call them."""
    found = {HOST_NAME: plain(started.host), PROCESS_PID: plain(started.pid)}
    return {name: value for name, value in found.items() if value is not None}


def memory_attributes(snapshot: Snapshot) -> dict[str, Value]:
    """A reading of memory, in bytes; accounts by name."""
    found: dict[str, Value] = {
        f"{OURS}.memory.total_bytes": snapshot.total_bytes,
        f"{OURS}.memory.free_bytes": snapshot.free_bytes,
        f"{OURS}.memory.used_bytes": snapshot.used_bytes,
        f"{OURS}.memory.own_bytes": snapshot.own_bytes,
        f"{OURS}.memory.reserved_bytes": snapshot.reserved_bytes,
        f"{OURS}.memory.reserved_peak_bytes": snapshot.reserved_peak_bytes,
    }
    for account in accounts(snapshot):
        name = f"{OURS}.memory.account.{text(account.account).replace(' ', '_').replace(',', '')}"
        found[name] = int(found.get(name, 0)) + account.bytes
    return found


def finding_attributes(finding: Finding) -> dict[str, Value]:
    """Code, severity, place and sentence of a finding."""
    found = {
        "code": finding.code,
        "severity": finding.severity,
        "state": finding.state,
        "message": finding.message,
        "scope": finding.scope,
    }
    named: dict[str, Value] = {f"{OURS}.finding.{name}": text(value) for name, value in found.items() if value}
    return named | {f"{OURS}.finding.bytes": finding.bytes}


def plain_fields(event: events.Event) -> dict[str, Value]:
    """The fields of an event that are plain values, under our name."""
    kind: Any = type(event)
    found = {field.name: plain(getattr(event, field.name)) for field in attrs.fields(kind)}
    return {f"{OURS}.{name}": value for name, value in found.items() if value is not None and value != ""}


def plain(value: Any) -> Value | None:
    """A value that an attribute can hold; None for any other."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if -_LARGEST <= value < _LARGEST else str(value)
    return None


def text(value: object) -> str:
    """A text that the wire can hold, and no longer than anybody reads."""
    return str(value)[:_TEXT].encode("utf-8", "backslashreplace").decode()


def _first(value: str) -> str:
    lines = value.strip().splitlines()
    return text(lines[0]) if lines else ""
