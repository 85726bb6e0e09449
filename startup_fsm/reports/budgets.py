"""A budget with other settings, side by side with the one that was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType

from startup_fsm.memory import format_bytes
from startup_fsm.reports.terminal import columns, heading, indented, plain, signed
from startup_fsm.reports.text import unseen_view
from startup_fsm.reports.views import start_line
from startup_fsm.starts import Start
from startup_fsm.what_if import Side, WhatIf


def what_if_view(start: Start, changes: Mapping[str, Any], found: WhatIf) -> Iterator[RenderableType]:
    """Each term before and after, whether one longest request fits, and the shares that would do."""
    yield start_line(start)
    yield heading(f"With {', '.join(f'{name} {value}' for name, value in changes.items())}")
    table = columns("", "as it was", "what if", numbers=("as it was", "what if"))
    for name, before, after in _rows(found.before, found.after):
        is_sum = name in ("available", "KV cache")
        style = "bold" if is_sum else ""
        table.add_row(plain(name, style), plain(before, style), plain(after, style))
    yield indented(table)
    yield heading("So")
    yield indented(plain(_answer(found)))
    assumed = [f"taken for granted: {each}" for each in found.assumed]
    yield from unseen_view([*assumed, "what is not in the budget: fragmentation, other processes, later allocations"])


def _rows(before: Side, after: Side) -> Iterator[tuple[str, str, str]]:
    yield "share", _share(before.share), _share(after.share)
    yield "requested", _bytes(before.requested_bytes), _bytes(after.requested_bytes)
    was, will = ({term.term: term.bytes for term in side.terms} for side in (before, after))
    for name in dict.fromkeys((*was, *will)):
        yield name, signed(was.get(name, 0)), signed(will.get(name, 0))
    yield "available", format_bytes(before.available_bytes), format_bytes(after.available_bytes)
    yield "KV cache", format_bytes(before.kv_bytes), format_bytes(after.kv_bytes)
    yield "tokens", _count(before.tokens), _count(after.tokens)
    yield "one longest request", _fits(before.request_fits), _fits(after.request_fits)
    yield "left of the device", _bytes(before.leftover_bytes), _bytes(after.leftover_bytes)


def _answer(found: WhatIf) -> str:
    after = found.after
    short = after.leftover_bytes is not None and after.leftover_bytes < 0
    if after.request_fits is False or after.available_bytes <= 0:
        text = "it does not fit"
    elif short:
        text = f"the device lacks {format_bytes(-(after.leftover_bytes or 0))} of it"
    else:
        text = "it fits" if after.request_fits else "something is left for the KV cache"
    if found.interval is not None:
        return f"{text}; shares from {found.interval[0]:g} to {found.interval[1]:g} would do"
    if found.missing_bytes:
        return f"{text}; no share does: {format_bytes(found.missing_bytes)} are missing"
    return text


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"


def _bytes(value: int | None) -> str:
    return "unknown" if value is None else format_bytes(value)


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _fits(value: bool | None) -> str:
    return "unknown" if value is None else "fits" if value else "does not fit"
