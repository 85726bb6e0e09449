"""
Edges and the graph that they make: which state may follow which, and what may be done about a failure. Pure.

A plan is verified when it is built and written whole into the journal. ``plan.allows(state, edge)`` is the only law:
the guard table of the live machine is built from it, and a journal is verified against it. The plans that are shipped
are in ``plan``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

import attrs

from startup_fsm.errors import PlanError
from startup_fsm.states import ENDS, FAILED, READY, State

#: ``advance`` after a state that ended well; ``degrade`` the same, but doing less than asked; ``recover`` after a
#: failure of one of the edge's ``causes``; ``fail`` after any failure.
Policy = Literal["advance", "degrade", "recover", "fail"]

_POLICIES: Final = get_args(Policy)
_RESERVED: Final = frozenset({"state", "trigger", "model", "initial"})
_RESERVED_PREFIXES: Final = ("_", "is_", "may_", "to_", "on_")


@attrs.frozen
class Edge:
    """
    One way from a state to the next.

    Attributes:
        name: Unique among the edges of its source.
        source, target: States; the target may be an end.
        policy: When it may be taken.
        bound: How often in one attempt; None for any number, 0 for never (declared, but switched off).
        causes: For ``recover``: categories of failure that it answers, such as ``oom``.
    """

    name: str
    source: str
    target: str
    policy: Policy = "advance"
    bound: int | None = None
    causes: tuple[str, ...] = ()


def _states(values: Iterable[State]) -> tuple[State, ...]:
    return tuple(values)


def _edges(values: Iterable[Edge]) -> tuple[Edge, ...]:
    return tuple(values)


@attrs.frozen
class Plan:
    """
    A graph of states with one start and the ends ``ready`` and ``failed``.

    Args:
        name: For people and journals.
        states: The first is the start.
        edges: All of them, failures too.
        is_free: Any state may follow any; for engines that keep control and for imported logs.

    Raises:
        PlanError: A duplicate, an unknown state, an unreachable one, a trap, no way to ``ready``, a bad edge name.
    """

    name: str
    states: tuple[State, ...] = attrs.field(converter=_states)
    edges: tuple[Edge, ...] = attrs.field(converter=_edges, default=())
    is_free: bool = False
    _by_source: Mapping[str, Mapping[str, Edge]] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        by_source: dict[str, dict[str, Edge]] = {state.name: {} for state in self.states}
        for edge in self.edges:
            self._check_edge(edge)
            if edge.source not in by_source or (edge.target not in by_source and edge.target not in ENDS):
                unknown = edge.target if edge.source in by_source else edge.source
                raise self._wrong(f"edge {edge.name!r} names the state {unknown!r}, which the plan does not have")
            if edge.name in by_source[edge.source]:
                raise self._wrong(f"state {edge.source!r} has two edges named {edge.name!r}")
            by_source[edge.source][edge.name] = edge
        object.__setattr__(self, "_by_source", by_source)
        self._verify()

    def _wrong(self, message: str, hint: str | None = None) -> PlanError:
        return PlanError(f"plan {self.name!r}: {message}", hint=hint)

    def _check_edge(self, edge: Edge) -> None:
        # Plans come out of journals too, and nothing is to be trusted there.
        name, bound = edge.name, edge.bound
        if edge.policy not in _POLICIES:
            raise self._wrong(f"edge {name!r} has the policy {edge.policy!r}", f"one of {', '.join(_POLICIES)}")
        if bound is not None and (type(bound) is not int or bound < 0):
            raise self._wrong(f"edge {name!r} has the bound {bound!r}", "a number from 0, or None for any number")
        if not name.isidentifier() or name in _RESERVED or name.startswith(_RESERVED_PREFIXES):
            raise self._wrong(f"{name!r} cannot be the name of an edge", "use a plain word such as advance or retry")

    def _verify(self) -> None:
        names = [state.name for state in self.states]
        if not names:
            raise self._wrong("has no state")
        if twice := {name for name in names if names.count(name) > 1}:
            raise self._wrong(f"state {min(twice)!r} is declared twice")
        if taken := ENDS.intersection(names):
            raise self._wrong(f"{min(taken)!r} is an end, not a state")
        for state in self.states:
            deadline = state.deadline_s
            if deadline is not None and (type(deadline) not in (int, float) or not deadline > 0):
                raise self._wrong(
                    f"state {state.name!r} has the deadline {deadline!r}", "seconds, more than 0, or None"
                )
        if self.is_free:
            return
        reached = self._reach([names[0]], lambda edge: (edge.source, edge.target))
        if missing := [name for name in names if name not in reached]:
            raise self._wrong(
                f"state {missing[0]!r} cannot be reached from {names[0]!r}", "add an edge to it, or drop it"
            )
        ending = self._reach(ENDS, lambda edge: (edge.target, edge.source), is_open=True)
        if traps := [name for name in names if name not in ending]:
            raise self._wrong(
                f"state {traps[0]!r} is a trap: no edge leads from it to an end",
                "add an edge to ready, to failed, or to a state that leads there",
            )
        if names[0] not in self._reach([READY], lambda edge: (edge.target, edge.source), is_open=True):
            raise self._wrong(f"no way from {names[0]!r} to ready", "let the last state have an edge to ready")

    def _reach(
        self, start: Iterable[str], along: Callable[[Edge], tuple[str, str]], *, is_open: bool = False
    ) -> set[str]:
        """States on the way; ``is_open`` leaves out edges that are switched off."""
        edges = [edge for edge in self.edges if not is_open or edge.bound != 0]
        seen, todo = set(start), list(start)
        while todo:
            here = todo.pop()
            for source, target in map(along, edges):
                if source == here and target not in seen:
                    seen.add(target)
                    todo.append(target)
        return seen

    @property
    def start(self) -> str:
        """Name of the first state."""
        return self.states[0].name

    def state(self, name: str) -> State | None:
        """The state of that name, or None."""
        return next((state for state in self.states if state.name == name), None)

    def edges_from(self, source: str) -> tuple[Edge, ...]:
        """Edges that leave a state, in the order they were declared."""
        return tuple(self._by_source.get(source, {}).values())

    def edge(self, source: str, name: str) -> Edge | None:
        """The edge of that name, or None."""
        return self._by_source.get(source, {}).get(name)

    def allows(self, source: str, name: str, *, taken: int = 0) -> bool:
        """Whether ``source`` may be left by the edge ``name`` that was already taken ``taken`` times."""
        edge = self.edge(source, name)
        return edge is not None and (edge.bound is None or taken < edge.bound)

    def between(
        self,
        source: str | None,
        target: str,
        *,
        failed: bool = False,
        taken: Mapping[tuple[str, str], int] = MappingProxyType({}),
    ) -> Edge | None:
        """
        The edge from one state to another that fits how the source ended; None where the plan has none.

        Of several the first that was not ``taken`` (source and name to how often) up to its bound, else the first.
        """
        if source is None:
            return None
        wanted = ("recover", "fail") if failed else ("advance", "degrade")
        fitting = [edge for edge in self.edges_from(source) if edge.target == target and edge.policy in wanted]
        left = (edge for edge in fitting if self.allows(source, edge.name, taken=taken.get((source, edge.name), 0)))
        return next(left, fitting[0] if fitting else None)

    def onward(self, source: str) -> Edge | None:
        """The edge that is taken when a state ends well and nobody asks for less."""
        return next((edge for edge in self.edges_from(source) if edge.policy == "advance"), None)

    def recoveries(self, source: str, cause: str | None = None) -> tuple[Edge, ...]:
        """The edges that answer a failure of that cause (None: of any), first choice first, whatever their bounds."""
        edges = self.edges_from(source)
        return tuple(edge for edge in edges if edge.policy == "recover" and (cause is None or cause in edge.causes))

    def recovery(self, source: str, cause: str) -> Edge | None:
        """The first edge that answers a failure of that cause, whatever its bound."""
        return next(iter(self.recoveries(source, cause)), None)

    def insert(self, state: State, *, after: str) -> Plan:
        """The same plan with one more state: ``after`` advances to it, and it goes on where ``after`` did."""
        names = [each.name for each in self.states]
        if after not in names:
            raise self._wrong(f"cannot insert {state.name!r} after {after!r}, which the plan does not have")
        at = names.index(after) + 1
        if self.is_free:
            return Plan(self.name, (*self.states[:at], state, *self.states[at:]), self.edges, is_free=True)
        old = self.onward(after)
        if old is None:
            raise self._wrong(f"cannot insert {state.name!r}: {after!r} has no advance edge")
        edges = [attrs.evolve(edge, target=state.name) if edge is old else edge for edge in self.edges]
        edges += [Edge("advance", state.name, old.target), Edge("fail", state.name, FAILED, "fail")]
        return Plan(self.name, (*self.states[:at], state, *self.states[at:]), edges, self.is_free)

    def with_deadlines(self, seconds: Mapping[str, float]) -> Plan:
        """The same plan with other deadlines, by state; raises ``PlanError`` for a state that it does not have."""
        if unknown := set(seconds).difference(state.name for state in self.states):
            raise self._wrong(f"a deadline for {min(unknown)!r}, which the plan does not have")
        states = [attrs.evolve(state, deadline_s=seconds.get(state.name, state.deadline_s)) for state in self.states]
        return Plan(self.name, states, self.edges, self.is_free)

    def as_data(self) -> dict[str, Any]:
        """Plain data for the journal."""
        return {
            "name": self.name,
            "is_free": self.is_free,
            "states": [attrs.asdict(state) for state in self.states],
            "edges": [attrs.asdict(edge) | {"causes": list(edge.causes)} for edge in self.edges],
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Plan:
        """
        The plan that a journal holds.

        Raises:
            PlanError: The data is no plan, or a wrong one.
        """
        try:
            states = [
                State(str(each["name"]), str(each.get("summary", "")), each.get("deadline_s"))
                for each in data["states"]
            ]
            edges = [
                Edge(
                    str(each["name"]),
                    str(each["source"]),
                    str(each["target"]),
                    each.get("policy", "advance"),
                    each.get("bound"),
                    _texts(each.get("causes", ())),
                )
                for each in data["edges"]
            ]
            return cls(str(data["name"]), states, edges, is_free=data.get("is_free", False) is True)
        except (KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"the plan in the journal cannot be read: {type(error).__name__}: {error}") from None

    def mermaid(self, taken: Iterable[tuple[str, str]] = ()) -> str:
        """A Mermaid state diagram; edges in ``taken`` (source, target) are drawn with a mark."""
        path = set(taken)
        lines = ["stateDiagram-v2", f"    [*] --> {self.start}"]
        for edge in self.edges:
            if edge.bound == 0 and (edge.source, edge.target) not in path:
                continue
            mark = " ✓" if (edge.source, edge.target) in path else ""
            bound = f" (at most {edge.bound})" if edge.bound is not None else ""
            lines.append(f"    {edge.source} --> {edge.target}: {edge.name}{bound}{mark}")
        lines += ["    ready --> [*]", "    failed --> [*]"]
        return "\n".join(lines)


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, (list, tuple)) or not all(isinstance(each, str) for each in values):
        raise TypeError(f"causes: {values!r} is no list of names")
    return tuple(values)
