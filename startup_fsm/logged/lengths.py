"""Lengths, batches and graphs: what a request, a step or a set of graphs may be, solved where it can be."""

from __future__ import annotations

from typing import Final

from startup_fsm.findings import Advice
from startup_fsm.logged.changes import given, number, say
from startup_fsm.logged.sizing import MARGIN
from startup_fsm.logged.start import Start
from startup_fsm.memory import format_bytes

#: A length that is less of what was asked for than this is of no use.
_USEFUL: Final = 0.25
#: One allocation failed; a step that asks for one such block asks for a few more.
STEP_BLOCKS: Final = 4
#: Lengths are given in whole blocks of the KV cache.
_BLOCK: Final = 16


def shorter(start: Start) -> list[Advice]:
    """The longest request that would fit."""
    to, asked = _fitting_length(start), number(start, "max_model_len")
    if to is None or (asked is not None and to >= asked):
        return []
    left = start.size("kv_available_bytes")
    text = f"{to} tokens fit" + ("" if left is None else f" the {format_bytes(left)} of KV cache")
    text += "" if is_useful(start) else f"; that is little of the {asked} that are asked for"
    return say(start, "max_model_len", "lower", text, to=to)


def is_useful(start: Start) -> bool:
    """Whether the length that fits is worth starting for."""
    to, asked = _fitting_length(start), number(start, "max_model_len")
    return to is not None and (asked is None or to >= asked * _USEFUL)


def _fitting_length(start: Start) -> int | None:
    """Tokens of the longest request that fits, by the engine's word or by its figures; None where nobody can tell."""
    said = start.size("estimated_max_model_len")
    if said is not None and said > 0:
        return said
    needed, left, asked = (start.size(name) for name in ("kv_needed_bytes", "kv_available_bytes", "max_model_len"))
    if needed is not None and left is not None and asked is not None and needed > left > 0:
        # The printed digits may hide the last bytes of either.
        left -= start.facts.resolution("kv_available_bytes")
        needed += start.facts.resolution("kv_needed_bytes")
        return max(0, asked * left // needed) // _BLOCK * _BLOCK or None
    tokens = start.size("kv_tokens")
    return tokens if tokens is not None and tokens > 0 else None


def narrower_numbers(start: Start) -> list[Advice]:
    """A KV cache in 8 bit, where it is not yet and that is enough."""
    needed, left = start.size("kv_needed_bytes"), start.size("kv_available_bytes")
    tokens, longest = start.size("kv_tokens"), start.size("max_model_len")
    had = str(given(start, "kv_cache_dtype") or "auto")
    if any(word in had for word in ("8", "4")):
        return []
    if needed is not None and left is not None:
        if (needed + 1) // 2 > left:
            return []
        text = f"in 8 bit one request needs {format_bytes((needed + 1) // 2)} of the {format_bytes(left)}"
    elif tokens is not None and longest is not None:
        if longest > 2 * tokens:
            return []
        text = f"in 8 bit the KV cache holds {2 * tokens} tokens"
    else:
        text = "in 8 bit a token takes half"
    return say(start, "kv_cache_dtype", "set", text, to="fp8")


def fewer_tokens(start: Start, missing: int | None = None) -> list[Advice]:
    """
    Fewer tokens of a step.

    Args:
        start: Whose.
        missing: Bytes that the step must give back; None where nobody knows.
    """
    if start.facts.dialect.engine == "sglang" and start.failure is not None and start.failure.category == "budget":
        # Its pool is sized without a step: fewer tokens give nothing back.
        return []
    setting = "max_num_batched_tokens" if "max_num_batched_tokens" in _flags(start) else "chunked_prefill_size"
    had, charged = number(start, setting), start.size("engine_activation_bytes")
    text = "what a step takes goes by its tokens"
    to = None
    if charged is not None:
        text = f"the largest step is charged {format_bytes(charged)}, and that goes by its tokens"
        if missing is not None and (charged <= missing or charged < MARGIN):
            # Not even a step of nothing would give so much back.
            return []
        if missing is not None and had is not None:
            to = had * (charged - missing) // charged // _BLOCK * _BLOCK or None
    elif had is not None and (solved := _by_failed_step(start, had)) is not None:
        to, text = solved
    if to is None and had is not None:
        to = had // 2 or None
    return say(start, setting, "lower", text, to=to)


def smaller_step(start: Start) -> list[Advice]:
    """Fewer tokens of a step that failed beside the KV cache: as many as what was free would have held."""
    setting = "max_num_batched_tokens" if "max_num_batched_tokens" in _flags(start) else "chunked_prefill_size"
    had, tried, free = number(start, setting), start.size("oom_tried_bytes"), start.size("oom_free_bytes")
    text, to = "what a step takes goes by its tokens", None
    if had is not None and tried and free is not None:
        to = min(had // 2, had * free // (STEP_BLOCKS * tried)) // _BLOCK * _BLOCK or None
        text = f"a step of {had} tokens asks for {format_bytes(tried)} at once, and may for up to {STEP_BLOCKS} such"
        text += f" blocks; {format_bytes(free)} were free"
    return say(start, setting, "lower", text, to=to)


def _by_failed_step(start: Start, tokens: int) -> tuple[int, str] | None:
    """Tokens of a step that fits, from one that did not; None where its figures were not printed."""
    held, tried = start.size("torch_allocated_bytes"), start.size("oom_tried_bytes")
    loaded, total = start.size("weights_bytes"), start.size("requested_bytes") or start.size("total_bytes")
    if held is None or not tried or loaded is None or total is None or held < loaded:
        return None
    # The least that it needs; one that fails in its first layers has seen a quarter of its peak at the worst.
    needed, room = held - loaded + tried, max(0, total - loaded)
    to = tokens * room // (STEP_BLOCKS * needed) // _BLOCK * _BLOCK
    text = f"{tokens} tokens need at least {format_bytes(needed)};"
    text += f" {to} may take a quarter of the {format_bytes(room)} beside the weights"
    return (to, text) if 0 < to < tokens else None


def _flags(start: Start) -> frozenset[str]:
    flags = start.facts.dialect.flags
    return frozenset(flags) if flags else frozenset({"max_num_batched_tokens"})


def fewer_sequences(start: Start) -> list[Advice]:
    """Sequences at once: as many as what was free would have held, or as there are state blocks."""
    blocks, had = start.size("mamba_blocks"), number(start, "max_num_seqs")
    if blocks is not None and blocks > 0 and (had is None or blocks < had):
        return say(start, "max_num_seqs", "lower", f"there are {blocks} state blocks, one for each sequence", to=blocks)
    if start.failure is not None and start.failure.reason == "sequences_do_not_fit":
        return say(start, "max_num_seqs", "lower", "one state block for every sequence")
    rows = start.size("sampler_dummy_requests") or had
    tried, free = start.size("oom_tried_bytes"), start.size("oom_free_bytes")
    text, to = "fewer rows in the largest step", None
    if rows is not None and tried and free is not None:
        to = max(1, min(rows // 2, rows * free // (STEP_BLOCKS * tried)))
        to = to // 8 * 8 or to
        text = f"{rows} rows ask for {format_bytes(tried)} at once, and may for up to {STEP_BLOCKS} such blocks;"
        text += f" {format_bytes(free)} were free"
    elif rows is not None:
        to = max(1, rows // 4)
    if to is not None and had is not None and to >= had:
        return []
    return say(start, "max_num_seqs", "lower", text, to=to)


def fewer_graphs(start: Start) -> list[Advice]:
    """A smaller set of graphs."""
    planned = start.facts.sign("graphs_planned")
    largest = None if planned is None else planned.inputs.get("largest")
    if not isinstance(largest, int):
        largest = number(start, "capture_sizes")
    to = max(1, largest // 2) if isinstance(largest, int) and largest > 1 else None
    text = "fewer and smaller graphs take less memory" + ("" if to is None else f"; the largest had {largest} rows")
    # V0 captures every size up to the sequences at once, and its versions have the flag for the other runner only.
    found = [] if start.facts.runner == "V0" else say(start, "capture_sizes", "lower", text, to=to)
    if found or start.facts.dialect.flags == {}:
        return found
    had = number(start, "max_num_seqs")
    text = "graphs are captured for every size up to the sequences at once"
    return say(start, "max_num_seqs", "lower", text, to=None if had is None else max(1, had // 2))


def no_graphs(start: Start) -> list[Advice]:
    """The last resort."""
    if start.kept.how == "eager":
        return []
    text = "starts without graphs, and decodes slower: the last resort"
    return say(start, "enforce_eager", "set", text, to=True, flag=start.facts.dialect.write("enforce_eager"))
