"""Advice on what was requested and what was charged: raise the share, or shrink what is charged; never the opposite."""

from __future__ import annotations

from startup_fsm.findings import Advice
from startup_fsm.logged import lengths, places, shares
from startup_fsm.logged.advise_memory import step_bytes
from startup_fsm.logged.budget_failures import charged_for_others
from startup_fsm.logged.changes import say
from startup_fsm.logged.sizing import GRAPHS, least_kv, pinned_bytes
from startup_fsm.logged.start import Found, Start
from startup_fsm.memory import format_bytes


def not_enough_free(start: Start, found: Found) -> list[Advice]:
    """Too little was free: who holds it; and where nearly enough is, what is free."""
    other = places.another_device(start, "another device may have what this one lacks")
    why = found.finding.message.partition("; known")[0]
    return [*places.who_holds_it(start, why), *places.only_what_is_free(start), *other]


def weights(start: Start, found: Found) -> list[Advice]:
    """The weights do not fit the device: no share of it helps."""
    missing = found.finding.bytes
    why = "each device then holds a part of the weights"
    why += f"; at least {format_bytes(missing)} are missing" if missing else ""
    draft: list[Advice] = []
    if start.ending.part == "draft_worker_init":
        draft = say(start, "speculative", "remove", "without its draft model it needs no room for one")
    return [*draft, *places.more_devices(start, why), *places.smaller_weights(start), *places.more_stages(start)]


def negative(start: Start, found: Found) -> list[Advice]:
    """Nothing is left: more of the device, or less that is charged."""
    lacks = shares.lacking(start)
    if charged_for_others(start) is not None:
        # What a neighbour took is in the sum: no value can be solved from it.
        return [*places.more_devices(start), *places.smaller_weights(start)]
    least = 0 if start.sizing is None else least_kv(start.sizing)
    why = f"room for a KV cache{_least_fraction(start)}"
    raised = shares.raise_(start, least, why)
    if not raised and start.sizing is not None and start.sizing.available_bytes > 0 and shares.may_rise(start):
        # The engine found less than what was printed explains: another rank, or a term that it does not print.
        raised = say(start, start.facts.dialect.share, "raise", f"{why}, by more than the printed figures explain")
    return [
        *raised,
        *lengths.fewer_tokens(start, lacks),
        *_less_for_graphs(start, lacks),
        *places.more_devices(start, _split(start, "each device then holds a part of the weights")),
        *places.smaller_weights(start),
    ]


def _least_fraction(start: Start) -> str:
    """What the weights alone are of the memory that a fraction is a share of."""
    after, held = start.size("avail_after_load_bytes"), start.size("weights_bytes")
    if start.facts.dialect.engine != "sglang" or not after or held is None or start.sizing is not None:
        return ""
    if (before := after + held) <= 0:
        return ""
    return f"; the weights alone are {held / before:.3f} of what was free before loading"


def _split(start: Start, why: str) -> str:
    missing = shares.missing(start)
    return why if missing is None else f"{why}; at no share does it fit one device: {format_bytes(missing)} are missing"


def _less_for_graphs(start: Start, lacks: int | None) -> list[Advice]:
    """Fewer graphs where those that were taken off would have been enough."""
    kept = start.kept.bytes or 0
    return lengths.fewer_graphs(start) if lacks is not None and kept > lacks > 0 else []


def request(start: Start, found: Found) -> list[Advice]:
    """One longest request does not fit: a shorter one where that is of use, else more room."""
    needed, left = start.size("kv_needed_bytes"), start.size("kv_available_bytes")
    if needed is None and start.sizing is not None:
        needed = start.sizing.request_bytes
    raised = shares.raise_(start, needed or 0, "room for one longest request")
    devices = places.more_devices(start, _split(start, "each device then holds a part of the weights and of the cache"))
    steps = lengths.fewer_tokens(start, needed - left) if needed is not None and left is not None and left > 0 else []
    narrow, shorter = lengths.narrower_numbers(start), lengths.shorter(start)
    if lengths.is_useful(start):
        return [*shorter, *raised, *narrow, *steps, *devices]
    return [*raised, *devices, *steps, *narrow, *_less_for_graphs(start, shares.lacking(start)), *shorter]


def sequences(start: Start, found: Found) -> list[Advice]:
    """Fewer sequences, or more state blocks for them."""
    blocks, admitted, sizing = start.size("mamba_blocks"), start.size("max_num_seqs"), start.sizing
    needed = 0
    if sizing is not None and blocks and admitted is not None:
        needed = sizing.available_bytes * admitted // blocks
    why = "more state blocks" if admitted is None else f"{admitted} state blocks"
    return [*lengths.fewer_sequences(start), *shares.raise_(start, needed, why)]


def pinned(start: Start, found: Found) -> list[Advice]:
    """Explicit KV bytes that leave room."""
    return shares.pin(start, _over_pinned(start), "explicit KV bytes that leave room")


def _over_pinned(start: Start) -> int:
    """Bytes by which explicit KV bytes were too many: what failed, and what would have come after it."""
    state, had = start.ending.state, pinned_bytes(start.facts)
    step = start.size("engine_activation_bytes") or GRAPHS
    if state in ("warmup", "capture_graphs"):
        return max(step_bytes(start), GRAPHS) + step // 2
    held, loaded, free = (start.size(name) for name in ("torch_allocated_bytes", "weights_bytes", "oom_free_bytes"))
    if state == "allocate_kv" and None not in (had, held, loaded, free):
        # What of it was allocated when it failed, and what was free then, is all that it could have.
        room = (held or 0) - (loaded or 0) + (free or 0)
        return (had or 0) - room + GRAPHS + step
    return step_bytes(start)


def overrun(start: Start, found: Found) -> list[Advice]:
    """Back within the request."""
    by = found.finding.bytes
    return [*shares.pin(start, by, "back within the request"), *shares.lower(start, by, "back within the request")]


def unused(start: Start, found: Found) -> list[Advice]:
    """A share that uses what nobody does; or a look at what made the KV cache smaller than it could be."""
    sizing, in_use, left = start.sizing, start.size("kv_cache_bytes"), start.size("kv_available_bytes")
    if sizing is None:
        return []
    if in_use is not None and left is not None and in_use < left:
        text = f"{format_bytes(left)} were available and {format_bytes(in_use)} are in use:"
        return places.nothing_to_set(start, f"{text} another rank, or explicit blocks, decided")
    return shares.raise_(start, sizing.available_bytes + found.finding.bytes, "what nobody uses")


def counted_twice(start: Start, found: Found) -> list[Advice]:
    """The KV cache without a term that cannot be."""
    by = found.finding.bytes
    explicit = shares.pin(start, by, "the KV cache without the negative term")
    return [*explicit, *shares.lower(start, by, "the negative term gave the KV cache too much")]
