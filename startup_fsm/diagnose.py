"""
From the folded ranks of one start to its verdict: outcome, ranked findings, advice, figures, ledger. Pure.

Ranking: the earliest violated invariant first, then severity, then bytes; notes come last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from startup_fsm import ranks
from startup_fsm.advice import advise
from startup_fsm.causes import budget_before, causes, last_oom, was_answered
from startup_fsm.chain import straggler_findings
from startup_fsm.events import StateFailed
from startup_fsm.figures import figures_of, last_snapshot
from startup_fsm.findings import SEVERITIES, Advice, Finding, Severity
from startup_fsm.fold import RunState, Visit
from startup_fsm.memory import accounts
from startup_fsm.sources import Source
from startup_fsm.verdict import SOURCES, Outcome, RankedFinding, Verdict

#: Time outside every state that is worth a note: more than this, and more than a fifth of the start.
_UNATTRIBUTED_NS: Final = 1_000_000_000


def diagnose(sources: Sequence[Source], *, source: str = "journal", origin: str | None = None) -> Verdict:
    """
    The verdict on one attempt of one run.

    Args:
        sources: All its processes; at least one.
        source: Where the events came from.
        origin: The path that was read.
    """
    outcomes = [outcome(each) for each in sources]
    decides = _deciding(sources, outcomes)
    chosen, result = sources[decides], outcomes[decides]
    run = chosen.run
    failing = run.current if result != "ready" else None
    ranked = _ranked(sources, outcomes)
    started = run.started
    read = source if started is None or started.source == "journal" else started.source
    last = last_snapshot(run)
    figures = {each.label: figures_of(each.run) for each in sources}
    return Verdict(
        source=read if read in SOURCES else "unknown",
        origin=origin,
        engine=None if started is None else started.engine,
        engine_version=None if started is None else started.engine_version,
        run=run.run,
        attempt=run.attempt,
        ranks=max(1, len(sources)),
        outcome=result,
        failed_state=None if result in ("ready", "running") else run.state,
        part=None if failing is None else failing.part,
        failed_rank=None if result in ("ready", "running") or len(sources) == 1 else chosen.label,
        figures=figures[chosen.label],
        figures_by_rank=figures,
        inferred=_inferred(run),
        ledger=() if last is None else accounts(last),
        unexplained_bytes=None if last is None else last.unexplained_bytes,
        missing_bytes=_missing(run, failing),
        durations_ns=_durations(run),
        findings=tuple(ranked),
        advice=tuple(_advice(ranked, sources)),
        unseen=(*_unseen(run), *ranks.unseen(sources)),
        problems=tuple(text for each in sources for _, text, _ in each.problems),
    )


def outcome(source: Source) -> Outcome:
    """How one process ended."""
    run = source.run
    if run.finished is not None and run.finished[1].end == "ready":
        return "ready"
    if _stalled_visit(source) is not None and not source.is_alive:
        return "hang"
    visit = run.current
    if visit is not None and visit.failed is not None:
        return _failed_outcome(visit.failed, is_signalled=bool(run.signals))
    if run.peer_failures or (run.finished is not None and not run.signals):
        return "error"
    if source.is_alive:
        return "running"
    return "interrupted" if run.signals else "incomplete"


def _failed_outcome(failed: StateFailed, *, is_signalled: bool) -> Outcome:
    if failed.category in ("oom", "host_oom"):
        return "oom"
    return "interrupted" if failed.category == "signal" or is_signalled else "error"


def _stalled_visit(source: Source) -> Visit | None:
    """The visit that passed its deadline and never left its state, whatever ended the process then."""
    run, visit = source.run, source.run.current
    if visit is None or visit.left is not None or (visit.failed is not None and visit.failed.category != "signal"):
        return None
    journaled = any(event.state == visit.state and event.visit == visit.visit for _, event in run.stalls)
    return visit if journaled or source.stacks else None


def _deciding(sources: Sequence[Source], outcomes: Sequence[Outcome]) -> int:
    """The process that the verdict is about: the first that failed for a reason of its own, else the first."""
    order = {"oom": 0, "error": 0, "hang": 1, "interrupted": 2, "incomplete": 2, "running": 3, "ready": 4}

    def key(at: int) -> tuple[int, int, int, int]:
        run = sources[at].run
        by_peer = 2 if order[outcomes[at]] > 2 else 1 if ranks.by_peer(run) else 0
        ended = 0 if run.started is None or run.started.wall_ns is None else run.started.wall_ns + (run.last_t or 0)
        return by_peer, order[outcomes[at]], ended if order[outcomes[at]] < 2 else 0, at

    return min(range(len(sources)), key=key)


def _ranked(sources: Sequence[Source], outcomes: Sequence[Outcome]) -> list[RankedFinding]:
    found: list[tuple[tuple[Any, ...], RankedFinding]] = []
    told: set[tuple[str, str]] = set()
    labels = [source.label for source in sources]
    for source, result in zip(sources, outcomes, strict=True):
        label = source.label if len(sources) > 1 else None
        seen: set[tuple[str, str | None]] = set()
        for finding in _findings(source, result):
            if (finding.code, finding.state) in seen or ranks.said_already(finding, told):
                continue
            seen.add((finding.code, finding.state))
            note, *rest = _rank(finding, source.run)
            found.append(((note, ranks.comes_last(finding, labels), *rest), _evident(finding, label, source)))
    for at, finding in straggler_findings(sources):
        note, *rest = _rank(finding, sources[at].run)
        found.append(((note, False, *rest), _evident(finding, sources[at].label, sources[at])))
    return [ranked for _, ranked in sorted(found, key=lambda pair: pair[0])]


def _rank(finding: Finding, run: RunState) -> tuple[Any, ...]:
    first = min(finding.evidence) if finding.evidence else run.last_seq + 1
    note, answered = finding.severity == "note", _is_answered(finding, run)
    return note, answered, first, SEVERITIES.index(finding.severity), -finding.bytes


def _is_answered(finding: Finding, run: RunState) -> bool:
    """Whether a start that did not come to ready went on from this failure: then it ended of something else."""
    if run.finished is not None and run.finished[1].end == "ready":
        return False
    return any(visit.ended_seq in finding.evidence for visit in run.visits if visit.failed and was_answered(visit, run))


def _findings(source: Source, result: Outcome) -> list[Finding]:
    """Causes of failures first, so that they win over what a check says of the same thing."""
    run = source.run
    found: list[Finding] = []
    # Of tries that failed alike, the one that the start ended with is kept.
    for visit in (*run.visits[-1:], *run.visits[:-1]):
        for finding in causes(visit, run):
            recovered = result == "ready" or was_answered(visit, run)
            found.append(attrs.evolve(finding, severity=_recovered(visit)) if recovered else finding)
    for seq, judged in run.checks:
        # Of a state that was tried again only what failed it counts.
        found += [attrs.evolve(each, evidence=each.evidence or (seq,)) for each in judged.findings]
    return found + _endings(source, result) + _troubles(source, result)


def _recovered(visit: Visit) -> Severity:
    """A failure that the plan had an answer to may come again; what a device cannot do is no fault at all."""
    return "note" if visit.failed is not None and visit.failed.category == "unsupported" else "warning"


def _endings(source: Source, result: Outcome) -> list[Finding]:
    run, visit = source.run, source.run.current
    state = run.state
    found: list[Finding] = []
    stalled = _stalled_visit(source)
    for seq, event in run.stalls:
        stuck = result == "hang" and stalled is not None and event.state == stalled.state
        line = event.stack[-1].strip() if event.stack else "no stack"
        found.append(
            Finding(
                code="state.stalled",
                severity="error" if stuck else "warning",
                state=event.state,
                message=f"{event.state} passed its deadline of {event.deadline_ns / 1e9:g} s at: {line}",
                observed=list(event.stack),
                expected=event.deadline_ns,
                evidence=(seq,),
            )
        )
    if result == "hang" and not found and stalled is not None:
        text = f"{stalled.state} passed its deadline at: {source.stacks[-1].strip()}"
        stack, at = list(source.stacks), (stalled.entered_seq,)
        found.append(
            Finding(code="state.stalled", severity="error", state=state, message=text, observed=stack, evidence=at)
        )
    if result == "incomplete":
        where = f"inside {state}" if visit is not None and visit.is_open else f"after {state}" if state else "at once"
        found.append(
            Finding(
                code="run.ended_without_trace",
                severity="error",
                state=state,
                part=None if visit is None else visit.part,
                message=f"the journal stops {where}; nothing says why",
                evidence=() if visit is None else (visit.entered_seq,),
            )
        )
    is_own = not run.peer_failures and (visit is None or visit.failed is None)
    if result == "error" and run.finished is not None and is_own:
        seq, finished = run.finished
        text = f"declared failed {f'after {state}' if state else 'at once'}: {finished.reason or 'no reason given'}"
        found.append(Finding(code="state.raised", severity="error", state=state, message=text, evidence=(seq,)))
    if result == "interrupted" and run.signals:
        seq, signalled = run.signals[-1]
        text = f"{signalled.signal} arrived in {signalled.state or state}"
        found.append(Finding(code="run.ended_by_signal", severity="error", state=state, message=text, evidence=(seq,)))
    found += ranks.judged_missing(run)
    for seq, failed in run.peer_failures:
        where = f" in {failed.state}" if failed.state else ""
        text = f"{failed.peer} failed{where}: {failed.reason}"
        found.append(Finding(code="ranks.peer_failed", severity="error", state=state, message=text, evidence=(seq,)))
    return found


def _troubles(source: Source, result: Outcome) -> list[Finding]:
    """What is wrong with the record itself, and time that no state explains."""
    run = source.run
    found: list[Finding] = []
    for kind, text, seq in source.problems:
        code = "journal.torn" if kind in ("torn", "broken") else "journal.gap"
        # A torn tail is what a killed process leaves: it says nothing that the end does not say.
        severity = "note" if kind == "torn" else "warning"
        at = () if seq is None else (seq,)
        found.append(Finding(code=code, severity=severity, message=text, evidence=at))  # type: ignore[arg-type]
    for seq, decision in run.decisions:
        if decision.decision == "journal_in_memory":
            text = f"the journal could not be written for a while: {decision.reason}"
            found.append(Finding(code="journal.unwritable", severity="warning", message=text, evidence=(seq,)))
    total, inside = run.last_t or 0, sum(visit.duration_ns or 0 for visit in run.visits)
    outside = total - inside
    if result == "ready" and outside > _UNATTRIBUTED_NS and outside * 5 > total:
        text = f"{outside / 1e9:.1f} s of {total / 1e9:.1f} s lie outside every state"
        found.append(Finding(code="time.unattributed", severity="note", message=text, observed=outside))
    return found


def _evident(finding: Finding, label: str | None, source: Source) -> RankedFinding:
    shown: list[Mapping[str, Any]] = [{"seq": seq} for seq in finding.evidence]
    if finding.code == "state.stalled" and isinstance(finding.observed, list):
        shown += [{"text": line} for line in finding.observed[-6:]]
    visit = source.run.current
    if visit is not None and visit.failed is not None and visit.ended_seq in finding.evidence:
        shown += [{"seq": visit.ended_seq, "text": line} for line in visit.failed.where[-2:]]
    return RankedFinding(finding=finding, rank=label, evidence=tuple(shown))


def _advice(ranked: Sequence[RankedFinding], sources: Sequence[Source]) -> list[Advice]:
    """Advice on each finding in its order; the first word on a setting stands."""
    found: list[Advice] = []
    by_label = {source.label: source.run for source in sources}
    for each in ranked:
        if each.finding.severity == "note" and each.finding.code != "budget.unused":
            continue
        run = by_label[each.rank] if each.rank is not None else sources[0].run
        settings = {change.setting for advice in found for change in advice.changes}
        found += [
            advice
            for advice in advise(each.finding, _visit_of(each.finding, run), run)
            if not settings.intersection(change.setting for change in advice.changes)
        ]
    return found


def _visit_of(finding: Finding, run: RunState) -> Visit | None:
    """The visit whose failure a finding explains: the one that its last event lies in."""
    last = max(finding.evidence, default=-1)
    for visit in reversed(run.visits):
        if visit.entered_seq <= last:
            return visit
    return run.current


def _inferred(run: RunState) -> tuple[str, ...]:
    last = last_snapshot(run)
    return () if last is None or last.process_bytes is not None else ("outside_torch_bytes", "unexplained_bytes")


def _missing(run: RunState, failing: Visit | None) -> int | None:
    if failing is None or failing.failed is None:
        return None
    sized, oom = budget_before(failing, run), last_oom(failing, run)
    if failing.failed.category == "budget" and sized is not None:
        return sized[1].missing_bytes
    found = causes(failing, run)
    if oom is None or not found:
        return None
    return found[0].bytes


def _durations(run: RunState) -> dict[str, int]:
    durations: dict[str, int] = {}
    for visit in run.visits:
        end = visit.ended_t if visit.ended_t is not None else run.last_t
        if visit.entered_t is not None and end is not None:
            durations[visit.state] = durations.get(visit.state, 0) + end - visit.entered_t
    return durations


def _unseen(run: RunState) -> list[str]:
    unseen = []
    last = last_snapshot(run)
    if last is None:
        unseen.append("memory: no snapshot was taken")
    elif last.process_bytes is None:
        unseen.append("bytes of other processes: this device does not tell them apart, so all is charged to us")
    unseen += [
        f"{name}: {event.skipped}"
        for visit in run.visits
        for name, (_, event) in visit.probes.items()
        if event.skipped is not None
    ]
    if run.unknown:
        unseen.append(f"events of kinds that this version does not know: {', '.join(sorted(run.unknown))}")
    if run.plan_trouble:
        unseen.append(f"the plan: {run.plan_trouble}")
    return list(dict.fromkeys(unseen))
