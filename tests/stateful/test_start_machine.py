"""
Any sequence of enter, leave, fail, retry and finish: what the file says, what the live start says, and what an
independent model says are one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from startup_fsm.bootstrap import Bootstrap
from startup_fsm.course import OpenState
from startup_fsm.devices.base import Settled
from startup_fsm.devices.costs import Costs
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.errors import EdgeRefused
from startup_fsm.fold import fold
from startup_fsm.journal import read_journal
from startup_fsm.memory import MIB
from startup_fsm.plan import Edge, Plan, eager, observed, single_capture, throwaway
from startup_fsm.states import FAILED, READY, VOCABULARY, State


def tangle() -> Plan:
    """A plan of a user's own: loops, two edges between two states, bounds of every kind."""
    edges = [
        Edge("advance", "a", "b"),
        Edge("advance", "b", "c", bound=2),
        Edge("again", "b", "c", "degrade", bound=1),
        Edge("loop", "c", "b", "degrade"),
        Edge("advance", "c", READY),
        Edge("retry", "b", "a", "recover", 1, ("oom",)),
        Edge("retry_more", "b", "a", "recover", 2, ("raised",)),
        Edge("never", "c", "a", "recover", 0, ("oom",)),
        Edge("rescue", "c", READY, "recover", 1, ("oom",)),
        *(Edge("fail", name, FAILED, "fail") for name in "abc"),
    ]
    return Plan("tangle", [State(name) for name in "abc"], edges)


PLANS: dict[str, Callable[[], Plan]] = {
    "throwaway": lambda: throwaway(retries=2, allow_eager=True),
    "single_capture": lambda: single_capture(retries=1, allow_eager=True),
    "eager": lambda: eager(retries=1),
    "observed": observed,
    "tangle": tangle,
}
STATES = st.sampled_from([*VOCABULARY, "a", "b", "c", READY, FAILED, "nonsense"])


class QuickDevice(SimulatedDevice):
    """Nothing is ever allocated here, so there is nothing to collect."""

    def settle(self, *, clear_workspaces: bool = False) -> Settled:
        return Settled(polls=1, late_return_bytes=0, duration_ns=0, workspaces_cleared=clear_workspaces)


class StartMachine(RuleBasedStateMachine):
    """A real start with a journal on disk, beside a model that knows the edges as a list and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="start-machine-"))
        self.open: OpenState | None = None
        # The model.
        self.here: str | None = None
        self.position = "before"
        self.visits: list[list[object]] = []
        self.taken: Counter[tuple[str, str]] = Counter()

    @initialize(plan=st.sampled_from(sorted(PLANS)))
    def begin(self, plan: str) -> None:
        self.plan = PLANS[plan]()
        device = QuickDevice(256 * MIB, costs=Costs.none())
        self.boot = Bootstrap(plan=self.plan, journal=self.directory, device=device, discover=False, progress=False)

    def way_to(self, target: str) -> Edge | None:
        """The edge that the model would take; a placeholder without a name where a plan has none to take."""
        if self.position in ("open", "ended"):
            return None
        names = [state.name for state in self.plan.states]
        nameless = Edge("", "", target)
        if self.plan.is_free:
            return nameless if target in [*names, READY] else None
        if self.here is None:
            return nameless if target == names[0] else None
        wanted = {"recover", "fail"} if self.position == "failed" else {"advance", "degrade"}
        for edge in self.plan.edges:
            is_left = edge.bound is None or self.taken[edge.source, edge.name] < edge.bound
            if edge.source == self.here and edge.target == target and edge.policy in wanted and is_left:
                return edge
        return None

    def refuses(self, move: Callable[[], object], target: str) -> None:
        """A move that may not be made raises and writes nothing but, at most, the beginning."""
        before = self.written()
        with pytest.raises(EdgeRefused) as caught:
            move()
        assert caught.value.target == target
        assert set(self.written() - before) <= {"run_started"}

    def written(self) -> Counter[str]:
        """Kinds of events in the file."""
        assert self.boot.path is not None
        return Counter(record.kind for record in read_journal(self.boot.path).records)

    @rule(state=STATES)
    def enter(self, state: str) -> None:
        edge = self.way_to(state)
        opening = self.boot.state(state)
        if edge is None or state in (READY, FAILED):
            self.refuses(opening.__enter__, state)
            return
        opening.__enter__()
        self.open = opening
        self.went(edge)

    @precondition(lambda self: self.position in ("before", "left", "failed"))
    @rule(data=st.data())
    def enter_what_may_be_entered(self, data: st.DataObject) -> None:
        """The same, but rarely refused, so that long starts are tried too."""
        names = [state.name for state in self.plan.states if self.way_to(state.name) is not None]
        if names:
            self.enter(data.draw(st.sampled_from(names)))

    def went(self, edge: Edge) -> None:
        source = self.here if edge.name else None
        if edge.name:
            self.taken[edge.source, edge.name] += 1
        count = sum(visit[0] == edge.target for visit in self.visits)
        self.visits.append([edge.target, count + 1, edge.name or None, source, "open"])
        self.here, self.position = edge.target, "open"

    def ended(self, how: str) -> None:
        self.visits[-1][4] = how
        self.position, self.open = how, None

    @precondition(lambda self: self.open is not None)
    @rule()
    def leave(self) -> None:
        assert self.open is not None
        self.open.__exit__(None, None, None)
        self.ended("left")

    @precondition(lambda self: self.open is not None)
    @rule(error=st.sampled_from([RuntimeError("CUDA out of memory."), ValueError("odd"), KeyboardInterrupt()]))
    def fail(self, error: BaseException) -> None:
        assert self.open is not None
        self.open.__exit__(type(error), error, None)
        self.ended("failed")

    @rule()
    def finish(self) -> None:
        if self.way_to(READY) is None:
            self.refuses(self.boot.finish, READY)
        else:
            self.boot.finish()
            self.position = "ended"

    @precondition(lambda self: len(self.visits) > 3)
    @rule()
    def give_up(self) -> None:
        """Declaring a start failed is always possible; a state that is open fails with it."""
        was_open, before = self.open, self.written()
        self.boot.fail("enough")
        if self.position == "ended":
            assert self.written() == before
        if was_open is not None:
            self.ended("failed")
            was_open.__exit__(None, None, None)
        self.position = "ended"

    @invariant()
    def all_three_agree(self) -> None:
        if not hasattr(self, "boot"):
            return
        assert self.boot.path is not None
        journal = read_journal(self.boot.path)
        history = fold(journal.records)
        assert journal.problems == ()
        assert history.violations == []
        assert history == self.boot.history
        assert (history.state, history.position) == (self.here, self.position)
        assert history.edges_taken == +self.taken
        assert [
            [
                visit.state,
                visit.visit,
                visit.edge,
                visit.source,
                "open" if visit.is_open else "left" if visit.left is not None else "failed",
            ]
            for visit in history.visits
        ] == self.visits

    def teardown(self) -> None:
        if hasattr(self, "boot"):
            self.boot.close()
        shutil.rmtree(self.directory)


TestStartMachine = StartMachine.TestCase
TestStartMachine.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
