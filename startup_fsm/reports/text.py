"""
The verdict for people: outcome, findings, advice, where every byte was.

Every view is a sequence of pieces for :func:`startup_fsm.reports.terminal.page`, and says at its end what it cannot
see. What comes from a journal goes through ``terminal``, where it is cleaned. The other views are in ``views``, so that
the doctor starts without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import RenderableType
from rich.text import Text

from startup_fsm.events import BudgetComputed
from startup_fsm.findings import Advice, Change, Finding
from startup_fsm.memory import Account, format_bytes
from startup_fsm.reports.terminal import (
    columns,
    heading,
    indented,
    pairs,
    plain,
    points,
    quantity,
    severity,
    share,
    signed,
)
from startup_fsm.verdict import RankedFinding, Verdict

_OUTCOMES: Final = {
    "ready": ("ready", "bold green"),
    "oom": ("out of memory", "bold red"),
    "error": ("failed", "bold red"),
    "hang": ("hang", "bold red"),
    "incomplete": ("incomplete", "bold red"),
    "interrupted": ("interrupted", "bold yellow"),
    "running": ("still running", "bold cyan"),
}
#: Lines of evidence of one finding, and characters of one; ``--json`` has all.
EVIDENCE: Final = 4
EVIDENCE_TEXT: Final = 160

#: The account of a ledger that nobody uses, where something read it.
FREE: Final = "free"
_VERBS: Final = {"set": "set", "raise": "raise", "lower": "lower", "remove": "remove", "investigate": "look at"}


def verdict_view(verdict: Verdict) -> Iterator[RenderableType]:
    """One start: outcome, findings, advice, bytes, figures, and what cannot be seen."""
    yield outcome_line(verdict)
    yield indented(pairs(_whose(verdict)))
    if verdict.findings:
        yield heading("Findings, the earliest cause first")
        for ranked in verdict.findings:
            yield from _finding(ranked)
    if verdict.advice:
        yield heading("What would help")
        for number, advice in enumerate(verdict.advice, 1):
            yield from _advice(number, advice)
    if verdict.ledger:
        yield from ledger_view(verdict.ledger, verdict.figures)
    if verdict.figures:
        yield heading("Figures")
        yield indented(pairs((name, quantity(name, value)) for name, value in sorted(verdict.figures.items())))
    yield from unseen_view(verdict.unseen)


def outcome_line(verdict: Verdict) -> Text:
    """The answer in one line: outcome, state, part, rank."""
    word, style = _OUTCOMES.get(verdict.outcome, (verdict.outcome, "bold"))
    line = plain(word, style)
    if verdict.failed_state is not None:
        line.append_text(plain(f" in {verdict.failed_state}"))
    if verdict.part is not None:
        line.append_text(plain(f", part {verdict.part}"))
    if verdict.failed_rank is not None:
        line.append_text(plain(f", {verdict.failed_rank}"))
    errors = sum(each.finding.severity == "error" for each in verdict.findings)
    if verdict.outcome == "ready" and errors:
        line.append_text(plain(f", with {errors} finding{'s' if errors > 1 else ''} of severity error"))
    return line


def _whose(verdict: Verdict) -> Iterator[tuple[str, str]]:
    is_log = verdict.source not in ("journal", "mirror")
    engine = f"{verdict.engine or 'unknown'} {verdict.engine_version or ''}".rstrip()
    if is_log:
        # Its run is a name that nothing has yet.
        yield "log", verdict.origin or "in memory"
        yield "engine", engine + (f", {verdict.ranks} ranks that print" if verdict.ranks > 1 else "")
    else:
        processes = f", {verdict.ranks} processes" if verdict.ranks > 1 else ""
        yield "run", f"{verdict.run or 'unknown'}, attempt {verdict.attempt}{processes}"
        if verdict.engine is not None:
            yield "engine", engine
        yield verdict.source, verdict.origin or "in memory"
    if verdict.missing_bytes:
        yield (
            "missing",
            f"at least {format_bytes(verdict.missing_bytes)}" if is_log else format_bytes(verdict.missing_bytes),
        )
    if (first := _first_move(verdict)) is not None:
        yield "try", first


def _first_move(verdict: Verdict) -> str | None:
    """The first advice that can be typed, for whoever reads no further."""
    for advice in verdict.advice:
        flags = [change.flag for change in advice.changes]
        if flags and all(flag is not None for flag in flags):
            return " ".join(flag for flag in flags if flag is not None)
    return None


def _finding(ranked: RankedFinding) -> Iterator[RenderableType]:
    finding = ranked.finding
    line = severity(finding.severity)
    line.append_text(plain(f"  {finding.code}", "bold"))
    where = "".join(
        f"{word}{value}"
        for word, value in ((" in ", finding.state), (", part ", finding.part), (", ", ranked.rank))
        if value is not None
    )
    line.append_text(plain(where))
    yield indented(line)
    yield indented(plain(finding.message), 4)
    if measured := _measured(finding):
        yield indented(plain(measured, "dim"), 4)
    for evidence in _evidence(ranked.evidence):
        yield indented(plain(evidence, "dim"), 4)


def _measured(finding: Finding) -> str:
    """What was read, what was expected, by which meter; only where both are numbers of bytes."""
    observed, expected = finding.observed, finding.expected
    if not isinstance(observed, int) or not isinstance(expected, int) or not finding.bytes:
        return ""
    if finding.code.endswith("out_of_memory"):
        return f"asked for {format_bytes(observed)}, {format_bytes(expected)} free"
    allowed = f", {format_bytes(finding.tolerance)} allowed" if isinstance(finding.tolerance, int) else ""
    return f"observed {format_bytes(observed)}, expected {format_bytes(expected)}{allowed} ({finding.scope})"


def _evidence(evidence: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Numbers together on one line, texts each on its own."""
    numbers = [
        f"{word} {each[word]}" for each in evidence for word in ("seq", "line") if word in each and "text" not in each
    ]
    if numbers:
        yield f"seen at {', '.join(dict.fromkeys(numbers))}"
    texts = [each for each in evidence if "text" in each]
    for each in texts[:EVIDENCE]:
        text = str(each["text"])
        short = text if len(text) <= EVIDENCE_TEXT else f"{text[:EVIDENCE_TEXT].rstrip()} ..."
        yield f"line {each['line']}: {short}" if "line" in each else short
    if len(texts) > EVIDENCE:
        yield f"and {len(texts) - EVIDENCE} more lines"


def _advice(number: int, advice: Advice) -> Iterator[RenderableType]:
    if all(change.setting == "none" for change in advice.changes):
        yield indented(plain(f"{number}. {advice.because}"))
        return
    yield indented(plain(f"{number}. {' and '.join(change_text(change) for change in advice.changes)}"))
    extra = ""
    if advice.interval is not None:
        extra += f"; from {advice.interval[0]:g} to {advice.interval[1]:g} would do"
    if advice.leftover_bytes is not None:
        extra += f"; {format_bytes(advice.leftover_bytes)} would be left over"
    yield indented(plain(f"because {advice.because}{extra}"), 5)
    for change in advice.changes:
        if change.flag is not None:
            yield indented(plain(change.flag, "cyan"), 5)


def change_text(change: Change) -> str:
    """One move of one knob in words."""
    text = f"{_VERBS.get(change.direction, change.direction)} {change.setting}"
    if change.direction == "remove":
        return text
    if change.setting == "engine_version" and change.to is not None:
        return f"use version {_value(change.to)} of the engine, or a later one"
    if change.unit is not None and change.unit.startswith("largest "):
        text += f", the {change.unit}"
    if change.before is not None and change.direction != "investigate":
        text += f" from {_value(change.before)}"
    if change.to is not None:
        text += f" to {_value(change.to)}"
        if isinstance(change.to, int) and (change.unit == "bytes" or change.setting.endswith("_bytes")):
            text += f" ({format_bytes(change.to)})"
        elif change.unit is not None and not change.unit.startswith("largest "):
            text += f" {change.unit}"
    return text


def _value(value: object) -> str:
    if isinstance(value, (list, tuple)) and len(value) > 6:
        return f"{len(value)} values up to {max(map(str, value), key=lambda each: (len(each), each))}"
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def ledger_view(ledger: Sequence[Account], figures: Mapping[str, int | float]) -> Iterator[RenderableType]:
    """Where every byte of the device was, account by account."""
    yield heading("Where every byte was, at the last reading")
    total = figures.get("total_bytes")
    whole = total if isinstance(total, int) else 0
    table = columns("account", "bytes", "share", "told by", numbers=("bytes", "share"))
    for account in ledger:
        if account.account != FREE:
            row = plain(account.account), plain(format_bytes(account.bytes)), plain(share(account.bytes, whole))
            table.add_row(*row, plain(account.source))
    used = sum(account.bytes for account in ledger if account.account != FREE)
    table.add_row(plain("used", "bold"), plain(format_bytes(used), "bold"), plain(share(used, whole)), plain("sum"))
    read = next((account for account in ledger if account.account == FREE), None)
    free = read.bytes if read is not None else whole - used
    if whole or read is not None:
        told = "total - used" if read is None else read.source
        table.add_row("free", format_bytes(free), share(free, whole), plain(told))
    if whole and read is not None and whole != used + free:
        left = whole - used - free
        table.add_row("unexplained", signed(left), share(left, whole), "total - used - free")
    yield indented(table)


def unseen_view(unseen: Iterable[object]) -> Iterator[RenderableType]:
    """What a view cannot tell, so that silence is not taken for all being well."""
    listed = list(unseen)
    if listed:
        yield heading("Not seen")
        yield indented(points(listed))


def budget_view(computed: BudgetComputed) -> Iterator[RenderableType]:
    """How the KV cache was sized: each term once."""
    yield heading("The budget of the KV cache")
    table = columns("term", "bytes", "told by", numbers=("bytes",))
    for term in computed.terms:
        table.add_row(plain(term.term), plain(signed(term.bytes)), plain(term.source))
    table.add_row("available", format_bytes(computed.available_bytes), "sum")
    blocks = f"{computed.blocks} blocks of {format_bytes(computed.block_bytes)}"
    table.add_row("KV cache", format_bytes(computed.kv_bytes), blocks)
    yield indented(table)
