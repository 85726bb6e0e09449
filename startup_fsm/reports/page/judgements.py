"""The verdict in words and the table of checks, as the page shows them. Pure; texts are said, redacted, later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from startup_fsm.findings import SEVERITIES, Advice, Finding
from startup_fsm.memory import MIB, format_bytes
from startup_fsm.reports.terminal import quantity
from startup_fsm.reports.text import change_text, outcome_line
from startup_fsm.starts import Start
from startup_fsm.verdict import RankedFinding, Verdict

#: Rows of the table of checks, findings first; what is left out is said.
MOST_ROWS: Final = 600
#: Findings, pieces of advice and lines of evidence that are shown.
_MOST: Final = 60
_MOST_EVIDENCE: Final = 12


def words_of(verdict: Verdict) -> dict[str, Any]:
    """Outcome, findings, advice, figures, and what cannot be seen."""
    line = outcome_line(verdict).plain
    first = next((each.finding for each in verdict.findings if each.finding.severity != "note"), None)
    return {
        "outcome": verdict.outcome,
        "line": line[:1].upper() + line[1:],
        "because": _lead(verdict) if first is None else _sentence(first.message),
        "exit": verdict.exit_code,
        "missing": verdict.missing_bytes,
        "unexplained": verdict.unexplained_bytes,
        "findings": [_finding(each) for each in verdict.findings[:_MOST]],
        "findings_left": max(0, len(verdict.findings) - _MOST),
        "advice": [_advice(each) for each in verdict.advice[:_MOST]],
        "figures": [
            [name, quantity(name, value), name in verdict.inferred] for name, value in sorted(verdict.figures.items())
        ],
        "unseen": list(dict.fromkeys(verdict.unseen))[:_MOST],
        "problems": list(verdict.problems)[:_MOST],
    }


def _sentence(text: str) -> str:
    text = text.strip()
    if "_" in text.partition(" ")[0]:
        # The name of a state keeps its first letter.
        return f"{text}{'' if text.endswith(('.', '!', '?')) else '.'}"
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


def _lead(verdict: Verdict) -> str | None:
    """What a start that went well came to."""
    figures = verdict.figures
    kv, tokens = figures.get("kv_cache_bytes", figures.get("kv_available_bytes")), figures.get("kv_tokens")
    if verdict.outcome != "ready" or not isinstance(kv, int):
        return None
    text = f"The KV cache has {format_bytes(kv)}"
    text += f", room for {tokens:,} tokens" if isinstance(tokens, int) else ""
    peak, requested = figures.get("used_peak_bytes"), figures.get("requested_bytes")
    if isinstance(peak, int) and isinstance(requested, int):
        relation = "of the request are left" if peak <= requested else "stand above the request"
        text += f"; {format_bytes(abs(requested - peak))} {relation} in the largest step"
    return f"{text}."


def _finding(ranked: RankedFinding) -> dict[str, Any]:
    finding = ranked.finding
    return {
        "code": finding.code,
        "severity": finding.severity,
        "state": finding.state,
        "part": finding.part,
        "rank": ranked.rank,
        "message": finding.message,
        "scope": finding.scope,
        "measured": _measured(finding),
        "seqs": [each["seq"] for each in ranked.evidence if "seq" in each and "text" not in each][:_MOST_EVIDENCE],
        "lines": [[each.get("line"), str(each["text"])] for each in ranked.evidence if "text" in each][:_MOST_EVIDENCE],
    }


def _measured(finding: Finding) -> list[str | None]:
    """Observed, expected and tolerance in words; None where there is none."""
    values = (finding.observed, finding.expected, finding.tolerance)
    is_bytes = bool(finding.bytes) or any(type(each) is int and abs(each) >= MIB for each in values)
    return [_value(each, is_bytes=is_bytes and "stalled" not in finding.code) for each in values]


def _value(value: Any, *, is_bytes: bool) -> str | None:
    if value is None:
        return None
    if type(value) is int and is_bytes:
        return format_bytes(value)
    if isinstance(value, (list, tuple)):
        shown = ", ".join(str(each) for each in value[-3:])
        return f"... {shown}" if len(value) > 3 else shown
    return str(value)


def _advice(advice: Advice) -> dict[str, Any]:
    return {
        "do": " and ".join(change_text(change) for change in advice.changes),
        "is_move": any(change.setting != "none" for change in advice.changes),
        "flags": [change.flag for change in advice.changes if change.flag is not None],
        "because": advice.because,
        "interval": None if advice.interval is None else [f"{each:g}" for each in advice.interval],
        "leftover": advice.leftover_bytes,
    }


def check_rows(start: Start, verdict: Verdict) -> tuple[list[list[Any]], int]:
    """
    Rows of the table, and how many were left out.

    A row: check, state, visit, ranks, severity (``held`` where it found nothing), code, message, observed, expected,
    tolerance, scope, seq. A check that held on several ranks is one row.
    """
    found: list[list[Any]] = []
    held: dict[tuple[str, str, int], list[tuple[str, int]]] = {}
    said: set[tuple[str, str | None, str]] = set()
    for process in start.processes:
        label = process.label
        for seq, event in process.history.checks:
            for finding in event.findings:
                said.add((finding.code, finding.state, label))
                found.append(_row(event.check, event.state, event.visit, label, finding, seq))
            if not event.findings:
                held.setdefault((event.check, event.state, event.visit), []).append((label, seq))
    found += _other_rows(start, verdict, said)
    found.sort(key=lambda row: SEVERITIES.index(row[4]) if row[4] in SEVERITIES else len(SEVERITIES))
    rows = found + list(_held_rows(held, len(start.processes)))
    return rows[:MOST_ROWS], max(0, len(rows) - MOST_ROWS)


def _row(check: str, state: str | None, visit: int, label: str, finding: Finding, seq: int | None) -> list[Any]:
    measured = _measured(finding)
    where = [check, state, visit, label]
    return [*where, finding.severity, finding.code, finding.message, *measured, finding.scope, seq]


def _other_rows(start: Start, verdict: Verdict, said: set[tuple[str, str | None, str]]) -> Iterator[list[Any]]:
    """Findings of the diagnosis that no check had made while it ran."""
    only = start.processes[0].label
    for ranked in verdict.findings:
        finding, label = ranked.finding, ranked.rank or only
        if (finding.code, finding.state, label) not in said:
            seq = next((each["seq"] for each in ranked.evidence if "seq" in each), None)
            yield _row("diagnosis", finding.state, 1, label, finding, seq)


def _held_rows(held: dict[tuple[str, str, int], list[tuple[str, int]]], ranks: int) -> Iterator[list[Any]]:
    for (check, state, visit), where in held.items():
        label = _ranks(where, ranks)
        yield [check, state, visit, label, "held", None, None, None, None, None, None, where[0][1]]


def _ranks(where: Sequence[tuple[str, int]], ranks: int) -> str:
    if len(where) == ranks and ranks > 1:
        return f"all {ranks}"
    return where[0][0] if len(where) == 1 else f"{len(where)} of {ranks}"
