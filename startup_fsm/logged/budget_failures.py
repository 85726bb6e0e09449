"""Failures of the budget and of what it is measured from: too little free, nothing left, a request that is too long."""

from __future__ import annotations

from typing import Final

from startup_fsm.logged.graphs import estimate_is_absurd
from startup_fsm.logged.outcome import Failure
from startup_fsm.logged.start import Found, Start
from startup_fsm.memory import GIB, format_bytes

#: More than this outside torch is not this engine's alone: contexts and communicators of one rank stay below it.
_OUTSIDE: Final = 4 * GIB


def not_enough_free(start: Start, failure: Failure) -> list[Found]:
    """Less was free than the engine requests."""
    free, asked = start.size("free_at_start_bytes"), start.size("requested_bytes")
    text = "less memory was free at start than the engine requests"
    short = 0
    if free is not None and asked is not None:
        short = max(0, asked - free)
        text = f"{format_bytes(free)} were free at start, {format_bytes(asked)} are requested"
        text += f": {format_bytes(short)} are missing"
    total = start.size("total_bytes")
    if total is not None and free is not None:
        text += f"; {format_bytes(total - free)} of {format_bytes(total)} were held before the engine looked"
    return [
        start.found(
            "device.not_enough_free",
            text,
            state=start.ending.state or "init_device",
            part=start.ending.part or "pre_load_check",
            figures=("free_at_start_bytes", "requested_bytes"),
            observed=free,
            expected=asked,
            scope="device",
            bytes=short,
            is_cause=True,
        )
    ]


def external_weights(start: Start, failure: Failure) -> list[Found]:
    """Weights held by another process exceed the request."""
    text = f"weights that are held outside this process exceed what is requested: {failure.first_line}"
    return [start.found("weights.exceed_request", text, state="init_device", is_cause=True)]


def free_moved(start: Start, failure: Failure) -> list[Found]:
    """Free memory grew, or did not fall, while the engine measured."""
    was, now = start.size("initial_free_bytes"), start.size("current_free_bytes")
    used = start.size("initial_used_bytes")
    moved = None if was is None or now is None else now - was
    # On one memory for host and device the host's own frees look like a neighbour's.
    is_unified = start.facts.sign("unified_memory") is not None
    grew = moved is not None and moved > 0
    if moved is None and failure.reason == "free_grew":
        grew = True
    if grew and not is_unified:
        code, text = "device.neighbour_shrank", "another process released memory while the engine measured"
    else:
        code, text = "device.drift", "free memory did not fall while the engine measured, and nobody can be named"
    if moved is not None and was is not None and now is not None:
        text += f": {format_bytes(was)} were free before, {format_bytes(now)} after, {format_bytes(abs(moved))} apart"
    elif used is not None:
        text += f": {format_bytes(used)} were in use before"
    return [
        start.found(
            code,
            f"{text}; it is no shortage",
            state=start.ending.state or "profile_activations",
            figures=("initial_free_bytes", "current_free_bytes", "initial_used_bytes"),
            observed=now,
            expected=was,
            scope="device",
            bytes=abs(moved or 0),
            is_cause=True,
        )
    ]


def no_blocks(start: Start, failure: Failure) -> list[Found]:
    """Nothing is left for the KV cache, or an impossible estimate took it."""
    absurd = estimate_is_absurd(start)
    if absurd is not None:
        return [absurd]
    grown = charged_for_others(start)
    left = nothing_left(start, is_cause=True)
    return [left] if grown is None else [grown, left]


def charged_for_others(start: Start) -> Found | None:
    """Memory outside torch that is not this engine's, and without which something would be left."""
    total, consumed = start.size("total_bytes") or 0, start.size("weights_and_non_torch_bytes")
    outside, weights = start.size("engine_outside_torch_bytes"), start.size("weights_bytes")
    if outside is None and consumed is not None and weights is not None:
        outside = consumed - weights
    left = None if start.sizing is None else start.sizing.available_bytes
    if outside is None or left is None or outside <= max(_OUTSIDE, total // 10) or left + outside - _OUTSIDE <= 0:
        return None
    text = f"{format_bytes(outside)} outside torch are charged, more than contexts and communicators take:"
    return start.found(
        "device.neighbour_grew",
        f"{text} another process took memory while this one measured",
        state="profile_activations",
        figures=("engine_outside_torch_bytes", "weights_and_non_torch_bytes", "weights_bytes"),
        observed=outside,
        scope="device",
        bytes=outside,
        is_cause=True,
    )


def nothing_left(start: Start, *, is_cause: bool = False) -> Found:
    """Nothing is left for the KV cache, or fewer bytes than nothing."""
    left, asked, weights = (start.size(name) for name in ("kv_available_bytes", "requested_bytes", "weights_bytes"))
    tokens = start.size("kv_tokens")
    if left is None and start.sizing is not None:
        left = start.sizing.available_bytes
    code, text = "budget.negative", "nothing is left for the KV cache"
    if weights is not None and asked is not None and weights > asked:
        code = "weights.exceed_request"
        text = f"the weights take {format_bytes(weights)}, {format_bytes(asked)} are requested"
    elif left is not None and left <= 0:
        text += f": {format_bytes(-left)} are missing before the first block"
    elif tokens is not None and tokens <= 0:
        text += f": the engine comes to {tokens} tokens"
    if asked is not None and start.sizing is not None and code == "budget.negative" and start.sizing.terms:
        charged = ", ".join(f"{term.term} {format_bytes(-term.bytes)}" for term in start.sizing.terms)
        text += f"; of {format_bytes(asked)} are taken: {charged}"
    return start.found(
        code,
        text,
        severity="error",
        state=start.ending.state if is_cause and start.ending.state else "size_kv",
        figures=("kv_available_bytes", "kv_tokens", "requested_bytes", "weights_bytes", "engine_activation_bytes"),
        observed=left if left is not None else tokens,
        expected=1,
        bytes=max(0, -(left or 0)),
        is_cause=is_cause,
    )


def request(start: Start, failure: Failure) -> list[Found]:
    """One longest request does not fit."""
    absurd = estimate_is_absurd(start)
    needed, left = start.size("kv_needed_bytes"), start.size("kv_available_bytes")
    longest, fits, tokens = (start.size(name) for name in ("max_model_len", "estimated_max_model_len", "kv_tokens"))
    text = "one longest request needs more KV cache than there is"
    if needed is not None and left is not None:
        text = f"one request of {longest} tokens needs {format_bytes(needed)} of KV cache, there are"
        text += f" {format_bytes(left)}: {format_bytes(needed - left)} are missing"
    elif longest is not None and tokens is not None:
        text = f"one request may have {longest} tokens, the KV cache holds {tokens}"
    if fits is not None:
        text += f"; {fits} tokens would fit"
    found = start.found(
        "budget.request_does_not_fit",
        text,
        state=start.ending.state or "size_kv",
        part="request_fits",
        figures=("kv_needed_bytes", "kv_available_bytes", "max_model_len", "estimated_max_model_len", "kv_tokens"),
        observed=left if left is not None else tokens,
        expected=needed if needed is not None else longest,
        bytes=0 if needed is None or left is None else max(0, needed - left),
        is_cause=True,
    )
    return [found] if absurd is None else [absurd, found]


def sequences(start: Start, failure: Failure) -> list[Found]:
    """A hybrid model has fewer state blocks than sequences."""
    blocks, admitted = start.size("mamba_blocks"), start.size("max_num_seqs")
    text = "there are fewer state blocks than sequences, and every sequence needs one"
    if blocks is not None and admitted is not None:
        text = f"{admitted} sequences are admitted, {blocks} state blocks are there, and every sequence needs one"
    return [
        start.found(
            "budget.sequences_do_not_fit",
            text,
            state=start.ending.state or "size_kv",
            figures=("mamba_blocks", "max_num_seqs"),
            observed=blocks,
            expected=admitted,
            is_cause=True,
        )
    ]
