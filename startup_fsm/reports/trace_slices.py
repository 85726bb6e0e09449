"""Slices of one track of a trace: nested as they lie in time, each with a begin and an end. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import attrs

from startup_fsm.reports.terminal import clean

#: One event of the trace event format.
TraceEvent = dict[str, Any]

Phase = Literal["s", "t", "f"]


@attrs.frozen(kw_only=True)
class Flow:
    """A station of a flow: where it starts, passes or finishes."""

    number: int
    phase: Phase
    name: str


@attrs.frozen(kw_only=True)
class Slice:
    """
    Something that took time.

    Attributes:
        begin, end: ns on the line of the trace.
        level: What lies in what: a slice of a higher level that begins as one of a lower ends lies in that.
        name, category, args: As the format has them.
        flow: What passes through it.
    """

    begin: int
    end: int
    level: int
    name: str
    category: str
    args: Mapping[str, Any]
    flow: Flow | None = None


def microseconds(ns: int) -> float:
    """Time as the format has it; exact to the nanosecond for a hundred days."""
    return ns / 1_000


def said(args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an event: what is not known is left out, texts are cleaned, at any depth."""
    return {clean(name): _cleaned(value) for name, value in args.items() if value is not None}


def _cleaned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return said(value)
    if isinstance(value, (list, tuple)):
        return [_cleaned(each) for each in value]
    return clean(value) if isinstance(value, str) else value


def nested(slices: Iterable[Slice], process: int, track: int) -> Iterator[TraceEvent]:
    """
    Begins and ends of all slices of a track, in order, balanced.

    A slice that would end after the one that it lies in is cut there; ``args`` keep what it took.
    """
    where = {"pid": process, "tid": track}
    open_slices: list[Slice] = []
    for each in sorted(slices, key=lambda one: (one.begin, one.level, -one.end)):
        while open_slices and _is_over(open_slices[-1], each):
            yield {"ph": "E", "ts": microseconds(open_slices.pop().end), **where}
        end = each.end if not open_slices else min(each.end, open_slices[-1].end)
        open_slices.append(attrs.evolve(each, end=max(each.begin, end)))
        begin = {"ph": "B", "name": clean(each.name), "cat": each.category, "ts": microseconds(each.begin), **where}
        yield begin | {"args": said(each.args)}
        if each.flow is not None:
            yield _station(each.flow, each, where)
    while open_slices:
        yield {"ph": "E", "ts": microseconds(open_slices.pop().end), **where}


def _is_over(one: Slice, following: Slice) -> bool:
    return one.end < following.begin or (one.end == following.begin and one.level >= following.level)


def _station(flow: Flow, at: Slice, where: Mapping[str, int]) -> TraceEvent:
    station: TraceEvent = {"ph": flow.phase, "id": flow.number, "name": clean(flow.name), "cat": at.category, **where}
    station["ts"] = microseconds(at.begin)
    if flow.phase == "f":
        # It belongs to the slice around it, not to the next one.
        station["bp"] = "e"
    return station
