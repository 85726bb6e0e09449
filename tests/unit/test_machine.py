"""The guard table: the library moves exactly where the plan allows, from where the fold says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from startup_fsm.errors import EdgeRefused, PlanError
from startup_fsm.fold import RunState
from startup_fsm.machine import GuardTable, refused
from startup_fsm.plan import PLANS, Edge, Plan, throwaway
from startup_fsm.states import FAILED, READY, State

NAMES = ["a", "b", "c", "d", "e", "f"]
EDGE_NAMES = ["advance", "fail", "shrink", "retry", "class", "resolve", "get_state", "events"]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A random plan that passes its verification."""
    names = NAMES[: draw(st.integers(1, len(NAMES)))]
    targets = st.sampled_from([*names, READY, FAILED])
    edges: dict[tuple[str, str], Edge] = {}
    for one, two in zip(names, [*names[1:], READY], strict=True):
        edges[one, "advance"] = Edge("advance", one, two)
    for source in names:
        for name in draw(st.lists(st.sampled_from(EDGE_NAMES[1:]), unique=True, max_size=4)):
            policy = draw(st.sampled_from(["advance", "degrade", "recover", "fail"]))
            bound = draw(st.none() | st.integers(0, 3))
            edges[source, name] = Edge(name, source, draw(targets), policy, bound, ("oom",))
    kept = draw(st.permutations(list(edges.values())))
    try:
        return Plan("random", [State(name) for name in names], kept)
    except PlanError as error:  # pragma: no cover - none of these should be wrong
        raise AssertionError(error) from error


@settings(max_examples=60, deadline=None)
@given(plans())
def test_library_and_plan_agree_everywhere(plan: Plan) -> None:
    """For every state, edge and count, transitions moves exactly where ``plan.allows`` says so."""
    table = GuardTable(plan)
    for source in [*NAMES, READY, FAILED, "nowhere"]:
        for name in [*EDGE_NAMES, "no_such_edge", "state", "trigger", "__class__"]:
            for taken in range(5):
                assert table.allows(source, name, taken=taken) == plan.allows(source, name, taken=taken)


@pytest.mark.parametrize("name", [name for name in PLANS if name != "observed"])
def test_library_and_shipped_plans_agree(name: str) -> None:
    """The same for every plan that is shipped, with retries."""
    plan = PLANS[name](retries=2)
    table = GuardTable(plan)
    names = {edge.name for edge in plan.edges}
    for state in plan.states:
        for edge in names:
            for taken in range(4):
                assert table.allows(state.name, edge, taken=taken) == plan.allows(state.name, edge, taken=taken)


def test_a_move_counts_from_the_fold() -> None:
    """How often an edge was taken comes from the history, not from a count of the table."""
    plan = throwaway(retries=1)
    table = GuardTable(plan)
    run = RunState(plan=plan)
    edge = plan.edge("verify", "shrink")
    assert edge is not None
    table.move(run, edge)
    table.move(run, edge)
    run.edges_taken["verify", "shrink"] = 1
    with pytest.raises(EdgeRefused, match="may not be taken again") as caught:
        table.move(run, edge)
    assert caught.value.target == "teardown"


def test_a_refusal_says_what_is_allowed() -> None:
    """Source, target, what may come instead, and a hint; also as attributes."""
    error = refused(RunState(plan=throwaway()), "verify", "too early")
    assert (error.source, error.target, error.allowed) == (None, "verify", ("init_device",))
    assert error.message == "the start -> verify: too early; allowed: init_device"
    assert error.hint is not None
    assert isinstance(error, RuntimeError)
