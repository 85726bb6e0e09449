"""
Views for people: the verdict, the times, the costs, the replay, the plans.

Every view is a sequence of pieces for :func:`startup_fsm.reports.terminal.page`, and says at its end what it cannot
see. What comes from a journal goes through ``terminal``, where it is cleaned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import RenderableType
from rich.text import Text

from startup_fsm.events import BudgetComputed
from startup_fsm.findings import Advice, Change, Finding
from startup_fsm.memory import Account, format_bytes
from startup_fsm.reading import Start
from startup_fsm.replay import Replay
from startup_fsm.reports import costs
from startup_fsm.reports.terminal import (
    clean,
    columns,
    duration,
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

#: Rows of a ranking that are shown; ``--json`` has all.
ROWS: Final = 12

_OUTCOMES: Final = {
    "ready": ("ready", "bold green"),
    "oom": ("out of memory", "bold red"),
    "error": ("failed", "bold red"),
    "hang": ("hang", "bold red"),
    "incomplete": ("incomplete", "bold red"),
    "interrupted": ("interrupted", "bold yellow"),
    "running": ("still running", "bold cyan"),
}
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
        yield indented(pairs((clean(name), quantity(name, value)) for name, value in sorted(verdict.figures.items())))
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
    ranks = f", {verdict.ranks} processes" if verdict.ranks > 1 else ""
    yield "run", f"{verdict.run or 'unknown'}, attempt {verdict.attempt}{ranks}"
    if verdict.engine is not None:
        yield "engine", f"{verdict.engine} {verdict.engine_version or ''}".rstrip()
    yield verdict.source, verdict.origin or "in memory"
    if verdict.missing_bytes is not None:
        yield "missing", format_bytes(verdict.missing_bytes)


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
    allowed = f", {format_bytes(finding.tolerance)} allowed" if isinstance(finding.tolerance, int) else ""
    return f"observed {format_bytes(observed)}, expected {format_bytes(expected)}{allowed} ({finding.scope})"


def _evidence(evidence: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Numbers together on one line, texts each on its own."""
    numbers = [
        f"{word} {each[word]}" for each in evidence for word in ("seq", "line") if word in each and "text" not in each
    ]
    if numbers:
        yield f"seen at {', '.join(dict.fromkeys(numbers))}"
    for each in evidence:
        if "text" in each:
            yield str(each["text"])


def _advice(number: int, advice: Advice) -> Iterator[RenderableType]:
    yield indented(plain(f"{number}. {' and '.join(_change(change) for change in advice.changes)}"))
    extra = ""
    if advice.interval is not None:
        extra += f"; from {advice.interval[0]:g} to {advice.interval[1]:g} would do"
    if advice.leftover_bytes is not None:
        extra += f"; {format_bytes(advice.leftover_bytes)} would be left over"
    yield indented(plain(f"because {advice.because}{extra}"), 5)
    for change in advice.changes:
        if change.flag is not None:
            yield indented(plain(change.flag, "cyan"), 5)


def _change(change: Change) -> str:
    if change.setting == "none":
        return "nothing to set"
    text = f"{_VERBS.get(change.direction, change.direction)} {change.setting}"
    if change.before is not None and change.direction != "investigate":
        text += f" from {_value(change.before)}"
    if change.to is not None:
        text += f" to {_value(change.to)}"
        if isinstance(change.to, int) and (change.unit == "bytes" or change.setting.endswith("_bytes")):
            text += f" ({format_bytes(change.to)})"
        elif change.unit is not None:
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
        row = plain(account.account), plain(format_bytes(account.bytes)), plain(share(account.bytes, whole))
        table.add_row(*row, plain(account.source))
    used = sum(account.bytes for account in ledger)
    table.add_row(plain("used", "bold"), plain(format_bytes(used), "bold"), plain(share(used, whole)), plain("sum"))
    if whole:
        table.add_row("free", format_bytes(whole - used), share(whole - used, whole), "total - used")
    yield indented(table)


def unseen_view(unseen: Iterable[object]) -> Iterator[RenderableType]:
    """What a view cannot tell, so that silence is not taken for all being well."""
    listed = list(unseen)
    if listed:
        yield heading("Not seen")
        yield indented(points(listed))


def start_line(start: Start) -> Text:
    """Which start a view is about."""
    return plain(f"run {start.run or 'unknown'}, attempt {start.attempt} ({start.origin})", "bold")


def unseen_of(start: Start) -> list[str]:
    """What the source of a start cannot tell, whatever the view."""
    found: list[str] = []
    if start.source == "journal" and not start.is_whole:
        found.append("other processes of this run: one journal was read")
    for process in start.processes:
        history, label = process.history, process.label
        found += [f"{label}: {problem.message}" for problem in process.journal.problems]
        if process.is_alive and history.finished is None:
            found.append(f"{label}: what comes after seq {history.last_seq}: it is still being written")
        elif history.finished is None:
            found.append(f"{label}: what came after seq {history.last_seq}: the journal has no end")
        found += [
            f"{label}: what {count} event{'s' if count > 1 else ''} of the kind {kind} mean"
            for kind, count in history.unknown.items()
        ]
    return found


def times_view(start: Start) -> Iterator[RenderableType]:
    """States in order, how long each took, and what of it was ours."""
    yield start_line(start)
    for process in start.processes:
        yield from _times(costs.times(process.history, process.label))
    unseen = ["what the process did before its first event: imports, the launcher"]
    if len(start.processes) > 1:
        unseen.append("how the clocks of the processes relate: each begins with its own journal")
    yield from unseen_view([*unseen, *unseen_of(start)])


def _times(times: costs.Times) -> Iterator[RenderableType]:
    yield heading(f"{clean(times.process)}: {duration(times.total_ns)}")
    table = columns("state", "began", "took", "share", "cpu", "ours", numbers=("began", "took", "share", "cpu", "ours"))
    for each in times.states:
        own = [each.bookkeeping_ns, each.syncing_ns, each.measuring_ns]
        table.add_row(
            _visit(each.state, each.visit, "" if each.ended == "left" else each.ended),
            plain("-" if each.began_ns is None else duration(each.began_ns)),
            plain("-" if each.duration_ns is None else duration(each.duration_ns)),
            plain("-" if each.duration_ns is None else share(each.duration_ns, times.total_ns)),
            plain("-" if each.cpu_ns is None else duration(each.cpu_ns)),
            plain("-" if None in own else duration(sum(one or 0 for one in own))),
        )
    row = ("outside every state", "", duration(times.unattributed_ns), share(times.unattributed_ns, times.total_ns))
    table.add_row(*row, "", "")
    yield indented(table)
    yield indented(
        plain(
            f"ours: {duration(times.bookkeeping_ns)} bookkeeping, {duration(times.syncing_ns)} syncing,"
            f" {duration(times.measuring_ns)} measuring"
        )
    )


def _visit(state: str, visit: int, ended: str = "") -> Text:
    text = plain(state if visit == 1 else f"{state} (visit {visit})")
    if ended:
        text.append_text(plain(f" {ended}", "red"))
    return text


def blame_view(start: Start) -> Iterator[RenderableType]:
    """What cost most, in time and in bytes."""
    yield start_line(start)
    for process in start.processes:
        history = process.history
        if len(start.processes) > 1:
            yield heading(process.label)
        yield from _time_costs(costs.time_costs(history))
        yield from _byte_costs(costs.byte_costs(history))
        yield from _graph_costs(costs.graph_costs(history))
        if history.budgets:
            yield from budget_view(history.budgets[-1][1])
    unseen = [
        "bytes that came and went between two readings",
        "time inside the body of a state, but for what the engine marked",
    ]
    yield from unseen_view([*unseen, *unseen_of(start)])


def _time_costs(rows: Sequence[costs.TimeCost]) -> Iterator[RenderableType]:
    yield heading("Time")
    whole = sum(each.ns for each in rows)
    table = columns("state", "what", "took", "share", numbers=("took", "share"))
    for each in rows[:ROWS]:
        what = each.what if each.count is None else f"{each.what} ({each.count})"
        table.add_row(plain(each.state or "-"), plain(what), duration(each.ns), share(each.ns, whole))
    yield indented(table)
    yield from _rest(len(rows))


def _byte_costs(rows: Sequence[costs.ByteCost]) -> Iterator[RenderableType]:
    yield heading("Bytes, from the entry of a state to its end")
    table = columns("state", "account", "change", "after", "told by", numbers=("change", "after"))
    for each in rows[:ROWS]:
        changed, after = signed(each.delta_bytes), format_bytes(each.after_bytes)
        table.add_row(_visit(each.state, each.visit), plain(each.account), changed, after, plain(each.source))
    yield indented(table)
    yield from _rest(len(rows))


def _graph_costs(rows: Sequence[costs.GraphCost]) -> Iterator[RenderableType]:
    if not rows:
        return
    yield heading("Graphs")
    names = ("count", "in the pool", "outside torch", "largest", "took")
    table = columns("state", *names, numbers=names)
    for each in rows:
        largest = f"size {each.largest_size}: {format_bytes(each.largest_bytes)}"
        sizes = format_bytes(each.pool_bytes), format_bytes(each.outside_bytes)
        table.add_row(_visit(each.state, each.visit), str(each.count), *sizes, largest, duration(each.duration_ns))
    yield indented(table)


def _rest(count: int) -> Iterator[RenderableType]:
    if count > ROWS:
        yield indented(plain(f"and {count - ROWS} smaller; --json has all", "dim"))


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


def replay_view(start: Start, replays: Sequence[Replay]) -> Iterator[RenderableType]:
    """Where a journal leaves its plan, and where today's checks say something else."""
    yield start_line(start)
    skipped: dict[str, str] = {}
    for process, replay in zip(start.processes, replays, strict=True):
        yield heading(process.label)
        yield from _divergences(replay)
        yield from _differences(replay)
        skipped |= replay.skipped
    unseen = ["whether what was recorded is true: probes and readings are taken as they stand"]
    unseen += [f"what the probe {probe} would have said: {reason}" for probe, reason in skipped.items()]
    yield from unseen_view([*unseen, *unseen_of(start)])


def _divergences(replay: Replay) -> Iterator[RenderableType]:
    plan, found = replay.history.plan, replay.violations
    if replay.history.plan_trouble is not None:
        yield indented(plain(f"no plan: {replay.history.plan_trouble}", "red"))
    elif plan is None:
        yield indented(plain("the journal holds no plan: nothing to hold it against", "yellow"))
    elif not found:
        free = ", which allows any order" if plan.is_free else ""
        yield indented(plain(f"{replay.history.records} events follow the plan {plan.name}{free}"))
    for violation in found:
        yield indented(plain(f"seq {violation.seq}: {violation.message}", "red"))


def _differences(replay: Replay) -> Iterator[RenderableType]:
    if not replay.differences:
        yield indented(plain(f"{replay.edges} edges judged again: today's checks say the same"))
        return
    yield indented(plain(f"{replay.edges} edges judged again: {len(replay.differences)} judgements differ", "yellow"))
    for each in replay.differences:
        where = each.state if each.visit == 1 else f"{each.state} (visit {each.visit})"
        yield indented(plain(f"{each.check} at {where}, seq {each.seq}"), 4)
        yield indented(pairs((("then", _judged(each.was)), ("today", _judged(each.now)))), 6)


def _judged(findings: Sequence[Finding] | None) -> str:
    if findings is None:
        return "not asked"
    return "; ".join(f"{each.severity} {each.code}: {each.message}" for each in findings) or "held"


def plans_view(plans: Iterable[tuple[str, Sequence[str]]]) -> Iterator[RenderableType]:
    """Names of plans and their states."""
    table = columns("plan", "states")
    for name, states in plans:
        table.add_row(plain(name, "bold"), plain(" > ".join(states)))
    yield table
    yield from unseen_view(["what a start did: name a journal instead of a plan to see its way through it"])
