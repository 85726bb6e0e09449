"""
A journal held against its own plan, and judged again with today's checks. Pure.

Facts are recorded and judgements recomputable: what a check says of an edge is asked again with exactly the history
that the live start had at that edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from startup_fsm import checks
from startup_fsm.errors import ReplayDivergence
from startup_fsm.events import CheckJudged, Record, SnapshotTaken
from startup_fsm.findings import Finding
from startup_fsm.fold import RunState, Violation

#: Checks that are judged before a state ends, or although it failed.
_OF_FAILED = frozenset({"neighbours_still", "ranks_alike"})
#: Check, state, visit.
_Edge = tuple[str, str, int]


@attrs.frozen(kw_only=True)
class Difference:
    """
    A check that says something else today than it said then.

    Attributes:
        check, state, visit: Which check on which edge.
        seq: Of the snapshot that it judges.
        was, now: What it said then and says today; None where it was not, or is not, asked.
    """

    check: str
    state: str
    visit: int
    seq: int
    was: tuple[Finding, ...] | None
    now: tuple[Finding, ...] | None


@attrs.frozen(kw_only=True)
class Replay:
    """
    What came out.

    Attributes:
        history: The fold of all records.
        edges: How many edges were judged again.
        differences: Where today's checks say something else.
        skipped: Probes that did not run, with their reasons: what rests on them cannot be judged.
    """

    history: RunState
    edges: int
    differences: tuple[Difference, ...]
    skipped: Mapping[str, str]

    @property
    def violations(self) -> Sequence[Violation]:
        """What the plan does not allow, in order."""
        return self.history.violations

    @property
    def is_worse(self) -> bool:
        """Whether today's checks find an error that was not found then."""
        return any(
            finding.severity == "error" and finding.code not in {each.code for each in difference.was or ()}
            for difference in self.differences
            for finding in difference.now or ()
        )

    def as_data(self, process: str) -> dict[str, Any]:
        """Plain data, with the label of the process it is about."""
        plan = self.history.plan
        return {
            "process": process,
            "plan": None if plan is None else plan.name,
            "plan_trouble": self.history.plan_trouble,
            "events": self.history.records,
            "edges_judged": self.edges,
            "divergences": [attrs.asdict(violation) for violation in self.violations],
            "differences": [attrs.asdict(difference) for difference in self.differences],
            "skipped_probes": dict(self.skipped),
        }

    def divergence(self) -> ReplayDivergence | None:
        """The first violation as an error; None where journal and plan agree."""
        if self.history.plan_trouble is not None:
            text = f"the plan in the journal is none: {self.history.plan_trouble}"
            return ReplayDivergence(text, expected=(), found="plan", seq=0, hint="no edge of it could be checked")
        if not self.violations:
            return None
        first = self.violations[0]
        text = f"seq {first.seq}: {first.message}"
        if len(self.violations) > 1:
            text += f"; and {len(self.violations) - 1} more"
        hint = "the journal was changed, lost events, or a start went on in mode observe"
        return ReplayDivergence(text, expected=first.expected, found=first.found, seq=first.seq, hint=hint)


def replay(records: Iterable[Record]) -> Replay:
    """Fold records one by one and judge every edge at the point where it was judged."""
    history = RunState()
    now: dict[_Edge, tuple[int, tuple[Finding, ...]]] = {}
    was: dict[_Edge, tuple[int, tuple[Finding, ...]]] = {}
    edges = 0
    for record in records:
        history.apply(record)
        event = record.event
        if isinstance(event, SnapshotTaken) and event.label in ("leave", "fail") and history.current is not None:
            edges += 1
            now.update(_judged(history, record.seq, failed=event.label == "fail"))
        elif isinstance(event, CheckJudged):
            was[event.check, event.state, event.visit] = (record.seq, event.findings)
    skipped = {
        probe: event.skipped
        for visit in history.visits
        for probe, (_, event) in visit.probes.items()
        if event.skipped is not None
    }
    return Replay(history=history, edges=edges, differences=tuple(_differences(was, now)), skipped=skipped)


def _judged(history: RunState, seq: int, *, failed: bool) -> dict[_Edge, tuple[int, tuple[Finding, ...]]]:
    visit = history.current
    if visit is None:
        return {}
    judged = checks.judge(visit, history)
    if failed:
        # Of a state that failed only this is judged: the contracts of one that ended well do not hold there.
        judged = [each for each in judged if each.check.name in _OF_FAILED and each.findings]
    return {(each.check.name, visit.state, visit.visit): (seq, each.findings) for each in judged}


def _differences(
    was: Mapping[_Edge, tuple[int, tuple[Finding, ...]]], now: Mapping[_Edge, tuple[int, tuple[Finding, ...]]]
) -> Iterable[Difference]:
    for edge in sorted(was.keys() | now.keys(), key=lambda edge: (was.get(edge) or now[edge])[0]):
        then, today = was.get(edge), now.get(edge)
        # A check that was not asked and one that held come to the same: nothing was found.
        if _matter(then[1] if then else ()) == _matter(today[1] if today else ()):
            continue
        check, state, visit = edge
        yield Difference(
            check=check,
            state=state,
            visit=visit,
            seq=(today or then or (0, ()))[0],
            was=None if then is None else then[1],
            now=None if today is None else today[1],
        )


def _matter(findings: Iterable[Finding]) -> list[tuple[str, str, str, int]]:
    """What makes two judgements the same, whatever the words."""
    return sorted((each.code, each.severity, each.state or "", each.bytes) for each in findings)
