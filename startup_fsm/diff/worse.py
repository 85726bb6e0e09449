"""
Which of two starts is worse, and what made it so, in one sentence. Pure.

First how they ended, then findings that only one of them has, then bytes of the KV cache, then time. What comes later
counts only where all before it is equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import attrs

from startup_fsm.diff.sides import Side
from startup_fsm.diff.states import StateDifference
from startup_fsm.diff.ties import Tie, ties
from startup_fsm.findings import CODES, SEVERITIES, Finding
from startup_fsm.memory import format_bytes
from startup_fsm.states import position
from startup_fsm.verdict import RankedFinding

Worse = Literal["a", "b"]

#: A KV cache that is smaller by less than this share, or a start that is longer by less, is the same.
_KV_SHARE: Final = 100
_LONGER_SHARE: Final = 5
_LONGER_NS: Final = 1_000_000_000

#: Length of a message in the one sentence, in characters, where it has more than one clause.
_BRIEF: Final = 160

_ENDED: Final = {
    "ready": "is ready",
    "oom": "ran out of memory",
    "error": "failed",
    "hang": "hung",
    "incomplete": "stops without a word",
    "interrupted": "was interrupted",
    "running": "still runs",
}


@attrs.frozen(kw_only=True)
class Explained:
    """
    What made one of two starts worse.

    Attributes:
        worse: Which; None where neither is.
        why: One sentence, the cause first.
        finding: The first finding of the worse one that the other lacks; None where it is no finding.
        ties: What differs and makes it worse, what the numbers show first.
    """

    worse: Worse | None = None
    why: str
    finding: RankedFinding | None = None
    ties: tuple[Tie, ...] = ()


def explain(a: Side, b: Side, states: Sequence[StateDifference], changed: Sequence[str]) -> Explained:
    """
    Which is worse, and why.

    Args:
        a: One start.
        b: The other.
        states: State by state.
        changed: Names of all settings, versions and the like that differ.
    """
    new_a, new_b = lacking(a, b), lacking(b, a)
    order = _order(a, b, new_a, new_b)
    if order:
        better, worse, new = (a, b, new_b) if order > 0 else (b, a, new_a)
        return _by_finding(better, worse, new, changed)
    if not (a.is_ready and b.is_ready):
        return Explained(why=_neither(a, b, new_a, new_b))
    return (
        _by_kv(a, b)
        or _by_time(a, b, states)
        or Explained(
            why="neither is worse: both are ready, and what both tell of findings, KV cache and time weighs the same"
        )
    )


def lacking(side: Side, other: Side) -> tuple[RankedFinding, ...]:
    """
    Findings of one start that the other lacks, or says less gravely; notes are left out.

    Errors come first, since a start fails of an error; then those that the other does not have at all; then the rank.
    """
    graver: dict[tuple[str, str | None], int] = {}
    for each in other.verdict.findings:
        key = (each.finding.code, each.finding.state)
        graver[key] = min(graver.get(key, len(SEVERITIES)), SEVERITIES.index(each.finding.severity))
    found = []
    for each in side.serious:
        said = graver.get((each.finding.code, each.finding.state))
        gravity = SEVERITIES.index(each.finding.severity)
        if said is None or gravity < said:
            found.append((gravity, said is not None, each))
    return tuple(each for _, _, each in sorted(found, key=lambda row: row[:2]))


def _order(a: Side, b: Side, new_a: Sequence[RankedFinding], new_b: Sequence[RankedFinding]) -> int:
    """Above 0 where B is worse, below 0 where A is, 0 where neither is by its end or its findings."""
    if by_end := _gravity(b) - _gravity(a):
        return by_end
    if not a.is_ready and not b.is_ready and (came := _came_to(a) - _came_to(b)):
        return came
    return _worst(new_a) - _worst(new_b)


def _gravity(side: Side) -> int:
    if side.verdict.outcome == "running":
        return 0
    return side.verdict.exit_code


def _came_to(side: Side) -> int:
    state = side.verdict.failed_state
    return -1 if state is None else position(state)


def _worst(findings: Sequence[RankedFinding]) -> int:
    return min((SEVERITIES.index(each.finding.severity) for each in findings), default=len(SEVERITIES))


def ended(side: Side) -> str:
    """How a start ended, in words: ``A ran out of memory in capture_graphs``."""
    verdict = side.verdict
    words = f"{side.name} {_ENDED.get(verdict.outcome, verdict.outcome)}"
    if side.is_ready:
        errors = any(each.finding.severity == "error" for each in verdict.findings)
        return f"{words}, with an error" if errors else words
    return words if verdict.failed_state is None else f"{words} in {verdict.failed_state}"


def _by_finding(better: Side, worse: Side, new: Sequence[RankedFinding], changed: Sequence[str]) -> Explained:
    which = _which(worse)
    if not new:
        text = f"{ended(worse)}, {ended(better)}"
        return Explained(worse=which, why=f"{text}; its findings are the same, {_unexplained(changed)}")
    first = new[0]
    finding = first.finding
    found = ties(better, worse, finding)
    where = "" if finding.state is None else f" in {finding.state}"
    return Explained(
        worse=which, why=f"{finding.code}{where}: {_because(worse, finding, found, changed)}", finding=first, ties=found
    )


def _because(worse: Side, finding: Finding, found: Sequence[Tie], changed: Sequence[str]) -> str:
    if not found:
        return f"{_briefly(finding.message)}; {_unexplained(changed)}"
    first = found[0]
    if not first.bytes:
        return f"{CODES.get(finding.code, finding.message)}; {first.text}, though no number of both shows it"
    # What only one of them gives, and its advice moves, has its part in it: nobody printed the other's default.
    advised = {change.setting for advice in worse.verdict.advice for change in advice.changes}
    guessed = [tie.text for tie in found if not tie.bytes and tie.better is None and tie.name in advised][:1]
    return ", and ".join([first.text, *guessed])


def _briefly(message: str) -> str:
    """The first clauses of a message; all of it stands with the finding."""
    clauses = [clause.strip().rstrip(".") for clause in message.split("; ") if clause.strip()]
    kept = [clause for at, clause in enumerate(clauses) if not at or sum(map(len, clauses[: at + 1])) <= _BRIEF]
    return "; ".join(kept)


def _unexplained(changed: Sequence[str]) -> str:
    if not changed:
        return "no setting, version, plan or device differs"
    names = ", ".join(changed[:3])
    if len(changed) == 1:
        return f"{names} differs, and no number ties it to that"
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"{names}{more} differ, and no number ties any of them to that"


def _neither(a: Side, b: Side, new_a: Sequence[RankedFinding], new_b: Sequence[RankedFinding]) -> str:
    if not new_a and not new_b:
        return f"both end alike: {ended(a)}, {ended(b)}"
    first = [side.serious[0].finding.code if side.serious else "no finding" for side in (a, b)]
    return f"neither is worse: {ended(a)} ({first[0]}), {ended(b)} ({first[1]})"


def _by_kv(a: Side, b: Side) -> Explained | None:
    for name in ("kv_cache_bytes", "kv_available_bytes"):
        was, now = a.size(name), b.size(name)
        if was is None or now is None:
            continue
        if abs(now - was) <= max(a.resolution(name) + b.resolution(name), max(was, now) // _KV_SHARE):
            return None
        better, worse = (a, b) if now < was else (b, a)
        found = ties(better, worse, None)
        text = f"the KV cache is {format_bytes(abs(now - was))} smaller: {format_bytes(min(was, now))},"
        text += f" {format_bytes(max(was, now))} in {better.name}"
        text += f"; {found[0].text}" if found else ""
        return Explained(worse=_which(worse), why=text, ties=found)
    return None


def _by_time(a: Side, b: Side, states: Sequence[StateDifference]) -> Explained | None:
    whole = [sum(each.duration_ns or 0 for each in part if each is not None) for part in _parts(states)]
    longer = whole[1] - whole[0]
    if not min(whole) or abs(longer) <= max(min(whole) // _LONGER_SHARE, _LONGER_NS):
        return None
    better, worse, sign = (a, b, 1) if longer > 0 else (b, a, -1)
    most = max(states, key=lambda each: sign * _took_longer(each))
    text = f"{worse.name} takes {_seconds(max(whole))} in its states, {better.name} {_seconds(min(whole))}:"
    text += f" {most.state} took {_seconds(sign * _took_longer(most))} longer"
    return Explained(worse=_which(worse), why=text)


def _parts(states: Sequence[StateDifference]) -> tuple[list[Any], list[Any]]:
    return [each.a for each in states], [each.b for each in states]


def _took_longer(state: StateDifference) -> int:
    a, b = ((0 if side is None else side.duration_ns or 0) for side in (state.a, state.b))
    return b - a


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.1f} s"


def _which(side: Side) -> Worse:
    return "a" if side.name == "A" else "b"
