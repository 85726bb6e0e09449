"""
The plans that are shipped, and the names of their edges that a drive has to know. Pure.

What answers a failure stands in the order in which it is tried, least loss first: a smaller KV cache, fewer capture
sizes, no graphs. Each must be asked for, and has a bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from startup_fsm.edges import Edge, Plan, Policy
from startup_fsm.errors import PlanError
from startup_fsm.states import FAILED, READY, VOCABULARY, State

__all__ = [
    "CAPTURE_AGAIN",
    "FEWER_SIZES",
    "MEASURE_AGAIN",
    "NO_GRAPHS",
    "PLANS",
    "WITHOUT_ARENA",
    "WITHOUT_GRAPHS",
    "Edge",
    "Plan",
    "Policy",
    "driven",
    "eager",
    "observed",
    "single_capture",
    "throwaway",
]

#: Edges of a start that wanted virtual memory and goes on without it.
WITHOUT_ARENA: Final = "without_arena"
#: Edges of a start whose graphs could not be captured and that may go on without.
WITHOUT_GRAPHS: Final = "without_graphs"
#: Edges that answer memory which ran out with fewer capture sizes, and the two ways on to capture those.
FEWER_SIZES: Final = "fewer_sizes"
MEASURE_AGAIN: Final = "measure_again"
CAPTURE_AGAIN: Final = "capture_again"
#: Edges that answer it, when nothing else is left, by giving up the graphs.
NO_GRAPHS: Final = "no_graphs"


def _line(names: Iterable[str]) -> tuple[list[State], list[Edge]]:
    states = [State.named(name) for name in names]
    edges = [Edge("advance", one.name, two.name) for one, two in itertools.pairwise(states)]
    edges.append(Edge("advance", states[-1].name, READY))
    return states, edges


def _failures(states: Iterable[State]) -> list[Edge]:
    return [Edge("fail", state.name, FAILED, "fail") for state in states]


def _after_capture(source: str, retries: int, fewer_sizes: int, eager: int) -> list[Edge]:
    """The whole ladder for a step that ran out after capture: every rung frees memory for it."""
    return [
        Edge("shrink", source, "teardown", "recover", retries, ("oom",)),
        Edge(FEWER_SIZES, source, "teardown", "recover", fewer_sizes, ("oom",)),
        Edge(NO_GRAPHS, source, "teardown", "recover", eager, ("oom",)),
    ]


def throwaway(*, retries: int = 0, allow_eager: bool = False, fewer_sizes: int = 0) -> Plan:
    """
    Capture throwaway graphs, measure what they take, tear down, size the KV cache, capture for real.

    Args:
        retries: How often a start that ran out of memory after sizing may go back and size a smaller KV cache.
        allow_eager: Whether a start that ran out of these, or whose throwaway capture failed, may go on without graphs.
        fewer_sizes: How often one may go back and capture fewer sizes.
    """
    names = [
        "init_device", "load_weights", "profile_activations", "bootstrap_kv", "capture_throwaway", "teardown",
        "size_kv", "allocate_kv", "capture_graphs", "verify",
    ]  # fmt: skip
    states, edges = _line(names)
    states.insert(5, State.named("recover_allocator"))
    eager = 1 if allow_eager else 0
    edges += [
        Edge(FEWER_SIZES, "capture_throwaway", "recover_allocator", "recover", fewer_sizes, ("oom",)),
        Edge("recover", "capture_throwaway", "recover_allocator", "recover", eager, ("oom", "capture")),
        Edge("recover", "capture_graphs", "recover_allocator", "recover", retries, ("oom",)),
        Edge(FEWER_SIZES, "capture_graphs", "recover_allocator", "recover", fewer_sizes, ("oom",)),
        Edge(NO_GRAPHS, "capture_graphs", "recover_allocator", "recover", eager, ("oom", "capture")),
        Edge("advance", "recover_allocator", "teardown"),
        Edge("shrink", "allocate_kv", "teardown", "recover", retries, ("oom",)),
        *_after_capture("verify", retries, fewer_sizes, eager),
        Edge(MEASURE_AGAIN, "teardown", "bootstrap_kv", "degrade", None if fewer_sizes else 0),
        Edge(WITHOUT_GRAPHS, "allocate_kv", "verify", "degrade", None if allow_eager else 0),
    ]
    return Plan("throwaway", states, edges + _failures(states))


def single_capture(*, retries: int = 0, allow_eager: bool = False, fewer_sizes: int = 0) -> Plan:
    """
    Capture once against a KV range of which only a prefix is mapped; size and map the rest afterwards.

    Where the device has no virtual memory the start goes on as :func:`throwaway` does, by the edges ``without_arena``.

    Args:
        retries: As for :func:`throwaway`; here the arena is given back and the start begins again at reserving it.
        allow_eager: Whether a start whose capture failed may go on without graphs.
        fewer_sizes: How often one may go back and capture fewer sizes.
    """
    names = [
        "init_device", "load_weights", "profile_activations", "reserve_kv", "capture_graphs", "size_kv", "commit_kv",
        "verify",
    ]  # fmt: skip
    states, edges = _line(names)
    others = ("bootstrap_kv", "capture_throwaway", "recover_allocator", "teardown", "allocate_kv")
    states += [State.named(name) for name in others]
    eager = 1 if allow_eager else 0
    edges += [
        Edge(FEWER_SIZES, "capture_graphs", "recover_allocator", "recover", fewer_sizes, ("oom",)),
        Edge("recover", "capture_graphs", "recover_allocator", "recover", eager, ("oom", "capture")),
        Edge("advance", "recover_allocator", "size_kv"),
        Edge(CAPTURE_AGAIN, "recover_allocator", "capture_graphs", "degrade", None if fewer_sizes else 0),
        Edge("shrink", "commit_kv", "teardown", "recover", retries, ("oom",)),
        *_after_capture("verify", retries, fewer_sizes, eager),
        Edge("advance", "teardown", "reserve_kv"),
        Edge(WITHOUT_ARENA, "reserve_kv", "bootstrap_kv", "recover", 1, ("unsupported",)),
        Edge("advance", "bootstrap_kv", "capture_throwaway"),
        Edge("advance", "capture_throwaway", "teardown"),
        Edge(FEWER_SIZES, "capture_throwaway", "recover_allocator", "recover", fewer_sizes, ("oom",)),
        Edge("recover", "capture_throwaway", "recover_allocator", "recover", eager, ("oom", "capture")),
        Edge(MEASURE_AGAIN, "teardown", "bootstrap_kv", "degrade", None if fewer_sizes else 0),
        Edge(WITHOUT_ARENA, "recover_allocator", "teardown", "degrade"),
        Edge(WITHOUT_ARENA, "teardown", "size_kv", "degrade"),
        Edge(WITHOUT_ARENA, "size_kv", "allocate_kv", "degrade"),
        Edge("advance", "allocate_kv", "capture_graphs"),
        Edge(WITHOUT_GRAPHS, "reserve_kv", "size_kv", "degrade", None if allow_eager else 0),
        Edge(WITHOUT_GRAPHS, "allocate_kv", "verify", "degrade", None if allow_eager else 0),
        Edge("shrink", "allocate_kv", "teardown", "recover", retries, ("oom",)),
        Edge(WITHOUT_ARENA, "capture_graphs", "verify", "degrade"),
    ]
    return Plan("single_capture", states, edges + _failures(states))


def eager(*, retries: int = 0) -> Plan:
    """No graphs. ``retries`` as for :func:`throwaway`."""
    names = ["init_device", "load_weights", "profile_activations", "size_kv", "allocate_kv", "verify"]
    states, edges = _line(names)
    states.append(State.named("teardown"))
    edges += [
        Edge("shrink", "allocate_kv", "teardown", "recover", retries, ("oom",)),
        Edge("shrink", "verify", "teardown", "recover", retries, ("oom",)),
        Edge("advance", "teardown", "size_kv"),
    ]
    return Plan("eager", states, edges + _failures(states))


def observed() -> Plan:
    """Any order, the whole vocabulary: imported logs, and engines that keep control."""
    return Plan("observed", [State.named(name) for name in VOCABULARY], (), is_free=True)


#: Plans by name.
PLANS: Final[Mapping[str, Callable[..., Plan]]] = {
    "throwaway": throwaway,
    "single_capture": single_capture,
    "eager": eager,
    "observed": observed,
}


def driven(name: str, *, retries: int = 0, allow_eager: bool = False, fewer_sizes: int = 0) -> Plan:
    """
    A shipped plan that an engine can be driven through, by name.

    Raises:
        PlanError: There is none of that name.
    """
    names = [each for each in PLANS if each != "observed"]
    if name not in names:
        raise PlanError(f"plan: {name!r} is none of {', '.join(names)}", hint="startup-fsm plan lists them")
    if name == "eager":
        return PLANS[name](retries=retries)
    return PLANS[name](retries=retries, allow_eager=allow_eager, fewer_sizes=fewer_sizes)
