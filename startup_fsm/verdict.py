"""
What the doctor says of one start, and its stable JSON form (``doctor --json``, schema 1).

Pure data: how it is found out is in ``diagnose``, how it is shown in ``reports``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import attrs

from startup_fsm.findings import Advice, Change, Finding
from startup_fsm.memory import Account

Outcome = Literal["ready", "oom", "error", "hang", "incomplete", "interrupted", "running"]
SCHEMA: Final = 1
#: Where a verdict can come from.
SOURCES: Final = frozenset({"journal", "mirror", "vllm", "vllm-ascend", "sglang", "torch", "unknown"})

#: Exit codes of the command line. 2: ready, with a finding of severity error. 3: not ready, whatever the cause.
EXIT_READY, EXIT_USAGE, EXIT_FINDINGS, EXIT_NOT_READY, EXIT_UNREADABLE, EXIT_DIVERGED, EXIT_PEER = 0, 1, 2, 3, 4, 5, 75


@attrs.frozen(kw_only=True)
class RankedFinding:
    """A finding, the rank that it was found on, and where in its journal it shows."""

    finding: Finding
    rank: str | None = None
    evidence: tuple[Mapping[str, Any], ...] = ()


@attrs.frozen(kw_only=True)
class Verdict:
    """
    One start, all its ranks.

    Attributes:
        source: ``journal``, ``mirror``, or the importer.
        origin: Path, or path and lines.
        outcome: How it ended.
        failed_state, part, failed_rank: Where it failed; None where it did not.
        figures: Of the failed rank, else of rank 0; by the shared names, bytes as ints.
        figures_by_rank: By the rank's label.
        inferred: Names of figures that nobody printed or measured but that follow.
        ledger: Where every byte was, at the last snapshot of the rank that decides.
        unexplained_bytes, missing_bytes: What the identity leaves over; what is short when nothing fits.
        durations_ns: By state, all visits together, of the rank that decides.
        findings: Highest ranked first.
        advice: Best first.
        unseen: What this source cannot tell.
        problems: What is wrong with the journal itself, in words.
    """

    source: str = "journal"
    origin: str | None = None
    engine: str | None = None
    engine_version: str | None = None
    run: str | None = None
    attempt: int = 1
    ranks: int = 1
    outcome: Outcome
    failed_state: str | None = None
    part: str | None = None
    failed_rank: str | None = None
    figures: Mapping[str, int | float] = attrs.field(factory=dict)
    figures_by_rank: Mapping[str, Mapping[str, int | float]] = attrs.field(factory=dict)
    inferred: tuple[str, ...] = ()
    ledger: tuple[Account, ...] = ()
    unexplained_bytes: int | None = None
    missing_bytes: int | None = None
    durations_ns: Mapping[str, int] = attrs.field(factory=dict)
    findings: tuple[RankedFinding, ...] = ()
    advice: tuple[Advice, ...] = ()
    unseen: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """See the table of exit codes."""
        if self.outcome != "ready":
            return EXIT_NOT_READY
        return EXIT_FINDINGS if any(each.finding.severity == "error" for each in self.findings) else EXIT_READY

    def as_json(self) -> dict[str, Any]:
        """Plain data by ``contracts/doctor.schema.json``; what is not known is left out or null."""
        data: dict[str, Any] = {
            "source": self.source,
            "origin": self.origin,
            "engine": self.engine,
            "engine_version": self.engine_version,
            "run": self.run,
            "attempt": self.attempt,
            "ranks": self.ranks,
            "outcome": self.outcome,
            "failed_state": self.failed_state,
            "part": self.part,
            "failed_rank": self.failed_rank,
            "figures": dict(self.figures),
            "figures_by_rank": {rank: dict(figures) for rank, figures in self.figures_by_rank.items()},
            "inferred": list(self.inferred),
            "ledger": [attrs.asdict(account) for account in self.ledger],
            "durations_ns": dict(self.durations_ns),
            "findings": [_finding(each) for each in self.findings],
            "advice": [_advice(each) for each in self.advice],
            "unseen": list(self.unseen),
        }
        if self.origin is None:
            del data["origin"]
        for name in ("unexplained_bytes", "missing_bytes"):
            if (value := getattr(self, name)) is not None:
                data[name] = value
        return data


def report(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """
    The whole answer: every run, and the one that matters: the last start that failed, else the last.

    Of a run that went on in a new process only its last attempt counts.
    """
    last = {(verdict.source, verdict.run): at for at, verdict in enumerate(verdicts)}
    failed = [
        at
        for at, verdict in enumerate(verdicts)
        if verdict.outcome not in ("ready", "running")
        and (verdict.run is None or verdicts[last[verdict.source, verdict.run]].attempt <= verdict.attempt)
    ]
    main = failed[-1] if failed else len(verdicts) - 1 if verdicts else None
    return {"schema": SCHEMA, "main": main, "runs": [verdict.as_json() for verdict in verdicts]}


def _finding(ranked: RankedFinding) -> dict[str, Any]:
    finding = ranked.finding
    data: dict[str, Any] = {
        "code": finding.code,
        "severity": finding.severity,
        "state": finding.state,
        "part": finding.part,
        "rank": ranked.rank,
        "message": finding.message,
        "scope": finding.scope,
        "evidence": [dict(each) for each in ranked.evidence],
    }
    for name in ("observed", "expected", "tolerance"):
        if (value := getattr(finding, name)) is not None:
            data[name] = value
    if finding.reason:
        data["reason"] = finding.reason
    return data


def _advice(advice: Advice) -> dict[str, Any]:
    data: dict[str, Any] = {"changes": [_change(change) for change in advice.changes], "because": advice.because}
    if advice.interval is not None:
        data["interval"] = list(advice.interval)
    if advice.leftover_bytes is not None:
        data["leftover_bytes"] = advice.leftover_bytes
    return data


def _change(change: Change) -> dict[str, Any]:
    data: dict[str, Any] = {"setting": change.setting, "direction": change.direction}
    names = {"flag": change.flag, "from": change.before, "to": change.to, "unit": change.unit}
    return data | {name: value for name, value in names.items() if value is not None}
