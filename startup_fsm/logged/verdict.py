"""From the processes of a logged start to its verdict: outcome, ranked findings, advice, figures, ledger. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from startup_fsm.dialects import KnownFault
from startup_fsm.logged import shares
from startup_fsm.logged.advise import advise
from startup_fsm.logged.facts import ABSURD_BYTES
from startup_fsm.logged.failures import died_of
from startup_fsm.logged.invariants import broken
from startup_fsm.logged.known import named
from startup_fsm.logged.ledger import ledger
from startup_fsm.logged.memory_failures import failed_elsewhere
from startup_fsm.logged.start import Found, Start, read_start
from startup_fsm.logged.unseen import unseen
from startup_fsm.sources import Source
from startup_fsm.verdict import SOURCES, RankedFinding, Verdict

#: Findings whose bytes are missing, not merely wrong.
_LACKING: Final = ("budget.", "weights.exceed_request", "device.not_enough_free")
#: Those that are about a request, which may be raised.
_SIZED: Final = ("budget.", "weights.exceed_request")
_OUT_OF_MEMORY: Final = ".out_of_memory"


def logged_verdict(sources: Sequence[Source], *, origin: str | None) -> Verdict:
    """
    The verdict on one start that is known by its log alone.

    Args:
        sources: All its processes; at least one.
        origin: What was read: a path, lines of it.
    """
    start = read_start(sources)
    findings = ranked(start)
    facts, end = start.facts, start.ending
    book = ledger(start)
    first = sources[0].run
    started = next((each.run.started for each in sources if each.run.started is not None), None)
    source = "unknown" if started is None else started.source
    return Verdict(
        source=source if source in SOURCES else "unknown",
        origin=origin,
        engine=None if started is None else started.engine,
        engine_version=next((v for each in sources if (v := _version(each)) is not None), None),
        run=first.run,
        attempt=first.attempt,
        ranks=_ranks(start),
        outcome=end.outcome,
        failed_state=None if start.is_ready else end.state,
        part=None if start.is_ready else end.part,
        failed_rank=_failed_rank(start),
        figures={name: read.value for name, read in facts.figures.items()},
        figures_by_rank=facts.by_rank(),
        inferred=tuple(facts.inferred),
        ledger=book.accounts,
        unexplained_bytes=book.unexplained_bytes,
        missing_bytes=_missing(start, findings),
        durations_ns=_durations(start),
        findings=tuple(_shown(start, found) for found, _ in findings),
        advice=tuple(advise(start, findings)),
        unseen=tuple(unseen(start)),
        problems=tuple(text for each in sources for _, text, _ in each.problems),
    )


def ranked(start: Start) -> list[tuple[Found, KnownFault | None]]:
    """Findings, the first violated invariant first, each with the known fault that explains it."""
    found: dict[tuple[str, str | None], Found] = {}
    for each in (*died_of(start), *broken(start), *failed_elsewhere(start)):
        found.setdefault((each.finding.code, each.finding.state), each)
    # A cause that is said with its numbers needs no second word of the same thing.
    if ("graphs.not_reserved", "size_kv") in found or ("graphs.estimate_short", "size_kv") in found:
        found.pop(("capture.out_of_memory", "capture_graphs"), None)
    return [named(start, each) for each in sorted(found.values(), key=lambda each: each.order)]


def _version(source: Source) -> str | None:
    return None if source.run.started is None else source.run.started.engine_version


def _ranks(start: Start) -> int:
    """Ranks that speak; a process without a name that measures is one more, the driver of an older version."""
    facts = start.facts
    unnamed = [each.run.figures for at, each in enumerate(facts.processes) if facts.label(at) is None]
    is_driver = any(name in figures for figures in unnamed for name in ("weights_bytes", "graph_actual_bytes"))
    return max(1, len(facts.labels) + is_driver)


def _failed_rank(start: Start) -> str | None:
    at = start.ending.process
    if start.failure is None or at is None or len(start.facts.labels) < 2:
        return None
    return start.facts.label(at)


def _missing(start: Start, findings: Sequence[tuple[Found, KnownFault | None]]) -> int | None:
    """What is short: of the device where no share fits, else of what failed."""
    if start.is_ready:
        return None
    codes = [found.finding.code for found, _ in findings]
    if any(code.startswith(_SIZED) for code in codes) and (short := shares.missing(start)) is not None:
        return short if short < ABSURD_BYTES else None
    causes = [found.finding for found, _ in findings if found.is_cause]
    lacking = [each.bytes for each in causes if each.code.startswith(_LACKING) or each.code.endswith(_OUT_OF_MEMORY)]
    return next((size for size in lacking if size), None)


def _durations(start: Start) -> dict[str, int]:
    """Time in each state, of the process that the end is about, else of the first that says any."""
    order = start.facts.order if start.ending.process is None else (start.ending.process, *start.facts.order)
    for at in order:
        run = start.facts.processes[at].run
        durations: dict[str, int] = {}
        for visit in run.visits:
            end = run.last_t if visit.ended_t is None else visit.ended_t
            if visit.entered_t is not None and end is not None:
                durations[visit.state] = durations.get(visit.state, 0) + max(0, end - visit.entered_t)
        if durations:
            return durations
    return {}


def _shown(start: Start, found: Found) -> RankedFinding:
    label = None
    if found.process is not None and len(start.facts.labels) > 1:
        label = start.facts.label(found.process)
    return RankedFinding(finding=found.finding, rank=label, evidence=start.facts.shown(found.seen))
