"""
The sizing of a logged start for questions after it: where memory ran out, what it lacked counts against every answer.

A start that died at a share does not fit at that share, whatever the printed terms add up to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import attrs

from startup_fsm.findings import Change
from startup_fsm.logged.advise import advise
from startup_fsm.logged.start import Start, read_start
from startup_fsm.logged.verdict import ranked
from startup_fsm.sources import Source
from startup_fsm.what_if import Sizing

_PINNED: Final = "kv_cache_memory_bytes"


def sizing_with_what_lacked(sources: Sequence[Source]) -> Sizing | None:
    """How the KV cache was sized, with what an out-of-memory showed on top; None where the log does not come to it."""
    start = read_start(sources)
    sizing = start.sizing
    if sizing is None or start.ending.outcome != "oom":
        return sizing
    lacked = _lacked(start, sizing)
    if not lacked:
        return sizing
    said = "this start ran out of memory, and what it lacked is counted on top of its request"
    return attrs.evolve(sizing, later_bytes=sizing.later_bytes + lacked, assumed=(*sizing.assumed, said))


def _lacked(start: Start, sizing: Sizing) -> int:
    """Bytes between the largest setting that the terms allow and the one that the advice allows."""
    for advice in advise(start, ranked(start)):
        change: Change = advice.changes[0]
        if sizing.pinned_bytes is not None and change.setting == _PINNED and isinstance(change.to, int):
            top = sizing.reachable_bytes
            return 0 if top is None else max(0, top - sizing.later_bytes - sizing.charged_bytes - change.to)
        highest = None if advice.interval is None else advice.interval[1]
        if change.setting == sizing.setting and highest is not None:
            top, base = sizing.top_bytes, sizing.base_bytes
            return 0 if top is None or base is None else max(0, top - math.ceil(base * highest))
    return 0
