"""
What is wrong with a logged start whatever it ended of: terms that cannot be, a budget that is overrun or wasted, ranks
that differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from startup_fsm.findings import Severity
from startup_fsm.logged.budget_failures import nothing_left
from startup_fsm.logged.endings import ended
from startup_fsm.logged.graphs import graphs_judged
from startup_fsm.logged.sizing import corrected_bytes, is_pinned, kv_bytes_of
from startup_fsm.logged.start import Found, Start
from startup_fsm.logged.unevenness import uneven
from startup_fsm.memory import MIB, format_bytes

#: As in ``checks``: what a few pages and the print may hide.
_TOLERANCE: Final = 64 * MIB
#: Unused memory that is worth a warning: more than this, and more than a twentieth of the request.
_UNUSED: Final = 256 * MIB


def broken(start: Start) -> list[Found]:
    """All invariants that a log shows broken, and notes on what it shows besides."""
    found = graphs_judged(start)
    by_graphs = max((each.finding.bytes for each in found if each.finding.severity != "note"), default=0)
    for judge in _JUDGES:
        each = judge(start)
        # What graphs explain is said once.
        if each is not None and (each.finding.code not in _BY_GRAPHS or each.finding.bytes > by_graphs + _TOLERANCE):
            found.append(each)
    return found + ended(start)


_BY_GRAPHS: Final = ("budget.overrun", "budget.unused")


def _outside_is_negative(start: Start) -> Found | None:
    outside = start.size("engine_outside_torch_bytes")
    if outside is None or outside >= -_TOLERANCE:
        return None
    text = f"{format_bytes(outside)} outside torch were charged, which gives the KV cache what there is not"
    return start.found(
        "budget.counted_twice",
        text,
        state="profile_activations",
        figures=("engine_outside_torch_bytes",),
        observed=outside,
        expected=0,
        bytes=-outside,
    )


def _negative_in_print(start: Start) -> Found | None:
    """The engine printed that nothing is left, and the log stops before it said so itself."""
    left, tokens = start.size("kv_available_bytes"), start.size("kv_tokens")
    is_nothing = (left is not None and left <= 0) or (tokens is not None and tokens <= 0)
    failed_of_it = start.failure is not None and start.failure.category == "budget"
    return nothing_left(start, is_cause=True) if is_nothing and not failed_of_it and not start.is_ready else None


def _request_is_longer(start: Start) -> Found | None:
    """A start that serves although one longest request can never fit; SGLang only says so."""
    tokens, longest = start.size("kv_tokens"), start.size("max_model_len")
    if not start.is_ready or tokens is None or longest is None or not 0 < tokens < longest:
        return None
    text = f"the KV cache holds {tokens:,} tokens, fewer than one longest request of {longest:,}"
    return start.found(
        "budget.request_does_not_fit",
        text,
        severity="warning",
        state="size_kv",
        figures=("kv_tokens", "max_model_len"),
        observed=tokens,
        expected=longest,
    )


def _overrun(start: Start) -> Found | None:
    """What stands at ready, measured or term by term, against the request."""
    measured, asked = start.size("used_peak_bytes"), start.size("requested_bytes")
    stands = _stands(start) if measured is None or not start.is_ready else measured
    if stands is None or asked is None:
        return None
    terms = ("requested_bytes", "kv_available_bytes", "weights_bytes", "graph_actual_bytes")
    slack = start.facts.resolution(*(terms if measured is None else terms[:1]))
    over = stands - asked
    if over > _TOLERANCE + slack:
        how = "at ready" if measured is None else "at most, as measured,"
        text = f"the start stands {how} at {format_bytes(stands)}, {format_bytes(over)} above the {format_bytes(asked)}"
        # By its terms alone a start whose KV cache was corrected may have its room already.
        is_known = measured is not None or corrected_bytes(start.facts) is None
        return start.found(
            "budget.overrun",
            f"{text} that were requested",
            severity="warning" if is_known else "note",
            state="verify",
            figures=(
                "requested_bytes",
                "used_peak_bytes",
                "graph_actual_bytes",
                "kv_cache_bytes",
                "kv_available_bytes",
            ),
            observed=stands,
            expected=asked,
            tolerance=_TOLERANCE + slack,
            bytes=over,
        )
    return _unused(start, asked, -over)


def _unused(start: Start, asked: int, under: int) -> Found | None:
    # One poor rank decides for all; the others have room by design.
    if under <= max(_UNUSED, asked // 20) or len(start.facts.labels) > 1 or is_pinned(start.facts):
        return None
    text = f"{format_bytes(under)} of the {format_bytes(asked)} that were requested are used by nobody"
    return start.found(
        "budget.unused",
        text,
        severity="warning",
        state="verify",
        figures=("requested_bytes", "kv_available_bytes"),
        observed=asked - under,
        expected=asked,
        bytes=under,
    )


def _stands(start: Start) -> int | None:
    """Bytes at ready by the engine's own terms; None where one of them was not printed, or it did not come there."""
    graphs = start.size("graph_actual_bytes")
    kv_bytes = kv_bytes_of(start.facts)
    activation = start.size("engine_activation_bytes")
    if not start.is_ready or graphs is None or kv_bytes is None or activation is None:
        return None
    consumed = start.size("weights_and_non_torch_bytes")
    if consumed is None:
        weights, outside = start.size("weights_bytes"), start.size("engine_outside_torch_bytes")
        if weights is None or outside is None:
            return None
        consumed = weights + outside
    elif start.kept.how != "not_taken":
        # Versions that print one sum count an estimate that was taken off as activation too (vllm#57936).
        activation -= max(0, start.kept.bytes or 0)
    return consumed + max(0, activation) + kv_bytes + graphs


def _suggestion_is_wrong(start: Start) -> Found | None:
    """The engine's own suggestion against its own figures."""
    said = start.size("suggested_kv_bytes_requested")
    asked, stands = start.size("requested_bytes"), _stands(start)
    kv_bytes = kv_bytes_of(start.facts)
    if said is None or asked is None or stands is None or kv_bytes is None:
        return None
    fits = kv_bytes - (stands - asked)
    if said > 0 and fits - said <= start.facts.dialect.margin_bytes + 2 * _TOLERANCE:
        return None
    text = f"the engine suggests {format_bytes(said)} of KV cache, and by its own figures {format_bytes(fits)} fit:"
    text += " it takes the graphs off twice (vllm#57936)"
    return start.found(
        "budget.counted_twice",
        text,
        severity="note",
        state="verify",
        figures=("suggested_kv_bytes_requested",),
        observed=said,
        expected=fits,
        bytes=abs(fits - said),
    )


def _autotuner(start: Start) -> Found | None:
    sign = start.facts.sign("autotuner_fell_back")
    if sign is None:
        return None
    count = sign.inputs.get("count", 1)
    text = f"the autotuner ran out of memory {count} times and kept kernels that are not tuned"
    return start.found("device.out_of_memory", text, severity="warning", state="warmup", seen=(sign.seen,))


def _grew_and_went_on(start: Start) -> Found | None:
    sign = start.facts.sign("free_grew_tolerated")
    if sign is None:
        return None
    text = "free memory grew while the engine measured; it went on with what torch had reserved"
    return start.found(
        "device.neighbour_shrank", text, severity="warning", state="profile_activations", seen=(sign.seen,)
    )


def _capped(start: Start) -> Found | None:
    sign = start.facts.sign("capture_sizes_capped")
    if sign is None:
        return None
    text = f"graphs were cut from {sign.inputs.get('from')} to {sign.inputs.get('to')} sequences"
    text += ": there are fewer state blocks than sequences"
    # A capture that fails after it is mostly one of more sequences than there are blocks.
    failed = start.failure is not None and start.failure.category in ("raised", "capture")
    severity: Severity = "error" if failed and start.ending.state == "capture_graphs" else "note"
    return start.found("budget.sequences_do_not_fit", text, severity=severity, state="size_kv", seen=(sign.seen,))


def _shortened(start: Start) -> Found | None:
    sign = start.facts.sign("max_model_len_reduced")
    if sign is None:
        return None
    text = f"the longest request was cut from {sign.inputs.get('from')} to {sign.inputs.get('to')} tokens to fit"
    return start.found("budget.request_does_not_fit", text, severity="note", state="size_kv", seen=(sign.seen,))


def _unified(start: Start) -> Found | None:
    sign = start.facts.sign("unified_memory")
    if sign is None:
        return None
    text = "host and device share one memory: free readings come from unlike sources"
    return start.found("device.unified_memory", text, severity="note", state="init_device", seen=(sign.seen,))


_JUDGES: Final[tuple[Callable[[Start], Found | None], ...]] = (
    _outside_is_negative,
    _negative_in_print,
    _request_is_longer,
    _overrun,
    _suggestion_is_wrong,
    uneven,
    _autotuner,
    _grew_and_went_on,
    _capped,
    _shortened,
    _unified,
)
