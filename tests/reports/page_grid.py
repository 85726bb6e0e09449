"""A thousand budgets, for the formula in Python and in the page."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from startup_fsm.budget import Inputs
from startup_fsm.memory import GIB, MIB

_SHARES = (0.05, 0.3, 0.512, 0.9, 0.999)
_TOTALS = (1_610_612_736, 24 * GIB - 7 * MIB, 80 * GIB, 150_109_880_320)
_GRAPHS = (0, 58_720_256)
#: Explicit KV bytes as a share of the device, a ceiling in blocks, and tokens of one longest request.
_CHOICES = ((None, None, 4_096), (0.3, None, 131_072), (None, 700, 17), (None, None, None), (0.02, 90, 2_000_000))
_BLOCKS = ((2 * MIB, 16), (32_768, 16), (3_145_728, 1), (57_344, 128), (917_504, 32))


Point = tuple[Inputs, dict[str, int | float | None]]


def grid() -> Iterator[Point]:
    """Every combination: small devices and large ones, too little and too much, pinned and capped; as both take it."""
    for number, (share, total, graphs, choice, block) in enumerate(
        itertools.product(_SHARES, _TOTALS, _GRAPHS, _CHOICES, _BLOCKS)
    ):
        pinned, most, longest = choice
        size, tokens = block
        used = 618 * MIB + total // 5
        inputs = Inputs(
            total=total,
            requested=math.floor(total * share),
            used_by_us=used,
            free_settled=total - used - (number % 7) * 11 * MIB,
            free_now=total - used - (number % 5) * 13 * MIB,
            graphs=graphs,
            headroom=(number % 3) * 37 * MIB,
            margin=max(64 * MIB, total // 1000),
            shortfall=(number % 4) * 1_234_567,
            mapped=(number % 2) * 16 * MIB,
            block_bytes=size,
            needed_blocks=None if longest is None else -(-longest // tokens),
            pinned=None if pinned is None else math.floor(total * pinned),
            most_blocks=most,
        )
        yield inputs, _as_table(inputs, share, longest, tokens)


def _as_table(inputs: Inputs, share: float, longest: int | None, tokens: int) -> dict[str, int | float | None]:
    """The share instead of the request, tokens instead of blocks, what can be reached instead of what is free."""
    return {
        "total": inputs.total,
        "utilization": share,
        "explicit": None,
        "reachable": inputs.used_by_us + min(inputs.free_settled, inputs.free_now),
        "used_by_us": inputs.used_by_us,
        "graphs": inputs.graphs,
        "headroom": inputs.headroom,
        "margin": inputs.margin,
        "shortfall": inputs.shortfall,
        "not_mapped": -inputs.mapped,
        "block": inputs.block_bytes,
        "pinned": inputs.pinned,
        "most_blocks": inputs.most_blocks,
        "block_tokens": tokens,
        "longest": longest,
    }
