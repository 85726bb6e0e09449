"""Two starts side by side for people: what made one of them worse, and then everything that differs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from rich.console import RenderableType
from rich.text import Text

from startup_fsm.diff import Difference
from startup_fsm.diff.compare import Changed
from startup_fsm.diff.sides import shown
from startup_fsm.diff.states import AccountDifference, StateDifference, StateSide
from startup_fsm.memory import format_bytes
from startup_fsm.reports.terminal import (
    clean,
    columns,
    duration,
    heading,
    indented,
    pairs,
    plain,
    points,
    severity,
    signed,
)
from startup_fsm.reports.text import unseen_view
from startup_fsm.reports.views import ROWS
from startup_fsm.starts import Start
from startup_fsm.verdict import RankedFinding

#: Longest value of a setting that is shown, in characters; ``--json`` has all of it.
_VALUE: Final = 120


def difference_view(a: Start, b: Start, found: Difference) -> Iterator[RenderableType]:
    """The answer, then settings, states, bytes, budget, figures, findings, and what cannot be compared."""
    yield _answer(found)
    yield indented(plain(f"{found.ended[0]}, {found.ended[1]}"))
    yield indented(pairs((("A", _whose(a)), ("B", _whose(b)))))
    if found.finding is not None:
        yield heading("What only the worse one has, the cause first")
        yield from _findings([found.finding], with_message=True)
    if len(found.ties) > 1:
        yield heading("What else differs and may have its part in it")
        yield indented(points(tie.text for tie in found.ties[1:]))
    for title, rows in _CHANGES:
        yield from _changes(title, getattr(found, rows))
    yield from _states(found)
    yield from _accounts(found.states)
    yield from _changes("The budget of the KV cache", found.budget, is_bytes=True)
    figures = [Changed(name=each.name, a=each.a, b=each.b) for each in found.figures]
    yield from _changes("Figures that differ beyond their resolution", figures)
    for name, only in (("A", found.only_a), ("B", found.only_b)):
        others = [each for each in only if each is not found.finding]
        if others:
            yield heading(f"Findings of {name} that the other lacks or takes less gravely")
            yield from _findings(others, with_message=False)
    yield from unseen_view(found.unseen)


_CHANGES: Final = (
    ("Settings", "settings"),
    ("Versions", "versions"),
    ("Environment", "environment"),
    ("Plan", "plan"),
    ("Engine and device", "device"),
)


def _answer(found: Difference) -> Text:
    if found.worse is None:
        return plain(found.why, "bold")
    name = found.worse.upper()
    line = plain(f"{name} is worse: ", "bold red" if name == "B" else "bold green")
    line.append_text(plain(found.why, "bold"))
    return line


def _whose(start: Start) -> str:
    return f"run {start.run or 'unknown'}, attempt {start.attempt} ({start.origin})"


def _findings(findings: Iterable[RankedFinding], *, with_message: bool) -> Iterator[RenderableType]:
    for ranked in findings:
        finding = ranked.finding
        line = severity(finding.severity)
        line.append_text(plain(f"  {finding.code}", "bold"))
        line.append_text(plain("" if finding.state is None else f" in {finding.state}"))
        line.append_text(plain("" if ranked.rank is None else f", {ranked.rank}"))
        yield indented(line)
        if with_message:
            yield indented(plain(finding.message), 4)


def _changes(title: str, changes: Sequence[Changed], *, is_bytes: bool = False) -> Iterator[RenderableType]:
    if not changes:
        return
    yield heading(title)
    numbers = ("A", "B", "change") if any(_is_number(each) for each in changes) else ()
    table = columns("", "A", "B", *(["change"] if numbers else []), numbers=numbers)
    for each in changes:
        name = f"{each.name}_bytes" if is_bytes else each.name
        cells = [_value(name, value, is_bytes=is_bytes) for value in (each.a, each.b)]
        table.add_row(plain(each.name), *map(plain, cells), *([plain(_change(name, each))] if numbers else []))
    yield indented(table)


def _is_number(each: Changed) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in (each.a, each.b))


def _value(name: str, value: Any, *, is_bytes: bool) -> str:
    if value is None:
        return "-" if is_bytes else "not given"
    return signed(value) if is_bytes else clean(shown(name, value), _VALUE)


def _change(name: str, each: Changed) -> str:
    if not _is_number(each):
        return ""
    more = each.b - each.a
    if name.endswith("_bytes") and isinstance(more, int):
        return signed(more)
    return f"{more:+g}" if isinstance(more, float) else f"{more:+d}"


def _states(found: Difference) -> Iterator[RenderableType]:
    if not found.states:
        return
    a, b = found.compared
    yield heading(f"States: {clean(a)} of A, {clean(b)} of B")
    names = ("A", "B", "change")
    table = columns("state", *names, numbers=names)
    for each in found.states:
        sides = each.a, each.b
        times = (_took(side) for side in sides)
        longer = each.longer_ns
        change = "" if longer is None else f"{'+' if longer > 0 else ''}{duration(longer)}"
        table.add_row(plain(each.state), *times, plain(change))
    yield indented(table)
    captured = [each for each in found.states if any(side is not None and side.captures for side in (each.a, each.b))]
    if captured:
        yield heading("Graphs")
        table = columns("state", "A", "B", numbers=("A", "B"))
        for each in captured:
            table.add_row(plain(each.state), *map(_graphs, (each.a, each.b)))
        yield indented(table)


def _took(side: StateSide | None) -> Text:
    if side is None:
        return plain("-", "dim")
    text = plain("no time" if side.duration_ns is None else duration(side.duration_ns))
    if side.visits > 1:
        text.append_text(plain(f" in {side.visits}"))
    if side.has_failed:
        text.append_text(plain(" failed", "red"))
    return text


def _graphs(side: StateSide | None) -> Text:
    if side is None or not side.captures:
        return plain("-", "dim")
    return plain(f"{side.captures}, {format_bytes(side.captured_bytes)}, {duration(side.capturing_ns)}")


def _accounts(states: Iterable[StateDifference]) -> Iterator[RenderableType]:
    grown = [(each.state, account) for each in states for account in each.accounts if _differs(account)]
    if not grown:
        return
    yield heading("Bytes that a state added, by account, where they differ")
    names = ("A", "B", "change")
    table = columns("state", "account", *names, numbers=names)
    for state, each in sorted(grown, key=lambda row: -_weight(row[1]))[:ROWS]:
        a, b = _grown(each.a_before, each.a_after), _grown(each.b_before, each.b_after)
        cells = ("-" if size is None else signed(size) for size in (a, b, each.moved_bytes))
        table.add_row(plain(state), plain(each.account), *map(plain, cells))
    yield indented(table)
    if len(grown) > ROWS:
        yield indented(plain(f"and {len(grown) - ROWS} smaller; --json has all", "dim"))


def _grown(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _differs(each: AccountDifference) -> bool:
    return _weight(each) > 0


def _weight(each: AccountDifference) -> int:
    """By how much an account differs; where only one start has it, how much it grew there."""
    if each.moved_bytes is not None:
        return abs(each.moved_bytes)
    return max(abs(_grown(*ends) or 0) for ends in ((each.a_before, each.a_after), (each.b_before, each.b_after)))
