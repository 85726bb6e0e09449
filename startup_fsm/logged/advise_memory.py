"""Advice on memory that ran out, or was not reserved, after the KV cache was sized: the cache was too large."""

from __future__ import annotations

from typing import Final

from startup_fsm.findings import Advice
from startup_fsm.logged import lengths, places, shares
from startup_fsm.logged.changes import say
from startup_fsm.logged.sizing import GRAPHS, MARGIN, foreign_bytes, is_pinned
from startup_fsm.logged.start import Found, Start
from startup_fsm.memory import MIB, format_bytes

#: What a step that failed at one block may ask for at least.
_LEAST_STEP: Final = 512 * MIB


def graphs_off(start: Start, found: Found) -> list[Advice]:
    """Graphs that were not reserved, or not enough: the same bytes less for the KV cache."""
    by, least = _graphs_room(start, found), _least_graphs(start)
    is_measured, state = start.size("graph_actual_bytes") is not None, start.ending.state
    why = "room for the graphs"
    if start.failure is not None and start.failure.is_oom and state not in ("capture_graphs", None):
        # What failed came after them, and needs its own room too.
        by, why = by + step_bytes(start), f"room for the graphs and for what failed in {state}"
        least = least_bytes(start)
    pinned = shares.pin(start, by, why) if is_measured else []
    lowered = shares.lower(start, by, why, at_least=least)
    # A ready start is told the engine's own number first; one that failed, the knob that it has.
    found_here = [*pinned, *lowered] if start.failure is None else [*lowered, *pinned]
    if found.finding.code == "graphs.not_reserved":
        found_here += _profile_graphs(start)
    if start.failure is None:
        return found_here
    if state != "capture_graphs":
        return [*found_here, *lengths.fewer_sequences(start), *lengths.fewer_graphs(start)]
    return [*found_here, *lengths.fewer_graphs(start), *lengths.no_graphs(start)]


def _graphs_room(start: Start, found: Found) -> int:
    """Bytes that the graphs lack: what was measured, else what was estimated, else room for a usual set."""
    if start.size("graph_actual_bytes") is not None:
        return found.finding.bytes
    oom = None if start.failure is None else start.failure.oom
    tried = 0 if oom is None or oom.tried_bytes is None else oom.tried_bytes
    estimate = start.size("graph_estimate_bytes") or 0
    return max(GRAPHS, 2 * tried, estimate)


def _least_graphs(start: Start) -> int | None:
    """What a capture lacked at least, where only that is known of it."""
    oom = None if start.failure is None else start.failure.oom
    if start.ending.state != "capture_graphs" or oom is None or not oom.tried_bytes:
        return None
    return max(2 * oom.tried_bytes - (oom.free_bytes or 0), MARGIN)


def _profile_graphs(start: Start) -> list[Advice]:
    """Have the engine take its estimate off, where this version can, nobody did, and it is not far too long."""
    estimate, actual = start.size("graph_estimate_bytes"), start.size("graph_actual_bytes")
    if estimate is not None and (estimate <= 0 or (actual is not None and estimate > 2 * actual)):
        return []
    if start.facts.sign("graph_profile_disabled") is None and start.facts.sign("graph_profile_optional") is None:
        return []
    text = "the engine then takes its estimate off before it sizes"
    text += "" if estimate is None else f": {format_bytes(estimate)}"
    return say(start, "graph_estimate", "set", text, to=1)


def estimate_long(start: Start, found: Found) -> list[Advice]:
    """Use what was reserved and not needed."""
    sizing = start.sizing
    if sizing is None:
        return []
    text = f"{format_bytes(found.finding.bytes)} that were reserved for graphs are not needed"
    return shares.raise_(start, sizing.available_bytes + found.finding.bytes, text)


def estimate_negative(start: Start, found: Found) -> list[Advice]:
    """The KV cache without what the estimate gave it."""
    by = found.finding.bytes
    pinned = shares.pin(start, by, "the KV cache without the negative estimate")
    off = say(start, "graph_estimate", "remove", "no estimate is nearer than a negative one", to=0)
    return [*pinned, *off, *shares.lower(start, by, "the negative estimate gave the KV cache too much")]


def estimate_absurd(start: Start, found: Found) -> list[Advice]:
    """Without the estimate there was enough."""
    estimate, left = start.size("graph_estimate_bytes") or 0, start.size("kv_available_bytes")
    actual = start.size("graph_actual_bytes")
    if left is not None and actual is not None:
        to = left + estimate - actual - MARGIN
        text = (
            f"{format_bytes(left)} and the estimate of {format_bytes(estimate)}, less {format_bytes(actual)} of graphs"
        )
        pinned = say(start, "kv_cache_memory_bytes", "set", text, to=to)
        return [*pinned, *say(start, "graph_estimate", "remove", "no estimate is nearer than this one", to=0)]
    text = f"without the estimate of {format_bytes(estimate)} the KV cache gets what it needs"
    if left is not None:
        text = f"without it {format_bytes(left + estimate)} are left for the KV cache and the graphs"
    off = say(start, "graph_estimate", "remove", text, to=0)
    return [*off, *say(start, "kv_cache_memory_bytes", "set", "explicit KV bytes skip the estimate")]


def capture_oom(start: Start, found: Found) -> list[Advice]:
    """A graph does not fit."""
    if start.ending.state == "capture_throwaway":
        # Nothing is sized yet: no share changes what the profile needs.
        skipped = _unprofiled(start, "nothing is captured before sizing")
        return [*lengths.fewer_graphs(start), *skipped, *lengths.no_graphs(start)]
    lowered = shares.lower(start, _graphs_room(start, found), "room for the graphs", at_least=_least_graphs(start))
    return [*lowered, *lengths.fewer_graphs(start), *lengths.no_graphs(start)]


def _unprofiled(start: Start, why: str) -> list[Advice]:
    """A start without the profile of its graphs; with the estimate switched off they are profiled all the same."""
    text = f"explicit KV bytes skip the profile: {why}"
    return say(start, "kv_cache_memory_bytes", "set", text)


def step_oom(start: Start, found: Found) -> list[Advice]:
    """The first real step, or a request, does not fit beside the KV cache."""
    lowered = shares.lower(start, step_bytes(start), "room for the step that failed", at_least=least_bytes(start))
    # The sampler's rows are sequences, whatever the tokens of a step.
    smaller = [] if start.ending.part == "sampler_warmup" else lengths.smaller_step(start)
    return [*lowered, *lengths.fewer_sequences(start), *smaller]


def step_bytes(start: Start) -> int:
    """Bytes that a step lacked that failed at one block."""
    oom = None if start.failure is None else start.failure.oom
    if oom is None or oom.tried_bytes is None:
        return GRAPHS
    return max(_LEAST_STEP, lengths.STEP_BLOCKS * oom.tried_bytes - (oom.free_bytes or 0))


def least_bytes(start: Start) -> int | None:
    """What the allocation that failed lacked, and a margin; None where it does not say."""
    oom = None if start.failure is None else start.failure.oom
    if oom is None or oom.tried_bytes is None or oom.free_bytes is None:
        return None
    return max(0, oom.tried_bytes - oom.free_bytes) + MARGIN


def kv_oom(start: Start, found: Found) -> list[Advice]:
    """The KV cache itself does not fit."""
    if start.ending.state == "bootstrap_kv":
        skipped = [*_unprofiled(start, "no such cache is made"), *lengths.fewer_sequences(start)]
        return [*skipped, *places.who_holds_it(start, "the device was nearly full"), *lengths.no_graphs(start)]
    lowered = shares.lower(start, step_bytes(start), "room beside the KV cache", at_least=least_bytes(start))
    if start.facts.dialect.engine == "sglang":
        return [*lowered, *places.more_devices(start), *places.smaller_weights(start)]
    pinned = [] if is_pinned(start.facts) else shares.pin(start, step_bytes(start), "what the device has")
    return [*lowered, *pinned, *places.more_devices(start)]


def device_oom(start: Start, found: Found) -> list[Advice]:
    """No state of its own: by who holds the device, and whether a KV cache was sized before."""
    if start.is_ready:
        return shares.lower(start, _LEAST_STEP, "room for what runs after sizing")
    is_sized = start.sizing is not None or bool(start.facts.of("gpu_blocks", "kv_tokens", "kv_cache_bytes"))
    if is_sized or start.ending.state in ("serving", "warmup"):
        return step_oom(start, found)
    foreign = foreign_bytes(start.facts)
    held = [*places.smaller_weights(start), *places.more_devices(start)]
    if foreign is not None and foreign > _LEAST_STEP:
        who = places.who_holds_it(start, f"something that is not this process holds {format_bytes(foreign)}")
        return [*who, *held]
    text = "the lines above the error tell in which state it came, and so which way to go"
    return [*held, *places.nothing_to_set(start, text)]


def profile_oom(start: Start, found: Found) -> list[Advice]:
    """The largest step does not fit beside the weights."""
    return [*lengths.fewer_tokens(start), *lengths.fewer_sequences(start), *places.more_devices(start)]
