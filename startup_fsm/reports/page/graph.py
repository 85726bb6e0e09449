"""
The plan as a picture: where each state stands, which edges there are, and the way that was taken. Pure.

The way of a start that met no trouble runs down the first column; states that are only reached by trouble stand in the
second. Only places are computed here, in rows and columns; lines are drawn in the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs

from startup_fsm.fold import RunState
from startup_fsm.plan import Plan
from startup_fsm.states import ENDS, FAILED, READY

#: Most states and edges that are drawn.
_MOST_STATES: Final = 60
_MOST_EDGES: Final = 240


@attrs.frozen
class Taken:
    """One step of a start: from where, by which edge, to where; how it had ended there."""

    source: str | None
    edge: str | None
    target: str
    after: str


def steps_of(run: RunState) -> list[Taken]:
    """The way that one process took, its end included."""
    steps: list[Taken] = []
    before: str | None = None
    ended = "begin"
    for visit in run.visits:
        source = visit.source if visit.source is not None else before
        steps.append(Taken(source, visit.edge, visit.state, ended))
        before = visit.state
        ended = "left" if visit.left is not None else "failed" if visit.failed is not None else "open"
    if run.finished is not None:
        steps.append(Taken(before, None, run.finished[1].end, ended))
    return steps


def graph_of(runs: Sequence[RunState], decides: int) -> dict[str, Any]:
    """
    States with their places and edges with their kind, of one plan and of what all ranks did.

    Args:
        runs: All processes.
        decides: Index of the one whose plan is drawn.
    """
    plan = runs[decides].plan
    visited = dict.fromkeys(visit.state for run in runs for visit in run.visits)
    ends = dict.fromkeys(run.finished[1].end for run in runs if run.finished is not None)
    names, columns = _placed(plan, visited)
    names = [*names, *(end for end in (READY, FAILED) if end in ends or (end == READY and plan is not None))]
    names = [*names, *(end for end in ends if end not in names)]
    known = set(names)
    edges = _edges(plan, [steps_of(run) for run in runs], known)
    summaries = {} if plan is None else {state.name: state.summary for state in plan.states}
    return {
        "plan": None if plan is None else plan.name,
        "trouble": runs[decides].plan_trouble,
        "is_free": plan is None or plan.is_free,
        "hidden": 0 if plan is None else max(0, len(plan.states) - sum(name not in ENDS for name in names)),
        "states": [
            {
                "name": name,
                "column": columns.get(name, (0, 0))[0] if name not in ENDS else 0,
                "row": columns[name][1] if name in columns else _end_row(columns, name, names),
                "summary": summaries.get(name, ""),
                "is_end": name in ENDS or name not in columns,
            }
            for name in names
        ],
        "edges": edges[:_MOST_EDGES],
    }


def _end_row(columns: dict[str, tuple[int, float]], name: str, names: Sequence[str]) -> float:
    last = max((row for _, row in columns.values()), default=-1.0)
    ends = [each for each in names if each not in columns]
    return last + 1 + ends.index(name)


def _placed(plan: Plan | None, visited: Iterable[str]) -> tuple[list[str], dict[str, tuple[int, float]]]:
    """Names of states in order, with column and row of each."""
    if plan is None or plan.is_free:
        names = list(visited)[:_MOST_STATES]
        return names, {name: (0, float(row)) for row, name in enumerate(names)}
    line = _line(plan)
    reached = _reached(plan) | set(visited)
    others = [state.name for state in plan.states if state.name not in line and state.name in reached]
    others += [name for name in visited if name not in line and name not in others]
    names = [*line, *others][:_MOST_STATES]
    places = {name: (0, float(row)) for row, name in enumerate(line)}
    row = -1.0
    for name in others:
        sources = [places[edge.source][1] for edge in plan.edges if edge.target == name and edge.source in places]
        row = max(row + 1, min(sources, default=row) + 0.5)
        places[name] = (1, row)
    return names, {name: places[name] for name in names}


def _line(plan: Plan) -> list[str]:
    """States on the way of a start that meets no trouble."""
    line: list[str] = []
    here: str | None = plan.start
    while here is not None and here not in line and here not in ENDS:
        line.append(here)
        onward = plan.onward(here)
        here = None if onward is None else onward.target
    return line


def _reached(plan: Plan) -> set[str]:
    """States that some way leads to which is not switched off."""
    seen, todo = {plan.start}, [plan.start]
    while todo:
        for edge in plan.edges_from(todo.pop()):
            if edge.bound != 0 and edge.target not in seen:
                seen.add(edge.target)
                todo.append(edge.target)
    return seen


def _edges(plan: Plan | None, ways: Sequence[Sequence[Taken]], known: set[str]) -> list[dict[str, Any]]:
    """Edges of the plan that are open or were taken, and steps that the plan does not know."""
    counts: Counter[tuple[str, str, str | None]] = Counter()
    for way in ways:
        counts.update((step.source, step.target, step.edge) for step in way if step.source is not None)
    found: list[dict[str, Any]] = []
    left = Counter(counts)
    for edge in () if plan is None else plan.edges:
        key = next(
            (
                each
                for each in ((edge.source, edge.target, edge.name), (edge.source, edge.target, None))
                if each in left
            ),
            None,
        )
        if key is None and (edge.bound == 0 or edge.target == FAILED):
            continue
        taken = 0 if key is None else left.pop(key)
        found.append(_edge(edge.source, edge.target, edge.name, edge.policy, edge.bound, taken))
    unknown = "advance" if plan is None or plan.is_free else "unknown"
    found += [_edge(source, target, name or "", unknown, None, taken) for (source, target, name), taken in left.items()]
    return [each for each in found if each["source"] in known and each["target"] in known]


def _edge(source: str, target: str, name: str, policy: str, bound: int | None, taken: int) -> dict[str, Any]:
    return {"source": source, "target": target, "name": name, "policy": policy, "bound": bound, "taken": taken}
