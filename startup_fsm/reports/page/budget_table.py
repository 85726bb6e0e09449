"""
The budget formula as a table that Python and the page both evaluate, so that they cannot say different things. Pure.

    requested = floor(total x utilization), or explicit
    available = min(requested, reachable) - used by us - graphs - headroom - margin - shortfall + already mapped
    blocks    = the KV cache in whole blocks: of ``available``, or as pinned; at most ``most_blocks``

It is the arithmetic of :func:`startup_fsm.budget.compute`; a test holds the two, and the page, against each other. All
bytes are ints; every step is exact in the doubles of a browser below 2**53.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

#: Name, operation, operands: names of inputs, of earlier steps, or numbers. A missing input is None.
Step = tuple[str, str, tuple[str | int, ...]]

FORMULA: Final[tuple[Step, ...]] = (
    ("asked", "floor_product", ("total", "utilization")),
    ("requested", "first", ("explicit", "asked")),
    ("granted", "least", ("requested", "reachable")),
    ("not_free", "difference", ("granted", "requested")),
    ("available", "difference", ("granted", "used_by_us", "graphs", "headroom", "margin", "shortfall", "not_mapped")),
    ("wanted", "first", ("pinned", "available")),
    ("whole", "floor_quotient", ("wanted", "block")),
    ("positive", "greatest", (0, "whole")),
    ("blocks", "least", ("positive", "most_blocks")),
    ("kv", "product", ("blocks", "block")),
    ("tokens", "product", ("blocks", "block_tokens")),
    ("request_blocks", "ceiling_quotient", ("longest", "block_tokens")),
    ("needed_blocks", "greatest", (1, "request_blocks")),
    ("needed", "product", ("needed_blocks", "block")),
    ("ceiling", "product", ("most_blocks", "block")),
    ("had", "least", ("wanted", "ceiling")),
    ("short", "difference", ("needed", "had")),
    ("fits", "at_least", ("blocks", "needed_blocks")),
    ("missing", "unless", ("fits", "short")),
)

Number = int | float | None


def evaluate(inputs: Mapping[str, Number]) -> dict[str, Number]:
    """
    All steps of the formula by name, after the inputs.

    Args:
        inputs: ``total``, ``utilization`` or ``explicit``, ``reachable``, ``used_by_us``, ``graphs``, ``headroom``,
            ``margin``, ``shortfall``, ``not_mapped`` (already mapped, negative), ``block`` in bytes; ``pinned``,
            ``most_blocks``, ``block_tokens`` and ``longest`` may be None.
    """
    known: dict[str, Number] = dict(inputs)
    for name, operation, operands in FORMULA:
        known[name] = OPERATIONS[operation]([known[each] if isinstance(each, str) else each for each in operands])
    return known


def _given(values: list[Number]) -> list[Any]:
    return [value for value in values if value is not None]


def _all_or_none(of: Callable[..., Any]) -> Callable[[list[Number]], Number]:
    return lambda values: None if None in values else of(*values)


#: What an operation does; one with a missing operand gives None, but for those that choose among what there is.
OPERATIONS: Final[Mapping[str, Callable[[list[Number]], Number]]] = {
    "floor_product": _all_or_none(lambda one, two: math.floor(one * two)),
    "product": _all_or_none(lambda one, two: one * two),
    "difference": _all_or_none(lambda first, *others: first - sum(others)),
    "floor_quotient": _all_or_none(lambda one, two: one // two),
    "ceiling_quotient": _all_or_none(lambda one, two: -(-one // two)),
    "at_least": _all_or_none(lambda one, two: int(one >= two)),
    "unless": _all_or_none(lambda condition, value: 0 if condition else value),
    "first": lambda values: next(iter(_given(values)), None),
    "least": lambda values: min(_given(values), default=None),
    "greatest": lambda values: max(_given(values), default=None),
}
