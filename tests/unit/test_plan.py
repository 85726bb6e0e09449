"""Plans: a wrong one is refused when it is built, a right one goes into a journal and comes back."""

from __future__ import annotations

from typing import Any

import attrs
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from startup_fsm.errors import PlanError
from startup_fsm.plan import PLANS, Edge, Plan, observed, single_capture, throwaway
from startup_fsm.states import FAILED, READY, VOCABULARY, State

A, B, C = State("a"), State("b"), State("c")
SHIPPED = [
    make(**options)
    for name, make in PLANS.items()
    for options in ({}, {"retries": 2}, {"retries": 1, "allow_eager": True})
    if not options or (name != "observed" and (name != "eager" or "allow_eager" not in options))
]


def edge(source: str, target: str, **options: Any) -> Edge:
    """An edge with a name of its own."""
    return Edge(**{"name": f"go_{target}", "source": source, "target": target, **options})


@pytest.mark.parametrize(
    ("states", "edges", "message"),
    [
        ([], [], "has no state"),
        ([A, B], [edge("a", READY)], "state 'b' cannot be reached from 'a'"),
        ([A, B], [edge("a", "b"), edge("a", READY)], "state 'b' is a trap"),
        ([A, B, C], [edge("a", READY), edge("a", "b"), edge("b", "c"), edge("c", "b")], "state 'b' is a trap"),
        ([A], [edge("a", FAILED)], "no way from 'a' to ready"),
        ([A], [], "state 'a' is a trap"),
        ([A, B], [edge("a", READY), edge("a", "b"), edge("b", "a", bound=0)], "state 'b' is a trap"),
        ([A], [edge("a", READY, bound=0), edge("a", FAILED)], "no way from 'a' to ready"),
        ([A, A], [edge("a", READY)], "state 'a' is declared twice"),
        ([A, State(READY)], [edge("a", READY)], "'ready' is an end"),
        ([A], [edge("a", "b")], "names the state 'b', which the plan does not have"),
        ([A], [edge("b", READY)], "names the state 'b', which the plan does not have"),
        ([A], [edge(READY, "a")], "names the state 'ready', which the plan does not have"),
        ([A], [edge("a", READY), edge("a", READY)], "two edges named 'go_ready'"),
        ([A], [edge("a", READY, policy="hope")], "policy 'hope'"),
        ([A], [edge("a", READY, bound=-1)], "bound -1"),
        ([A], [edge("a", READY, bound="1")], "bound '1'"),
        ([A], [edge("a", READY, bound=True)], "bound True"),
        ([A], [edge("a", READY, bound=1.0)], "bound 1.0"),
        ([State("a", deadline_s=0)], [edge("a", READY)], "deadline 0"),
        ([State("a", deadline_s=-1.0)], [edge("a", READY)], "deadline -1.0"),
        ([State("a", deadline_s=float("nan"))], [edge("a", READY)], "deadline nan"),
        ([State("a", deadline_s="5")], [edge("a", READY)], "deadline '5'"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_wrong_plan_is_refused_when_it_is_built(states: list[State], edges: list[Edge], message: str) -> None:
    """Each mistake is one PlanError that names the plan and what is wrong."""
    with pytest.raises(PlanError) as caught:
        Plan("mine", states, edges)
    assert caught.value.message.startswith("plan 'mine': ")
    assert message in caught.value.message


@pytest.mark.parametrize(
    "name", ["", "two words", "1st", "state", "trigger", "model", "initial", "is_a", "may_go", "to_b", "on_enter", "_x"]
)
def test_names_that_transitions_would_take_are_refused(name: str) -> None:
    """An edge becomes an attribute of the library's model, so it may not collide with one."""
    with pytest.raises(PlanError, match="cannot be the name of an edge"):
        Plan("mine", [A], [Edge(name, "a", READY)])


def test_one_name_may_serve_several_states() -> None:
    """Names of edges are unique for their source only."""
    plan = Plan("mine", [A, B], [Edge("advance", "a", "b"), Edge("advance", "b", READY)])
    assert plan.edge("a", "advance") != plan.edge("b", "advance")


@pytest.mark.parametrize("plan", SHIPPED, ids=lambda plan: plan.name)
def test_shipped_plans_hold_what_the_design_says(plan: Plan) -> None:
    """Every shipped plan starts with the device, has states of the vocabulary, and every state may fail."""
    assert plan.start == "init_device"
    assert {state.name for state in plan.states} <= set(VOCABULARY)
    if plan.is_free:
        return
    for state in plan.states:
        onward = plan.onward(state.name)
        assert onward is not None
        assert onward.bound is None
        assert plan.between(state.name, FAILED, failed=True) is not None


def straight(plan: Plan) -> list[str]:
    """States of a start to which nothing happens."""
    here, passed = plan.start, [plan.start]
    while (onward := plan.onward(here)) is not None and onward.target != READY:
        here = onward.target
        passed.append(here)
    return passed


def test_the_usual_way_through_each_plan_is_that_of_the_design() -> None:
    """The table of the design, state by state."""
    assert straight(throwaway()) == [
        "init_device", "load_weights", "profile_activations", "bootstrap_kv", "capture_throwaway", "teardown",
        "size_kv", "allocate_kv", "capture_graphs", "verify",
    ]  # fmt: skip
    assert straight(single_capture()) == [
        "init_device", "load_weights", "profile_activations", "reserve_kv", "capture_graphs", "size_kv", "commit_kv",
        "verify",
    ]  # fmt: skip
    assert straight(PLANS["eager"]()) == [
        "init_device", "load_weights", "profile_activations", "size_kv", "allocate_kv", "verify",
    ]  # fmt: skip
    assert {state.name for state in observed().states} == set(VOCABULARY)


def test_bounds_count_down() -> None:
    """A bound of two allows twice, none allows always, zero never; an unknown edge is never allowed."""
    plan = throwaway(retries=2)
    assert [plan.allows("verify", "shrink", taken=taken) for taken in range(4)] == [True, True, False, False]
    assert plan.allows("verify", "advance", taken=10_000)
    assert not throwaway().allows("verify", "shrink")
    assert not plan.allows("verify", "no_such_edge")
    assert not plan.allows("no_such_state", "advance")
    assert not plan.allows(READY, "advance")


def test_a_retry_answers_only_its_causes() -> None:
    """Running out of memory may be answered by a smaller KV cache; anything else fails."""
    plan = throwaway(retries=1)
    assert plan.recovery("verify", "oom") == plan.edge("verify", "shrink")
    assert plan.recovery("verify", "raised") is None
    assert plan.recovery("load_weights", "oom") is None
    assert plan.recovery("no_such_state", "oom") is None


def test_between_fits_how_the_source_ended() -> None:
    """A state that failed is left by its failure edges only, one that ended well by the others only."""
    plan = throwaway(retries=1)
    assert plan.between("verify", "teardown") is None
    assert plan.between("verify", "teardown", failed=True) == plan.edge("verify", "shrink")
    assert plan.between("verify", READY, failed=True) is None
    assert plan.between(None, "init_device") is None


def test_insert_puts_a_state_in_between() -> None:
    """The new state is advanced to, goes on where the old one did, and may fail; the old plan stays as it was."""
    old = throwaway()
    plan = old.insert(State("autotune", "tune kernels"), after="load_weights")
    assert straight(plan)[1:4] == ["load_weights", "autotune", "profile_activations"]
    assert plan.between("autotune", FAILED, failed=True) is not None
    assert "autotune" not in straight(old)
    assert plan.insert(State("lease"), after="autotune").state("lease") == State("lease")
    assert straight(old.insert(State("last"), after="verify"))[-1] == "last"
    assert [state.name for state in observed().insert(State("lease"), after="init_device").states][1] == "lease"


@pytest.mark.parametrize(("state", "after"), [("x", "no_such_state"), ("verify", "load_weights"), ("ready", "verify")])
def test_insert_refuses_what_makes_no_plan(state: str, after: str) -> None:
    """A place that is not there, a state that is there already, an end."""
    for plan in (throwaway(), observed()):
        with pytest.raises(PlanError):
            plan.insert(State(state), after=after)


def test_deadlines_are_set_by_name() -> None:
    """Only the named states change; a name that is not there, or no deadline at all, is refused."""
    plan = throwaway().with_deadlines({"capture_graphs": 5, "verify": 0.5})
    assert {state.name: state.deadline_s for state in plan.states if state.deadline_s is not None} == {
        "capture_graphs": 5,
        "verify": 0.5,
    }
    assert plan.with_deadlines({}) == plan
    with pytest.raises(PlanError, match="capture_grahps"):
        plan.with_deadlines({"capture_grahps": 5})
    with pytest.raises(PlanError, match="deadline 0"):
        plan.with_deadlines({"verify": 0})


@pytest.mark.parametrize("plan", [*SHIPPED, throwaway().with_deadlines({"verify": 2.5})], ids=lambda plan: plan.name)
def test_a_plan_comes_back_from_a_journal(plan: Plan) -> None:
    """As JSON and back, a plan is the same plan."""
    assert Plan.from_data(orjson.loads(orjson.dumps(plan.as_data()))) == plan
    assert hash(Plan.from_data(plan.as_data())) == hash(plan)


GOOD = throwaway().as_data()


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "plan",
        {},
        {"name": "x"},
        {"name": "x", "states": [], "edges": []},
        GOOD | {"states": "abc"},
        GOOD | {"states": [1]},
        GOOD | {"states": [{}]},
        GOOD | {"states": None},
        GOOD | {"edges": 7},
        GOOD | {"edges": ["x"]},
        GOOD | {"edges": [{"name": "x"}]},
        GOOD | {"edges": [{"name": "x", "source": "init_device", "target": "nowhere"}]},
        GOOD | {"edges": [each | {"bound": "2"} for each in GOOD["edges"]]},
        GOOD | {"edges": [each | {"bound": []} for each in GOOD["edges"]]},
        GOOD | {"edges": [each | {"policy": []} for each in GOOD["edges"]]},
        GOOD | {"edges": [each | {"policy": "exec"} for each in GOOD["edges"]]},
        GOOD | {"edges": [each | {"causes": "oom"} for each in GOOD["edges"]]},
        GOOD | {"edges": [each | {"causes": [1]} for each in GOOD["edges"]]},
        GOOD | {"edges": [each | {"causes": 5} for each in GOOD["edges"]]},
        GOOD | {"states": [each | {"deadline_s": "soon"} for each in GOOD["states"]]},
        GOOD | {"edges": [], "is_free": "false"},
    ],
)
def test_hostile_plans_are_plan_errors(data: Any) -> None:
    """Whatever a journal holds where its plan should be, it is a plan or a PlanError."""
    with pytest.raises(PlanError):
        Plan.from_data(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
PARTS = st.sampled_from(["name", "source", "target", "policy", "bound", "causes", "summary", "deadline_s"])


@given(
    JSON
    | st.fixed_dictionaries(
        {
            "name": JSON,
            "states": JSON | st.lists(st.dictionaries(PARTS, JSON), max_size=3),
            "edges": JSON | st.lists(st.dictionaries(PARTS, JSON), max_size=3),
        },
        optional={"is_free": JSON},
    )
)
def test_no_data_raises_anything_but_plan_errors(data: Any) -> None:
    """From any JSON at all comes a plan that can be drawn and walked, or a PlanError."""
    try:
        plan = Plan.from_data(data)
    except PlanError:
        return
    assert plan.mermaid()
    for state in plan.states:
        for each in plan.edges_from(state.name):
            assert plan.allows(state.name, each.name) in (True, False)


def test_a_drawing_has_every_edge_that_may_be_taken() -> None:
    """Mermaid: the start, every edge with its bound, the ends; what is switched off is left out; a way is marked."""
    plan = throwaway(retries=2)
    lines = plan.mermaid([("init_device", "load_weights")]).splitlines()
    assert lines[:2] == ["stateDiagram-v2", "    [*] --> init_device"]
    assert "    init_device --> load_weights: advance ✓" in lines
    assert "    verify --> teardown: shrink (at most 2)" in lines
    assert lines[-2:] == ["    ready --> [*]", "    failed --> [*]"]
    drawn = len([each for each in plan.edges if each.bound != 0])
    assert len(lines) == drawn + 4
    assert "without_graphs" not in "".join(lines)
    assert "without_graphs" in throwaway().mermaid([("allocate_kv", "verify")])


def test_plans_are_frozen() -> None:
    """What was verified cannot be changed afterwards."""
    plan = throwaway()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        plan.edges = ()  # type: ignore[misc]
    assert isinstance(plan.states, tuple)
