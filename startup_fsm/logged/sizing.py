"""How the KV cache of a logged start was sized: the terms of its budget, as far as they were printed or follow."""

from __future__ import annotations

from typing import Final, Literal

import attrs

from startup_fsm.events import BudgetTerm
from startup_fsm.logged.facts import Facts, Noticed, Seen
from startup_fsm.memory import GIB, MIB, format_bytes
from startup_fsm.what_if import Sizing

#: Kept beside a value that was solved from printed digits.
MARGIN: Final = 64 * MIB
#: What a CUDA context and its libraries take before an engine looks first, where it did not say: H200, one rank.
CONTEXT: Final = 512 * MIB
#: Room for graphs that nobody measured, and for what a fraction must leave beside the pool.
GRAPHS: Final = GIB
#: Two readings that agree within this are one.
_SAME: Final = 16 * MIB
#: Fewer bytes than this are no KV cache, where nobody says what one request takes.
_LEAST_KV: Final = 256 * MIB

_TERMS: Final = {
    "weights_and_non_torch_bytes": "consumed",
    "weights_bytes": "weights",
    "engine_outside_torch_bytes": "outside_torch",
    "engine_activation_bytes": "activation",
}


@attrs.frozen(kw_only=True)
class Reserved:
    """
    What was taken off for graphs before the KV cache was sized.

    Attributes:
        bytes: None where nobody can tell.
        why: In words, for findings.
        how: ``eager``: no graphs at all; ``taken``, ``not_taken``, or ``unknown``.
        seen: What says so.
    """

    bytes: int | None = None
    why: str = ""
    how: Literal["eager", "taken", "not_taken", "unknown"] = "unknown"
    seen: tuple[Seen, ...] = ()


def reserved(facts: Facts) -> Reserved:
    """What was reserved for the graphs, and how that is known."""
    estimate = facts.size("graph_estimate_bytes")
    seen = facts.of("graph_estimate_bytes")
    skipped = facts.sign("graphs_skipped")
    if skipped is not None or facts.knob("enforce_eager") is True:
        return Reserved(bytes=0, why="no graphs are captured", how="eager", seen=_seen(skipped))
    for name, why in _SWITCHED_OFF.items():
        if (sign := facts.sign(name)) is not None:
            return Reserved(bytes=0, why=why, how="not_taken", seen=(*_seen(sign), *seen))
    if is_pinned(facts):
        return Reserved(bytes=0, why="the KV bytes were given, so nothing was measured", how="not_taken")
    if facts.sign("graph_profile_enabled") is not None and estimate is not None:
        return Reserved(bytes=estimate, why="the estimate was taken off", how="taken", seen=seen)
    how = facts.dialect.reserves(facts.runner)
    if how in ("no", "opt_in"):
        which = facts.runner or "the default"
        why = f"the {which} runner of this version takes nothing off for its graphs"
        return Reserved(bytes=0, why=why, how="not_taken", seen=seen)
    return _by_arithmetic(facts, estimate, seen, is_usual=how == "yes")


def _by_arithmetic(facts: Facts, estimate: int | None, seen: tuple[Seen, ...], *, is_usual: bool) -> Reserved:
    """What the terms leave over is what was taken off for graphs."""
    over = _left_over(facts)
    if estimate is not None:
        if over is not None and not is_usual and abs(over) <= _SAME < abs(estimate):
            return Reserved(bytes=0, why="the terms add up without the estimate", how="not_taken", seen=seen)
        return Reserved(bytes=estimate, why="the estimate was taken off", how="taken", seen=seen)
    if facts.dialect.engine == "sglang" or is_usual:
        return Reserved()
    sized = facts.of("kv_available_bytes", "gpu_blocks", "kv_tokens")
    if sized and (over is None or abs(over) <= _SAME):
        return Reserved(bytes=0, why="no estimate was printed before the sizing", how="not_taken", seen=sized)
    return Reserved()


def _left_over(facts: Facts) -> int | None:
    names = ("weights_bytes", "engine_activation_bytes", "engine_outside_torch_bytes", "kv_available_bytes")
    parts = [facts.size(name) for name in names]
    asked = facts.size("requested_bytes")
    # Where the engine prints one sum of weights and the rest, its activation may hold the estimate already.
    if asked is None or facts.get("weights_and_non_torch_bytes") is not None:
        return None
    known = [part for part in parts if part is not None]
    return asked - sum(known) if len(known) == len(names) else None


def is_pinned(facts: Facts) -> bool:
    """Whether the KV bytes were explicit."""
    given = facts.knob("kv_cache_memory_bytes")
    return facts.sign("kv_pinned") is not None or isinstance(given, int)


def pinned_bytes(facts: Facts) -> int | None:
    """The explicit KV bytes; None where there are none, or nobody said them."""
    given = facts.knob("kv_cache_memory_bytes")
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    plan = facts.sign("startup_plan_applied")
    planned = None if plan is None else plan.inputs.get("kv_cache_memory_bytes")
    if isinstance(planned, int):
        return planned
    return facts.size("kv_cache_bytes") if facts.sign("kv_pinned") is not None else None


def corrected_bytes(facts: Facts) -> int | None:
    """What a plugin of ours gave the KV cache instead of what the engine had sized; None where it did not."""
    sign = facts.sign("kv_corrected")
    wanted = None if sign is None else sign.inputs.get("wanted_bytes")
    return wanted if isinstance(wanted, int) else None


def kv_bytes_of(facts: Facts) -> int | None:
    """The KV cache as it is in use, was corrected, or was available, whichever is known first; None for none."""
    in_use = facts.size("kv_cache_bytes")
    known = in_use if in_use is not None else corrected_bytes(facts)
    return facts.size("kv_available_bytes") if known is None else known


def foreign_bytes(facts: Facts) -> int | None:
    """Bytes of the device that somebody else has, by the out-of-memory sentence; None where it does not tell."""
    total, own, free = (facts.size(name) for name in ("total_bytes", "process_bytes", "oom_free_bytes"))
    return None if total is None or own is None or free is None else max(0, total - own - free)


def sizing_of(facts: Facts, kept: Reserved) -> Sizing | None:
    """How the KV cache was sized; None where the log does not come to it, or says too little."""
    return _by_fraction(facts) if facts.dialect.share == "mem_fraction_static" else _by_utilization(facts, kept)


def _by_utilization(facts: Facts, kept: Reserved) -> Sizing | None:
    asked, total = facts.size("requested_bytes"), facts.size("total_bytes")
    named = [
        BudgetTerm(term=term, bytes=-size, source="printed")
        for figure, term in _TERMS.items()
        if (size := facts.size(figure)) is not None
        and not (figure in ("weights_bytes", "engine_outside_torch_bytes") and _has_sum(facts))
    ]
    if kept.how == "taken" and kept.bytes:
        named.append(BudgetTerm(term="graphs", bytes=-kept.bytes, source="estimate"))
    # What is in use is what the scheduler gave all ranks; what was available comes before that.
    available = facts.size("kv_available_bytes")
    if available is None:
        available = facts.size("kv_cache_bytes")
    itemised = {term.term for term in named}
    if available is None and asked is not None and ("consumed" in itemised or {"weights", "activation"} <= itemised):
        available = asked + sum(term.bytes for term in named)
    if available is None:
        return None
    if (
        asked is not None
        and abs(rest := asked + sum(term.bytes for term in named) - available) > _SAME
        and _is_budget(facts)
    ):
        named.append(BudgetTerm(term="not itemised", bytes=-rest, source="inferred"))
    later, assumed = _later(facts, kept)
    share = facts.get("gpu_memory_utilization")
    reachable, guess = _reachable(facts, total)
    return Sizing(
        share=None if share is None else float(share),
        base_bytes=total if asked is not None else None,
        terms=tuple(named),
        available_bytes=available,
        reachable_bytes=reachable,
        later_bytes=later,
        pinned_bytes=pinned_bytes(facts) if is_pinned(facts) else None,
        tokens=facts.size("kv_tokens"),
        needed_bytes=facts.size("kv_needed_bytes"),
        longest_tokens=facts.size("max_model_len"),
        resolution_bytes=facts.resolution("requested_bytes", "kv_available_bytes"),
        settings=facts.settings(),
        assumed=tuple(text for text in (assumed, guess) if text),
    )


def _has_sum(facts: Facts) -> bool:
    return facts.get("weights_and_non_torch_bytes") is not None


def _is_budget(facts: Facts) -> bool:
    """Whether the KV bytes are what the request left, and not given."""
    override = facts.sign("blocks_overridden")
    # From nothing is from before anything was sized: the small cache that graphs are profiled with.
    return not is_pinned(facts) and (override is None or override.inputs.get("from") == 0)


def _later(facts: Facts, kept: Reserved) -> tuple[int, str]:
    """What comes on top of the request after sizing, and what that takes for granted."""
    actual, estimate = facts.size("graph_actual_bytes"), facts.size("graph_estimate_bytes")
    if kept.how == "eager":
        return 0, ""
    if actual is not None:
        return max(0, actual - (kept.bytes or 0)), ""
    if kept.how == "not_taken":
        if estimate is not None and estimate > 0:
            return estimate, f"graphs take what was estimated for them, {format_bytes(estimate)}"
        return 0, "graphs come on top of the request, and nobody measured them"
    return 0, ""


def _reachable(facts: Facts, total: int | None) -> tuple[int | None, str]:
    free = facts.size("free_at_start_bytes")
    if free is not None:
        return free, ""
    if total is None:
        return None, ""
    others = foreign_bytes(facts) or 0
    text = f"{format_bytes(CONTEXT)} of context come on top of the request, and nobody else takes more than is known"
    return total - CONTEXT - others, text


def _by_fraction(facts: Facts) -> Sizing | None:
    after, weights = facts.size("avail_after_load_bytes"), facts.size("weights_bytes")
    if after is None or weights is None:
        return None
    base = after + weights
    if base <= 0:
        return None
    share = facts.get("mem_fraction_static")
    kv_bytes = facts.size("kv_cache_bytes")
    assumed = [f"{format_bytes(base)} were free before loading: what was free after it, and the weights"]
    if share is None and kv_bytes is not None:
        share = round(1 - (after - kv_bytes) / base, 3)
        assumed.append("the fraction is what would give this pool")
    available = kv_bytes
    if available is None:
        if share is None:
            return None
        available = round(base * share) - weights
    later = _beside_the_pool(facts)
    if later is None:
        later = max(GRAPHS, base // 32)
        assumed.append(f"graphs and steps need {format_bytes(later)} beside the pool, which nobody measured")
    return Sizing(
        setting="mem_fraction_static",
        share=None if share is None else float(share),
        base_bytes=base,
        terms=(BudgetTerm(term="weights", bytes=-weights, source="printed"),),
        available_bytes=available,
        reachable_bytes=base,
        later_bytes=later,
        tokens=facts.size("kv_tokens"),
        longest_tokens=facts.size("max_model_len"),
        resolution_bytes=facts.resolution("avail_after_load_bytes", "weights_bytes", "k_bytes", "v_bytes"),
        settings=facts.settings(),
        assumed=tuple(assumed),
    )


def _beside_the_pool(facts: Facts) -> int | None:
    """What was taken between the pool and the end; None where the log does not come to it."""
    pool, end = facts.size("avail_after_pool_bytes"), facts.size("avail_after_capture_bytes")
    return None if pool is None or end is None else max(0, pool - end) + GRAPHS


def least_kv(sizing: Sizing) -> int:
    """Bytes of KV cache without which a start makes no sense: one longest request, or a stand-in for it."""
    return sizing.request_bytes or max(_LEAST_KV, (sizing.base_bytes or 0) // 64)


def _seen(sign: Noticed | None) -> tuple[Seen, ...]:
    return () if sign is None else (sign.seen,)


_SWITCHED_OFF: Final = {
    "graph_profile_disabled": "the estimate of the graphs is switched off",
    "graph_profile_optional": "an estimate was made and not taken off, which this version does only if asked",
}
