"""
Events as one line of words each: what a reader searches in. Pure.

Fields that have their default are left out, bytes and times get units, and nothing is longer than a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import attrs

from startup_fsm import events
from startup_fsm.events import Event, Record, UnknownEvent
from startup_fsm.findings import Finding
from startup_fsm.memory import Snapshot, format_bytes
from startup_fsm.reports.terminal import duration

#: Longest text of a field, and fields of a nested value, before more is left out.
FIELD: Final = 400
ENTRIES: Final = 12

#: Fields that stand in columns of their own, or that other panels show in full.
_ELSEWHERE: Final = frozenset(
    {"state", "visit", "plan", "versions", "environment", "fingerprint", "wall_ns", "sources"}
)


def brief(text: str) -> str:
    """The beginning of a text, cut between two words: half of a name could not be told and replaced any more."""
    if len(text) <= FIELD:
        return text
    head = text[:FIELD]
    return head[: head.rfind(" ")] if " " in head else head


def text_of(record: Record) -> str:
    """What one event says, without its envelope."""
    event = record.event
    special = _SPECIAL.get(type(event))
    text = special(event) if special is not None else " · ".join(_fields(event))
    if record.origin is not None and record.origin.line is not None:
        said = f" «{brief(record.origin.text)}»" if record.origin.text else ""
        text += f"{' · ' if text else ''}line {record.origin.line}{said}"
    return text


def _fields(event: Event) -> Iterator[str]:
    if isinstance(event, UnknownEvent):
        yield from _entries(event.payload)
        return
    for name, default in _named(type(event)):
        value = getattr(event, name)
        if value is not default and (default is None or value != default):
            yield f"{name} {shown(name, value)}"


def _named(kind: type[Event]) -> list[tuple[str, Any]]:
    if kind not in _NAMED:
        _NAMED[kind] = [
            (field.name, field.default.factory() if isinstance(field.default, attrs.Factory) else field.default)  # type: ignore[arg-type]
            for field in attrs.fields(cast("type[attrs.AttrsInstance]", kind))
            if field.name not in _ELSEWHERE
        ]
    return _NAMED[kind]


_NAMED: Final[dict[type[Event], list[tuple[str, Any]]]] = {}


def shown(name: str, value: Any, depth: int = 0) -> str:
    """A value by the name of its field: bytes and times with units, nested values in brackets."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, int):
        if name == "bytes" or name.endswith("_bytes"):
            return format_bytes(value)
        return duration(value) if name.endswith("_ns") else str(value)
    if isinstance(value, str):
        return brief(value)
    if depth > 2:
        return "..."
    if isinstance(value, Mapping):
        return f"({', '.join(_entries(value, depth))})"
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        parts = [shown(name, each, depth + 1) for each in value[:ENTRIES]]
        more = f", and {len(value) - ENTRIES} more" if len(value) > ENTRIES else ""
        return f"{', '.join(parts)}{more}"
    return brief(str(value))


def _entries(values: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    for count, (name, value) in enumerate(values.items()):
        if count == ENTRIES:
            yield f"and {len(values) - ENTRIES} more"
            return
        yield f"{brief(str(name))} {shown(str(name), value, depth + 1)}"


def _snapshot(event: events.SnapshotTaken) -> str:
    shot: Snapshot = event.snapshot
    settled = ", settled" if shot.settled else ""
    return (
        f"{brief(event.label)}{settled} · used {format_bytes(shot.used_bytes)} of {format_bytes(shot.total_bytes)}"
        f" · ours {format_bytes(shot.own_bytes)} · torch reserved {format_bytes(shot.reserved_bytes)}"
        f" · peak {format_bytes(shot.reserved_peak_bytes)}"
    )


def _judged(event: events.CheckJudged) -> str:
    if not event.findings:
        return f"{brief(event.check)} held"
    words = "; ".join(_finding(finding) for finding in event.findings[:ENTRIES])
    return f"{brief(event.check)}{' failed the state' if event.failed else ''}: {words}"


def _finding(finding: Finding) -> str:
    return f"{brief(finding.severity)} {brief(finding.code)}: {brief(finding.message)}"


def _budget(event: events.BudgetComputed) -> str:
    terms = ", ".join(f"{brief(each.term)} {format_bytes(each.bytes)}" for each in event.terms[:ENTRIES])
    missing = f" · missing {format_bytes(event.missing_bytes)}" if event.missing_bytes else ""
    return f"{terms} = available {format_bytes(event.available_bytes)} · {event.blocks} blocks{missing}"


def _captured(event: events.GraphCaptured) -> str:
    outside = f" · outside torch {format_bytes(event.outside_delta_bytes)}" if event.outside_delta_bytes else ""
    part = f" · part {brief(event.part)}" if event.part else ""
    pool = f"pool {brief(event.pool)} +{format_bytes(event.pool_delta_bytes)}"
    return f"size {event.size} · {duration(event.duration_ns)} · {pool}{outside}{part}"


def _failed(event: events.StateFailed) -> str:
    part = f", part {brief(event.part)}" if event.part else ""
    where = f" · at {brief(event.where[-1])}" if event.where else ""
    first = brief(event.message.lstrip().partition("\n")[0])
    return (
        f"{brief(event.category)}{part} after {duration(event.duration_ns)}: {brief(event.error_type)}: {first}{where}"
    )


def _left(event: events.StateLeft) -> str:
    own = event.bookkeeping_ns + event.syncing_ns + event.measuring_ns
    ours = f" · ours {duration(own)}" if own else ""
    return f"after {duration(event.duration_ns)}{ours}" if event.duration_ns else ""


def _figure(event: events.FigureRead) -> str:
    return f"{brief(event.figure)} {shown(event.figure, event.value)}"


def _stalled(event: events.StateStalled) -> str:
    line = f" at {brief(event.stack[-1].strip())}" if event.stack else ""
    return f"past its deadline of {duration(event.deadline_ns)}{line}"


def _started(event: events.RunStarted) -> str:
    # Whose machine it was stands in the head of the page, as tokens.
    what = [brief(each) for each in (event.engine, event.engine_version, event.device, event.label) if each]
    what += [f"mode {brief(event.mode)}", f"read from {brief(event.source)}", f"knobs {shown('knobs', event.knobs)}"]
    return " · ".join(what)


_SPECIAL: Final[Mapping[type, Callable[[Any], str]]] = {
    events.SnapshotTaken: _snapshot,
    events.CheckJudged: _judged,
    events.BudgetComputed: _budget,
    events.GraphCaptured: _captured,
    events.StateFailed: _failed,
    events.StateLeft: _left,
    events.StateStalled: _stalled,
    events.RunStarted: _started,
    events.FigureRead: _figure,
}
