"""
How much of the device: the share raised or lowered, or the KV bytes given, by values that are solved from the log.

The direction is the caller's, who knows the state; a value that the numbers refuse is never said.
"""

from __future__ import annotations

import math
from typing import Final

from startup_fsm.findings import Advice, Direction
from startup_fsm.logged.changes import say
from startup_fsm.logged.sizing import MARGIN, corrected_bytes, is_pinned, least_kv, pinned_bytes
from startup_fsm.logged.start import Start
from startup_fsm.memory import format_bytes
from startup_fsm.what_if import Sizing

#: A share from which there is nothing to raise, where the device is not known.
_FULL: Final = 0.97


def lower(start: Start, by: int, why: str, *, at_least: int | None = None) -> list[Advice]:
    """
    Fewer bytes for the KV cache.

    Args:
        start: Whose.
        by: Bytes that are missing, or a guess of them.
        why: One clause.
        at_least: Bytes that are missing at least, where ``by`` is a guess: then as many as one longest request leaves.
    """
    sizing = start.sizing
    if is_pinned(start.facts):
        return pin(start, by, why)
    setting = start.facts.dialect.share
    if _is_unmeasured(start):
        return say(start, setting, "lower", f"{why}; the weights were measured as nothing, so no value follows")
    if sizing is None or not sizing.base_bytes or sizing.share is None:
        return _lower_unsized(start, by, why)
    solved = _lowered(sizing, by)
    # Shares are in thousandths.
    spare = sizing.available_bytes - least_kv(sizing) - 2 * (MARGIN + sizing.resolution_bytes)
    spare -= sizing.base_bytes // 1000
    if solved is None and at_least is not None and at_least <= spare < by:
        by, why = spare, f"{why}, as much as one longest request leaves"
        solved = _lowered(sizing, by)
    if solved is None:
        return []
    to, left = solved
    low = sizing.lowest(least_kv(sizing))
    text = f"{why}: {format_bytes(by)} and {format_bytes(MARGIN)} of margin less, {format_bytes(left)} of KV cache stay"
    interval = None if low is None or low > to else (low, to)
    return say(start, setting, "lower", _with(text, sizing), to=to, leftover=sizing.leftover(to), interval=interval)


def _is_unmeasured(start: Start) -> bool:
    """Whether the engine charged nothing for its weights: then no sum of its terms means anything."""
    return start.size("weights_bytes") == 0


def _lower_unsized(start: Start, by: int, why: str) -> list[Advice]:
    """The same where the log does not say how large the KV cache is."""
    setting = start.facts.dialect.share
    total, asked, share = start.size("total_bytes"), start.size("requested_bytes"), start.facts.get(setting)
    if total is None or total <= 0 or asked is None or share is None:
        return say(start, setting, "lower", f"{why}: at least {format_bytes(by)} less")
    to = max(0, asked - by - MARGIN) * 1000 // total / 1000
    text = f"{why}: {format_bytes(by)} and {format_bytes(MARGIN)} of margin less; the log does not say what it leaves"
    # Half a share less is no answer to a step or a set of graphs.
    return say(start, setting, "lower", text, to=to) if to > share / 2 else []


def _lowered(sizing: Sizing, by: int) -> tuple[float, int] | None:
    """A share in thousandths and what it leaves for the KV cache; None where too little would be left."""
    base, share, high = sizing.base_bytes or 0, sizing.share or 0.0, sizing.highest()
    if base <= 0:
        return None
    asked = math.floor(base * share) - by - MARGIN - sizing.resolution_bytes
    to = max(0, asked) * 1000 // base / 1000
    to = to if high is None else min(to, high)
    left = sizing.at(to) if to > 0 else None
    return None if left is None or to >= share or left < least_kv(sizing) else (to, left)


def raise_(start: Start, kv_bytes: int, why: str) -> list[Advice]:
    """
    More bytes for the KV cache.

    Args:
        start: Whose.
        kv_bytes: What the KV cache needs in all.
        why: One clause.
    """
    sizing, setting = start.sizing, start.facts.dialect.share
    if is_pinned(start.facts):
        return []
    if sizing is None or not sizing.base_bytes or sizing.share is None or _is_unmeasured(start):
        if not may_rise(start):
            return []
        lacks = lacking(start) if sizing is None else kv_bytes - sizing.available_bytes
        more = f": {format_bytes(lacks)} more for the KV cache" if lacks is not None and lacks > 0 else ""
        return say(start, setting, "raise", f"{why}{more}")
    interval = sizing.interval(kv_bytes + MARGIN)
    if interval is None or interval[0] <= sizing.share:
        return []
    to = interval[0]
    text = f"{why}: {format_bytes(sizing.charged_bytes)} are charged and {format_bytes(kv_bytes)} are needed"
    text += f" of {format_bytes(sizing.base_bytes)}"
    return say(start, setting, "raise", _with(text, sizing), to=to, leftover=sizing.leftover(to), interval=interval)


def may_rise(start: Start) -> bool:
    """Whether there is anything left to raise the share to, as far as it is known."""
    share = start.facts.get(start.facts.dialect.share)
    return share is None or share < _FULL


def lacking(start: Start) -> int | None:
    """Bytes that the KV cache lacks of its least; None where nobody can tell."""
    sizing = start.sizing
    if sizing is None:
        needed, left = start.size("kv_needed_bytes"), start.size("kv_available_bytes")
        return None if needed is None or left is None else max(0, needed - left)
    return max(0, least_kv(sizing) - sizing.available_bytes)


def missing(start: Start) -> int | None:
    """Bytes that are short of one longest request at the largest share; None where some share fits, or unknown."""
    sizing = start.sizing
    if sizing is None or sizing.top_bytes is None or not sizing.base_bytes:
        return None
    return sizing.missing(least_kv(sizing)) or None


def pin(start: Start, by: int, why: str) -> list[Advice]:
    """Explicit KV bytes, ``by`` bytes fewer than there were; the engine's own number where the log's figures agree."""
    sizing = start.sizing
    had = start.size("kv_cache_bytes") or corrected_bytes(start.facts)
    had = had or (pinned_bytes(start.facts) if sizing is None else sizing.kv_bytes)
    if had is None or _is_unmeasured(start):
        return []
    fits = had - by
    text = f"{why}: {format_bytes(had)} less {format_bytes(by)}"
    said = start.size("suggested_kv_bytes_requested")
    close = start.facts.dialect.margin_bytes + 2 * MARGIN
    if said is not None and 0 < said <= fits and fits - said <= close:
        to, text = said, f"{why}: {format_bytes(fits)} fit, and the engine suggests {format_bytes(said)}"
    else:
        to = fits - MARGIN
    if to < (0 if sizing is None else least_kv(sizing)):
        return []
    direction: Direction = "lower" if is_pinned(start.facts) else "set"
    return say(start, "kv_cache_memory_bytes", direction, text, to=to, leftover=_left_by_pin(start, to))


def _left_by_pin(start: Start, kv_bytes: int) -> int | None:
    """Bytes of the device that are left to nobody at ready, with so much KV cache."""
    sizing = start.sizing
    if sizing is None or sizing.reachable_bytes is None or sizing.base_bytes is None:
        return None
    return sizing.reachable_bytes - sizing.charged_bytes - kv_bytes - sizing.later_bytes


def _with(text: str, sizing: Sizing) -> str:
    return f"{text} ({'; '.join(sizing.assumed)})" if sizing.assumed else text
