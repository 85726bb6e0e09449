"""
What an event says to somebody who watches: one line, or none where it is no news. Pure.

Texts are as the journal has them: whoever shows a line cleans it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs

from startup_fsm import events
from startup_fsm.findings import Finding
from startup_fsm.memory import format_bytes
from startup_fsm.reports.terminal import duration

_LINE: Final = 400


@attrs.frozen(kw_only=True)
class Happening:
    """
    One line.

    Attributes:
        t: Monotonic ns since the journal began; None where the source has no time.
        text: What happened.
        severity: ``error``, ``warning`` or ``note`` for what somebody should know; empty for the ordinary course.
    """

    t: int | None
    text: str
    severity: str = ""


def happenings(record: events.Record) -> Iterator[Happening]:
    """The lines of one event."""
    say = _SAYINGS.get(record.kind)
    if say is not None:
        for severity, text in say(record.event):
            yield Happening(t=record.t, text=text, severity=severity)


_Said = Iterator[tuple[str, str]]


def _run_started(event: events.RunStarted) -> _Said:
    engine = f"{event.engine or 'an engine'} {event.engine_version or ''}".rstrip()
    plan = event.plan.get("name")
    device = f" on {event.device}" if event.device else ""
    yield "", f"{engine} begins{device}{f', plan {plan}' if plan and event.source == 'journal' else ''}"


def _attempt_started(event: events.AttemptStarted) -> _Said:
    yield "note", f"attempt {event.attempt}: {event.reason}"


def _visit(event: Any) -> str:
    return f"{event.state}" if event.visit == 1 else f"{event.state} (visit {event.visit})"


def _state_entered(event: events.StateEntered) -> _Said:
    yield "", f"enters {_visit(event)}"


def _part_entered(event: events.PartEntered) -> _Said:
    yield "", f"{_visit(event)}: part {event.part}"


def _state_left(event: events.StateLeft) -> _Said:
    took = f" after {duration(event.duration_ns)}" if event.duration_ns else ""
    yield "", f"leaves {_visit(event)}{took}"


def _state_failed(event: events.StateFailed) -> _Said:
    part = "" if event.part is None else f", part {event.part},"
    yield "error", f"{_visit(event)}{part} failed ({event.category}): {_first(event.message) or event.error_type}"


def _recovery_chosen(event: events.RecoveryChosen) -> _Said:
    bound = "" if event.bound is None else f" of {event.bound}"
    yield "warning", f"goes on to {event.target} by {event.edge}, {event.taken}{bound}: {_first(event.reason)}"


def _run_finished(event: events.RunFinished) -> _Said:
    took = f" after {duration(event.duration_ns)}" if event.duration_ns else ""
    reason = f": {_first(event.reason)}" if event.reason else ""
    yield ("" if event.end == "ready" else "error"), f"{event.end}{took}{reason}"


def _check_judged(event: events.CheckJudged) -> _Said:
    for finding in event.findings:
        yield finding.severity, finding_line(finding)


def finding_line(finding: Finding) -> str:
    """Code, place and sentence of a finding."""
    where = "" if finding.state is None else f" in {finding.state}"
    return f"{finding.code}{where}: {_first(finding.message)}"


def _budget_computed(event: events.BudgetComputed) -> _Said:
    if event.missing_bytes:
        yield "error", f"the KV cache does not fit: {format_bytes(event.missing_bytes)} are missing"
    else:
        yield "", f"KV cache of {format_bytes(event.kv_bytes)}: {event.blocks} blocks"


def _estimate_made(event: events.EstimateMade) -> _Said:
    yield "", f"{event.estimate} will take {format_bytes(event.recurring_bytes)} ({event.method})"


def _ranks_agreed(event: events.RanksAgreed) -> _Said:
    by = "" if event.decided_by is None else f", decided by {event.decided_by}"
    yield "", f"ranks agree on {event.topic}: {event.agreed}{by}"


def _decision_made(event: events.DecisionMade) -> _Said:
    yield "note", f"{event.decision}: {_first(event.reason)}"


def _figure_read(event: events.FigureRead) -> _Said:
    is_bytes = isinstance(event.value, int) and event.figure.endswith("_bytes")
    yield "", f"{event.figure} {format_bytes(int(event.value)) if is_bytes else event.value}"


def _oom_observed(event: events.OomObserved) -> _Said:
    tried = "" if event.tried_bytes is None else f": {format_bytes(event.tried_bytes)} were asked for"
    free = "" if event.free_bytes is None else f", {format_bytes(event.free_bytes)} were free"
    yield "error", f"out of memory{tried}{free}"


def _hook_failed(event: events.HookFailed) -> _Said:
    yield "warning", f"hook {event.hook} failed at {event.moment}: {_first(event.error)}"


def _state_stalled(event: events.StateStalled) -> _Said:
    line = f" at: {event.stack[-1].strip()}" if event.stack else ""
    yield "warning", f"{_visit(event)} passed its deadline of {duration(event.deadline_ns)}{line}"


def _signal_received(event: events.SignalReceived) -> _Said:
    where = "" if event.state is None else f" in {event.state}"
    yield "warning", f"{event.signal} arrived{where}"


def _peer_failed(event: events.PeerFailed) -> _Said:
    where = "" if event.state is None else f" in {event.state}"
    yield "error", f"{event.peer} failed{where}: {_first(event.reason)}"


def _note_added(event: events.NoteAdded) -> _Said:
    if "survived" in event.note:
        yield "note", f"survived: {_first(event.note['survived'])}"


def _first(text: object) -> str:
    lines = str(text).strip().splitlines()
    return lines[0][:_LINE] if lines else ""


_SAYINGS: Final[dict[str, Callable[[Any], _Said]]] = {
    "run_started": _run_started,
    "attempt_started": _attempt_started,
    "state_entered": _state_entered,
    "part_entered": _part_entered,
    "state_left": _state_left,
    "state_failed": _state_failed,
    "recovery_chosen": _recovery_chosen,
    "run_finished": _run_finished,
    "check_judged": _check_judged,
    "budget_computed": _budget_computed,
    "estimate_made": _estimate_made,
    "ranks_agreed": _ranks_agreed,
    "decision_made": _decision_made,
    "figure_read": _figure_read,
    "oom_observed": _oom_observed,
    "hook_failed": _hook_failed,
    "state_stalled": _state_stalled,
    "signal_received": _signal_received,
    "peer_failed": _peer_failed,
    "note_added": _note_added,
}
