"""Everything that differs between two starts, and what of it made one of them worse. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from startup_fsm.diff.sides import GIVEN, Side, pair
from startup_fsm.diff.states import StateDifference, by_state
from startup_fsm.diff.ties import Tie
from startup_fsm.diff.worse import Worse, ended, explain, lacking
from startup_fsm.sources import Source
from startup_fsm.verdict import RankedFinding, Verdict

#: What differs by itself and explains nothing.
_SURROUNDINGS: Final = frozenset({"host", "known from", "seed"})


@attrs.frozen(kw_only=True)
class Changed:
    """One thing that differs; None where only the other start tells it."""

    name: str
    a: Any
    b: Any


@attrs.frozen(kw_only=True)
class FigureDifference:
    """A figure of both that differs by more than ``resolution``: what the printed digits of both hide, in bytes."""

    name: str
    a: int | float
    b: int | float
    resolution: int


@attrs.frozen(kw_only=True)
class Difference:
    """
    Two starts side by side.

    Attributes:
        worse: Which is worse; None where neither is.
        why: What made it so, in one sentence, the cause first.
        ended: How both ended, A first.
        finding: The first finding of the worse one that the other lacks; None where it is no finding.
        ties: What differs and makes it worse, what the numbers show first.
        settings, versions, environment: What differs, by name; None where one of them does not give it.
        plan: Its name, its states, its edges and deadlines, where they differ.
        device: Device, host, engine and the like.
        compared: Labels of the two processes whose states are compared.
        states: State by state: time, bytes by account, graphs.
        budget: Terms of the budget of the KV cache, signed bytes.
        figures: Those of both that differ, but for settings.
        only_a, only_b: Findings that the other lacks or says less gravely, notes left out.
        unseen: What cannot be compared, and why.
    """

    worse: Worse | None
    why: str
    ended: tuple[str, str]
    finding: RankedFinding | None = None
    ties: tuple[Tie, ...] = ()
    settings: tuple[Changed, ...] = ()
    versions: tuple[Changed, ...] = ()
    environment: tuple[Changed, ...] = ()
    plan: tuple[Changed, ...] = ()
    device: tuple[Changed, ...] = ()
    compared: tuple[str, str]
    states: tuple[StateDifference, ...] = ()
    budget: tuple[Changed, ...] = ()
    figures: tuple[FigureDifference, ...] = ()
    only_a: tuple[RankedFinding, ...] = ()
    only_b: tuple[RankedFinding, ...] = ()
    unseen: tuple[str, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """Plain data; findings with their code, place and message."""
        data = attrs.asdict(self, filter=lambda field, _: field.name not in ("finding", "only_a", "only_b"))
        data["finding"] = None if self.finding is None else _finding(self.finding)
        data["only_a"], data["only_b"] = ([_finding(each) for each in side] for side in (self.only_a, self.only_b))
        return data


def difference(a: Sequence[Source], a_verdict: Verdict, b: Sequence[Source], b_verdict: Verdict) -> Difference:
    """
    What differs between two starts.

    Args:
        a: Processes of one start; at least one.
        a_verdict: What :func:`startup_fsm.verdicts.judge` says of it.
        b: Processes of the other.
        b_verdict: The same of the other.
    """
    first, second = pair(a, a_verdict, b, b_verdict)
    settings = _changed(first.settings, second.settings)
    versions = _changed(*(_merged(side, "versions") for side in (first, second)))
    environment = _changed(*(_merged(side, "environment") for side in (first, second)))
    plan = _changed(_plan(first), _plan(second))
    told = _device(first), _device(second)
    device = tuple(each for each in _changed(*told) if each.a is not None and each.b is not None)
    states = by_state(first.chosen.run, second.chosen.run)
    groups = (settings, versions, environment, device)
    names = [each.name for group in groups for each in group if each.name not in _SURROUNDINGS]
    figures = tuple(_figures(first, second))
    names += ["the size of the device"] * any(each.name == "total_bytes" for each in figures) + ["the plan"] * bool(
        plan
    )
    found = explain(first, second, states, names)
    return Difference(
        worse=found.worse,
        why=found.why,
        ended=(ended(first), ended(second)),
        finding=found.finding,
        ties=found.ties,
        settings=settings,
        versions=versions,
        environment=environment,
        plan=plan,
        device=device,
        compared=(first.chosen.label, second.chosen.label),
        states=states,
        budget=tuple(_budget(first, second)),
        figures=figures,
        only_a=lacking(first, second),
        only_b=lacking(second, first),
        unseen=tuple(_unseen(first, second)),
    )


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Changed, ...]:
    names = dict.fromkeys((*a, *b))
    pairs = ((name, _plain(a.get(name)), _plain(b.get(name))) for name in names)
    return tuple(Changed(name=name, a=was, b=now) for name, was, now in pairs if was != now)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _merged(side: Side, field: str) -> dict[str, Any]:
    """A mapping of ``run_started``; the process that is compared has the last word."""
    found: dict[str, Any] = {}
    for source in (*reversed(side.sources), side.chosen):
        if source.run.started is not None:
            found.update(getattr(source.run.started, field))
    return found


def _device(side: Side) -> dict[str, Any]:
    started = side.chosen.run.started
    known = side.verdict
    found: dict[str, Any] = {
        "engine": known.engine,
        "engine_version": known.engine_version,
        "processes": known.ranks,
        "known from": known.source,
    }
    if started is not None:
        found |= {"device": started.device, "host": started.host, "mode": started.mode}
    return {name: value for name, value in found.items() if value is not None}


def _plan(side: Side) -> dict[str, Any]:
    """A plan as names and values, so that one difference is one row."""
    plan = side.chosen.run.plan
    if plan is None:
        return {}
    found: dict[str, Any] = {"plan": plan.name, "states": " > ".join(state.name for state in plan.states)}
    found |= {
        f"deadline of {each.name}": f"{each.deadline_s:g} s" for each in plan.states if each.deadline_s is not None
    }
    for edge in plan.edges:
        often = "any number" if edge.bound is None else edge.bound
        found[f"{edge.source}, {edge.name}"] = f"{edge.policy} to {edge.target}, {often} times"
    return found


def _budget(a: Side, b: Side) -> Iterator[Changed]:
    """Terms that differ; of logs only those that both printed, since no log prints all of them."""
    for each in _changed(a.terms, b.terms):
        if not (a.is_logged or b.is_logged) or (each.a is not None and each.b is not None):
            yield each


def _figures(a: Side, b: Side) -> Iterator[FigureDifference]:
    for name, was in a.verdict.figures.items():
        now = b.verdict.figures.get(name)
        resolution = a.resolution(name) + b.resolution(name)
        # A setting stands with the settings, whoever printed it.
        if now is not None and name not in GIVEN and abs(now - was) > resolution:
            yield FigureDifference(name=name, a=was, b=now, resolution=resolution)


def _unseen(a: Side, b: Side) -> Iterator[str]:
    for side in (a, b):
        if not any(visit.snapshots for visit in side.chosen.run.visits):
            why = "a text log has figures where its engine prints them, and no snapshots" if side.is_logged else ""
            yield f"bytes by account: {why or f'{side.name} has no snapshot'}"
            break
    if a.is_logged != b.is_logged:
        yield "whether figures of an engine and ours mean the same: an engine's are by its own definition"
    for side in (a, b):
        yield from _unseen_of(side)
    alone = [(side, sorted(_only(side, other))) for side, other in ((a, b), (b, a))]
    for side, names in alone:
        if names:
            yield f"figures that only {side.name} tells: {', '.join(names)}"
    if any(each.a is None or each.b is None for each in _changed(a.settings, b.settings)):
        yield "defaults: a setting that one of them does not give may be the same in both"
    yield "whether caches of files and compilers were warm in both: times are compared as they are"


def _only(side: Side, other: Side) -> set[str]:
    return side.verdict.figures.keys() - other.verdict.figures.keys()


def _unseen_of(side: Side) -> Iterator[str]:
    if side.verdict.ranks > 1:
        yield f"other processes of {side.name}: the states of {side.chosen.label} are compared"
    if side.verdict.outcome == "running":
        yield f"how {side.name} ends: it still runs"
    times = [visit.entered_t for visit in side.chosen.run.visits if visit.entered_t]
    if times and all(t % 1_000_000_000 == 0 for t in times):
        yield f"parts of a second in {side.name}: its log has whole ones"
    elif not times:
        yield f"times of {side.name}: what was read has none"


def _finding(ranked: RankedFinding) -> dict[str, Any]:
    finding = ranked.finding
    return {
        "code": finding.code,
        "severity": finding.severity,
        "state": finding.state,
        "part": finding.part,
        "rank": ranked.rank,
        "message": finding.message,
    }
