"""
The verdict for an issue tracker: Markdown that reads well pasted, and in which nothing of a log is markup.

Texts that come from a log or a journal are cleaned as for a terminal, then every character that Markdown or HTML would
take for itself is escaped; an at sign is written so that nobody is called.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from startup_fsm.findings import Advice, Change
from startup_fsm.memory import format_bytes
from startup_fsm.reports.terminal import clean, quantity, share
from startup_fsm.reports.text import FREE, change_text, outcome_line
from startup_fsm.verdict import RankedFinding, Verdict

#: Longest evidence text, in characters: a traceback line, not a traceback.
_EVIDENCE: Final = 300

#: An underscore inside a word is one.
_SPECIAL: Final = re.compile(r"[\\`*{}\[\]<>#|~$]|(?<![^\W_])_|_(?![^\W_])")


def escaped(value: object, limit: int = 2_000) -> str:
    """Text as Markdown shows it: no markup, no HTML, no mention."""
    text = _SPECIAL.sub(lambda found: f"\\{found[0]}", clean(value, limit))
    return text.replace("&", "&amp;").replace("\\<", "&lt;").replace("\\>", "&gt;").replace("@", "&#64;")


def code(value: object, limit: int = 2_000) -> str:
    """Text as a code span, fenced by more backticks than it holds."""
    text = clean(value, limit)
    longest = max((len(run) for run in re.findall(r"`{1,}", text)), default=0)
    fence = "`" * (longest + 1)
    blank = " " if text.startswith("`") or text.endswith("`") or not text.strip() else ""
    return f"{fence}{blank}{text}{blank}{fence}"


def verdict_markdown(verdict: Verdict) -> str:
    """One start: outcome, findings with their lines, advice, bytes, figures, and what cannot be seen."""
    return "\n".join(_lines(verdict)) + "\n"


def _lines(verdict: Verdict) -> Iterator[str]:
    yield f"### {escaped(_titled(outcome_line(verdict).plain))}"
    yield ""
    engine = f"{verdict.engine or 'unknown engine'} {verdict.engine_version or ''}".rstrip()
    ranks = f", {verdict.ranks} processes" if verdict.ranks > 1 else ""
    missing = "" if verdict.missing_bytes is None else f"; {format_bytes(verdict.missing_bytes)} are missing"
    origin = code(verdict.origin or "in memory")
    yield f"{escaped(engine)}, read from {escaped(verdict.source)} {origin}{ranks}{missing}"
    if verdict.findings:
        yield from ("", "#### Findings, the earliest cause first", "")
        for number, ranked in enumerate(verdict.findings, 1):
            yield from _finding(number, ranked)
    if verdict.advice:
        yield from ("", "#### What would help", "")
        for number, advice in enumerate(verdict.advice, 1):
            yield from _advice(number, advice)
    yield from _bytes(verdict)
    if verdict.figures:
        yield from ("", "#### Figures", "", "| figure | value |", "|---|---:|")
        for name, value in sorted(verdict.figures.items()):
            yield f"| {escaped(name)} | {escaped(quantity(name, value))} |"
    if verdict.unseen:
        yield from ("", "#### Not seen", "")
        yield from (f"- {escaped(each)}" for each in verdict.unseen)


def _finding(number: int, ranked: RankedFinding) -> Iterator[str]:
    finding = ranked.finding
    where = ", ".join(str(each) for each in (finding.state, finding.part, ranked.rank) if each is not None)
    place = f" ({escaped(where)})" if where else ""
    yield f"{number}. **{finding.severity}** {code(finding.code)}{place}: {escaped(finding.message)}"
    for evidence in ranked.evidence:
        if (text := _evidence(evidence)) is not None:
            yield f"   - {text}"


def _titled(text: str) -> str:
    return text[:1].upper() + text[1:]


def _evidence(evidence: Mapping[str, Any]) -> str | None:
    place = next((f"{word} {evidence[word]}" for word in ("line", "seq") if word in evidence), "")
    if "text" not in evidence:
        return escaped(place) if place else None
    return f"{escaped(place)}: {code(evidence['text'], _EVIDENCE)}" if place else code(evidence["text"], _EVIDENCE)


def _advice(number: int, advice: Advice) -> Iterator[str]:
    if all(change.setting == "none" for change in advice.changes):
        yield f"{number}. {escaped(advice.because)}"
        return
    what = " and ".join(_change(change) for change in advice.changes)
    more = ""
    if advice.interval is not None:
        more += f"; from {advice.interval[0]:g} to {advice.interval[1]:g} would do"
    if advice.leftover_bytes is not None:
        more += f"; {format_bytes(advice.leftover_bytes)} would be left over"
    yield f"{number}. {what}, because {escaped(advice.because)}{more}"


def _change(change: Change) -> str:
    text = escaped(change_text(change))
    return text if change.flag is None else f"{text}: {code(change.flag)}"


def _bytes(verdict: Verdict) -> Iterator[str]:
    if not verdict.ledger:
        return
    total = verdict.figures.get("total_bytes")
    whole = total if isinstance(total, int) else 0
    yield from ("", "#### Where every byte was", "", "| account | bytes | share | told by |", "|---|---:|---:|---|")
    for account in verdict.ledger:
        size, part = format_bytes(account.bytes), share(account.bytes, whole)
        yield f"| {escaped(account.account)} | {size} | {part} | {escaped(account.source)} |"
    left = whole - sum(account.bytes for account in verdict.ledger)
    if whole:
        name = "unexplained" if any(account.account == FREE for account in verdict.ledger) else FREE
        yield f"| {name} | {format_bytes(left)} | {share(left, whole)} | total less all of these |"


def markdown_pages(verdicts: Iterable[Verdict]) -> str:
    """All starts, one after another."""
    return "\n".join(verdict_markdown(verdict) for verdict in verdicts)
