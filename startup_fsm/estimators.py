"""
What all graphs will take, from a few that were captured. Pure; all bytes.

Captured largest first, a pool keeps its high-water mark: after the first graph it grows by what stays alive, the
outputs. The driver's part follows the number of nodes, which is nearly the same for every size. Source: the allocator's
notes on CUDA graph capture; vLLM's rule is its model runner's extrapolation, for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import attrs

from startup_fsm.events import GraphCaptured
from startup_fsm.memory import MIB

#: ``all`` captures every size and needs no rule; the others are named after how they go on from the first ones.
Method = Literal["all", "first_plus_outputs", "size_proportional", "linear"]

#: vLLM takes at least this much for a graph.
_LEAST_A_GRAPH: Final = MIB
#: The driver moves in pages; what one graph takes cannot be told from one capture.
_PAGE: Final = 2 * MIB


@attrs.frozen(kw_only=True)
class Captured:
    """
    One captured size.

    Attributes:
        size: Rows.
        pool: Growth of the pool's reserved bytes.
        kept: Bytes that stay alive, such as its output.
        outside: Growth outside torch.
    """

    size: int
    pool: int
    kept: int
    outside: int


def captured(events: Sequence[GraphCaptured]) -> tuple[Captured, ...]:
    """The captures of one visit, as the estimators want them."""
    return tuple(
        Captured(
            size=each.size,
            pool=each.pool_delta_bytes,
            kept=each.kept_bytes,
            outside=each.outside_delta_bytes,
        )
        for each in events
    )


def first_plus_outputs(seen: Sequence[Captured], sizes: Sequence[int]) -> int:
    """The first graph, and the outputs of all others: they are proportional to their rows."""
    first = seen[0]
    rest = sum(sorted(sizes, reverse=True)[1:])
    return first.pool + round(first.kept * rest / first.size)


def size_proportional(seen: Sequence[Captured], sizes: Sequence[int]) -> int:
    """The first graph, and for each other the growth of the second, by rows; of one graph only what it kept."""
    if len(seen) < 2:
        return first_plus_outputs(seen, sizes)
    second = seen[1]
    rest = sum(sorted(sizes, reverse=True)[1:])
    return seen[0].pool + round(second.pool * rest / second.size)


def linear(seen: Sequence[Captured], sizes: Sequence[int]) -> int:
    """The rule of vLLM: the first graph, and for each other as much as the second, at least 1 MiB; driver included."""
    second = seen[1].pool + seen[1].outside if len(seen) > 1 else 0
    return seen[0].pool + seen[0].outside + (len(sizes) - 1) * max(second, _LEAST_A_GRAPH)


RULES: Final[Mapping[Method, Callable[[Sequence[Captured], Sequence[int]], int]]] = {
    "first_plus_outputs": first_plus_outputs,
    "size_proportional": size_proportional,
    "linear": linear,
}


def pool_bytes(method: Method, seen: Sequence[Captured], sizes: Sequence[int]) -> int:
    """
    What the pool of all ``sizes`` will have reserved.

    Args:
        method: ``all`` takes what was seen as it is.
        seen: Captured sizes, largest first; at least one.
        sizes: All sizes.
    """
    if method == "all" or len(seen) >= len(sizes):
        return sum(each.pool for each in seen)
    return RULES[method](seen, sizes)


def total(method: Method, seen: Sequence[Captured], sizes: Sequence[int], returned: int) -> int:
    """
    All that the graphs of ``sizes`` will take beyond what has stayed since ``seen`` were captured.

    What came back beyond the pool (a workspace of the capture stream) comes once. The driver keeps what graphs took
    from it and uses it again, so only graphs that were not captured yet take more, each as much as the later ones did.
    """
    if len(seen) >= len(sizes):
        return returned
    if method == "linear":
        # Its own definition counts the driver's part with each graph.
        return linear(seen, sizes)
    once = max(0, returned - sum(each.pool for each in seen))
    return pool_bytes(method, seen, sizes) + once + _driver_bytes(seen) * (len(sizes) - len(seen))


def _driver_bytes(seen: Sequence[Captured]) -> int:
    """Of one more graph; the first also loads code, so it does not count."""
    later = [max(0, each.outside) for each in seen[1:]]
    return sum(later) // len(later) if later else _PAGE


def every_rule(seen: Sequence[Captured], sizes: Sequence[int], actual: int) -> dict[str, int]:
    """What each rule says of the pool from the first one or two graphs; what is no pool is as it was."""
    said: dict[str, int] = {"all": actual}
    if not seen:
        return said
    beside = max(0, actual - sum(each.pool for each in seen))
    for method, rule in RULES.items():
        few = seen[: 1 if method == "first_plus_outputs" else 2]
        said[method] = rule(few, sizes) + (0 if method == "linear" else beside)
    return said
