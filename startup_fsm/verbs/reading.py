"""The verbs that read: what a journal says, as a page or as JSON. No torch, no structlog."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import attrs
from rich.console import RenderableType

from startup_fsm.errors import JournalError, StartupError
from startup_fsm.fold import RunState
from startup_fsm.reading import read_starts
from startup_fsm.reports.output import SCHEMA, emit, emit_json, emit_pages, rows_by_start, say_error
from startup_fsm.starts import Start
from startup_fsm.verbs.arguments import AllowEager, Json, Markdown, Path, PlanOrPath, Retries
from startup_fsm.verdict import EXIT_FINDINGS, EXIT_READY, EXIT_UNREADABLE, Verdict, report
from startup_fsm.verdicts import judge


def doctor(*path: Path, json: Json = False, markdown: Markdown = False) -> int:
    """Say what came of starts: outcome, ranked causes with evidence, advice with arithmetic, where the bytes went."""
    if not path:
        raise StartupError("doctor needs a PATH", hint="startup-fsm doctor runs/")
    starts, code = _read(path)
    verdicts = [_judged(start) for start in starts]
    answer = report(verdicts)
    if json:
        emit_json(answer)
    elif markdown:
        from startup_fsm.reports.markdown import markdown_pages

        emit(markdown_pages(verdicts))
    else:
        from startup_fsm.reports.text import verdict_view

        emit_pages(verdict_view(verdict) for verdict in verdicts)
    main = answer["main"]
    return code or (EXIT_READY if main is None else verdicts[main].exit_code)


def _judged(start: Start) -> Verdict:
    """The verdict on a start, which says what its source cannot tell in the words of the other views too."""
    verdict = judge(start.sources, source=start.source, origin=start.origin)
    return attrs.evolve(verdict, unseen=tuple(dict.fromkeys((*verdict.unseen, *start.unseen))))


def time(path: Path, /, *, json: Json = False) -> int:
    """Say how long each state took, what of it was our own part, and what no state accounts for."""
    from startup_fsm.reports import costs, views

    return _show(path, views.times_view, costs.times, json=json)


def blame(path: Path, /, *, json: Json = False) -> int:
    """Say what cost most, in time and in bytes."""
    from startup_fsm.reports import costs, views

    return _show(path, views.blame_view, costs.blame, json=json)


def verify(path: Path, /, *, json: Json = False) -> int:
    """Hold a journal against the plan that it holds, and judge it again with today's checks."""
    from startup_fsm.replay import replay
    from startup_fsm.reports.views import replay_view

    starts, code = _read([path])
    replays = [[replay(process.journal.records) for process in start.processes] for start in starts]
    both = list(zip(starts, replays, strict=True))
    if json:
        emit_json(
            rows_by_start(
                (start, [each.as_data(process.label) for process, each in zip(start.processes, found, strict=True)])
                for start, found in both
            )
        )
    else:
        emit_pages(replay_view(start, found) for start, found in both)
    every = [each for found in replays for each in found]
    for each in every:
        if (divergence := each.divergence()) is not None:
            raise divergence
    return code or (EXIT_FINDINGS if any(each.is_worse for each in every) else EXIT_READY)


def plan(
    name: PlanOrPath = None,
    /,
    *,
    retries: Retries = 0,
    allow_eager: AllowEager = False,
    json: Json = False,
) -> int:
    """List the plans, or draw one as a Mermaid diagram."""
    from startup_fsm.plan import PLANS

    if name is None:
        plans = [make() for make in PLANS.values()]
        if json:
            emit_json({"schema": SCHEMA, "plans": [each.as_data() for each in plans]})
        else:
            from startup_fsm.reports.views import plans_view

            emit_pages([plans_view((each.name, [state.name for state in each.states]) for each in plans)])
        return EXIT_READY
    from startup_fsm.reports.terminal import clean

    taken: set[tuple[str, str]] = set()
    if name in PLANS:
        options = {"retries": retries or 0} | ({} if name == "eager" else {"allow_eager": allow_eager})
        drawn, code = PLANS[name](**options if name != "observed" else {}), EXIT_READY
    else:
        if os.sep not in name and name != "-" and not os.path.exists(name):  # noqa: PTH110 - a name, mostly no path
            raise StartupError(f"{name!r} is neither a plan nor a path", hint=f"plans are {', '.join(PLANS)}")
        starts, code = _read([name])
        if not starts:
            return code
        history = starts[-1].processes[0].history
        if history.plan is None:
            raise JournalError(f"{name}: {history.plan_trouble or 'the journal holds no plan'}", path=name)
        drawn, taken = history.plan, _taken(history)
    if json:
        emit_json({"schema": SCHEMA, "plan": drawn.as_data(), "taken": sorted(map(list, taken))})
    else:
        emit("".join(f"{clean(line)}\n" for line in drawn.mermaid(taken).split("\n")))
    return code


def _taken(history: RunState) -> set[tuple[str, str]]:
    """Pairs of states between which a start went, its end included."""
    steps = {(visit.source, visit.state) for visit in history.visits if visit.source is not None}
    if history.finished is not None and history.state is not None:
        steps.add((history.state, history.finished[1].end))
    return steps


def _show(
    path: str,
    view: Callable[[Start], Iterable[RenderableType]],
    rows: Callable[[RunState, str], Any],
    *,
    json: bool,
) -> int:
    """A view of each start as a page, or its rows by process as JSON."""
    starts, code = _read([path])
    if json:
        emit_json(
            rows_by_start(
                (start, [attrs.asdict(rows(process.history, process.label)) for process in start.processes])
                for start in starts
            )
        )
    else:
        emit_pages(view(start) for start in starts)
    return code


def _read(paths: Iterable[str]) -> tuple[list[Start], int]:
    """The starts of all paths that can be read; what cannot is said, and makes the exit code."""
    starts: list[Start] = []
    code = EXIT_READY
    for path in paths:
        if path.startswith("-") and path != "-":
            raise StartupError(f"no such option: {path}", hint=f"a path that begins with a dash is written ./{path}")
        try:
            starts += read_starts(path)
        except JournalError as error:
            say_error(error)
            code = EXIT_UNREADABLE
    return starts, code
