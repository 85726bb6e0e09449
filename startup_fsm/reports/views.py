"""
Views for people beside the verdict: times, costs, replays, plans, and a start of ours that has just ended.

As in ``text``, every view is a sequence of pieces, says at its end what it cannot see, and cleans what it shows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from startup_fsm.findings import Finding
from startup_fsm.fold import RunState
from startup_fsm.memory import format_bytes
from startup_fsm.replay import Replay
from startup_fsm.reports import costs
from startup_fsm.reports.bars import bars
from startup_fsm.reports.terminal import (
    clean,
    columns,
    duration,
    heading,
    indented,
    pairs,
    plain,
    points,
    share,
    signed,
)
from startup_fsm.reports.text import budget_view, unseen_view, verdict_view
from startup_fsm.starts import Start
from startup_fsm.verdict import Verdict

#: Rows of a ranking that are shown; ``--json`` has all.
ROWS: Final = 12


def start_line(start: Start) -> Text:
    """Which start a view is about."""
    return plain(f"run {start.run or 'unknown'}, attempt {start.attempt} ({start.origin})", "bold")


def times_view(start: Start) -> Iterator[RenderableType]:
    """States in order, how long each took, and what of it was ours."""
    yield start_line(start)
    for process in start.processes:
        yield from process_times(costs.times(process.history, process.label))
    unseen = ["what the process did before its first event: imports, the launcher"]
    if len(start.processes) > 1:
        unseen.append("how the clocks of the processes relate: each begins with its own journal")
    yield from unseen_view([*unseen, *start.unseen])


def process_times(times: costs.Times) -> Iterator[RenderableType]:
    """The states of one process in order."""
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
        yield from bars(costs.memory_edges(history))
        yield from _byte_costs(costs.byte_costs(history))
        yield from _graph_costs(costs.graph_costs(history))
        if history.budgets:
            yield from budget_view(history.budgets[-1][1])
    unseen = [
        "bytes that came and went between two readings",
        "time inside the body of a state, but for what the engine marked",
    ]
    if not any(visit.snapshots for process in start.processes for visit in process.history.visits):
        unseen[0] = "bytes at the edges: no memory was read; a text log has figures where its engine prints them"
    yield from unseen_view([*unseen, *start.unseen])


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
    names = ("count", "in the pool", "outside torch", "largest")
    table = columns("state", *names, numbers=names)
    for each in rows:
        largest = f"size {each.largest_size}: {format_bytes(each.largest_bytes)}"
        sizes = format_bytes(each.pool_bytes), format_bytes(each.outside_bytes)
        table.add_row(_visit(each.state, each.visit), str(each.count), *sizes, largest)
    yield indented(table)


def _rest(count: int) -> Iterator[RenderableType]:
    if count > ROWS:
        yield indented(plain(f"and {count - ROWS} smaller; --json has all", "dim"))


def outcome_view(
    run: RunState, verdict: Verdict, tokens: Sequence[Sequence[int]] | None, path: str | None
) -> Iterator[RenderableType]:
    """A start of ours that has just ended: states and times, what it generated, the verdict, where the journal is."""
    process = f"rank {run.rank}" if run.rank is not None else run.process or "this process"
    yield from process_times(costs.times(run, process))
    if run.budgets:
        yield from budget_view(run.budgets[-1][1])
    if tokens:
        yield heading("Generated tokens, one request a line")
        yield indented(points(" ".join(map(str, each)) for each in tokens))
    yield heading("Verdict")
    yield from verdict_view(verdict)
    yield heading("Look closer")
    if path is None:
        yield indented(plain("there is no journal: it could not be written, or nobody asked for one"))
    else:
        yield indented(plain(f"{_program()} doctor, blame, time or verify, and the path of the journal:"))
        yield indented(plain(path))


def _program() -> str:
    """How this command was called, so that what is printed can be pasted."""
    called = sys.argv[0]
    return called if called.endswith("startup-fsm") else "python -m startup_fsm"


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
    yield from unseen_view([*unseen, *start.unseen])


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
    yield indented(
        plain(f"{replay.edges} edges judged again; judgements that differ: {len(replay.differences)}", "yellow")
    )
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
