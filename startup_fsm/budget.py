"""
How many bytes the KV cache may take. Pure arithmetic; every term is counted once and recorded.

    kv       = min(free, requested - used by us) - graphs - headroom - margin - shortfall - reserve + already mapped
    headroom = max(0, reserved peak of the largest eager step - reserved after it, settled)
    margin   = max(64 MiB, 0.1% of total, 2 x drift, late return), of the last two at most 1 GiB

``free`` is the smaller of the settled reading after teardown and the reading now. ``graphs`` is what comes back when
graphs are dropped, not what goes away when they are captured: the one-time part stays and is in *used by us* already.
``reserve`` is what the engine says it will take beside all that, a term for each name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import attrs

from startup_fsm.engine import LongestRequest
from startup_fsm.errors import BudgetError
from startup_fsm.estimators import Method
from startup_fsm.events import BudgetComputed, BudgetTerm
from startup_fsm.memory import MIB, format_bytes

#: Smallest margin in bytes: the driver moves in 2 MiB pages and one reading may be off by a few of them.
LEAST_MARGIN: Final = 64 * MIB
#: Where a term comes from that the engine named itself.
OF_ENGINE: Final = "engine"
#: Source of the term for graphs where the engine asked for none: it captures none, or keeps room for them elsewhere.
NOT_APART: Final = "not charged apart"
_TERMS: Final = frozenset(
    {
        "requested", "used_by_us", "not_free", "graphs", "headroom", "margin", "shortfall", "already_mapped",
        "available", "KV cache",
    }
)  # fmt: skip
#: What a journal can hold, in bytes.
_MOST: Final = 1 << 63
#: Most that a reading which moved by itself adds to the margin, in bytes.
MOST_DRIFT: Final = 1024 * MIB


@attrs.frozen(kw_only=True)
class Knobs:
    """
    What a user may set.

    Attributes:
        utilization: Share of the device that this process may use, all of it counted; 0 < utilization <= 1.
        requested_bytes: The same as explicit bytes; wins over ``utilization``.
        kv_cache_memory_bytes: KV bytes as they are wanted, whatever the budget says; None to size them.
        graph_estimate: ``measure`` takes what the throwaway capture gave back, ``none`` reserves nothing, a number
            reserves that many bytes.
        graph_share: Share of the measured estimate that is reserved; below 1 is a gamble.
        graph_method: How the estimate goes on from the sizes that were captured; ``all`` captures every size.
        graph_sample: How many of the largest sizes are captured for it; None for as many as the method needs.
        retries: How often a start may go back and size a smaller KV cache.
        fewer_sizes: How often a start that ran out of memory may drop the larger half of its capture sizes.
        allow_eager: Whether a start may go on without graphs when they cannot be captured.
        arena_bytes: Address space for the KV cache where the plan reserves it; None for the requested bytes.
    """

    utilization: float = 0.9
    requested_bytes: int | None = None
    kv_cache_memory_bytes: int | None = None
    graph_estimate: Literal["measure", "none"] | int = "measure"
    graph_share: float = 1.0
    graph_method: Method = "all"
    graph_sample: int | None = None
    retries: int = 0
    fewer_sizes: int = 0
    allow_eager: bool = False
    arena_bytes: int | None = None

    def __attrs_post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            msg = f"utilization: {self.utilization} is not above 0 and at most 1"
            raise ValueError(msg)
        for name in ("requested_bytes", "kv_cache_memory_bytes", "arena_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                msg = f"{name}: {value} is not a positive number of bytes"
                raise ValueError(msg)
        if self.graph_method not in get_args(Method):
            msg = f"graph_method: {self.graph_method!r} is none of {', '.join(get_args(Method))}"
            raise ValueError(msg)
        if self.graph_sample is not None and self.graph_sample < 1:
            msg = f"graph_sample: {self.graph_sample} sizes are none to learn from"
            raise ValueError(msg)
        if isinstance(self.graph_estimate, int) and self.graph_estimate < 0:
            msg = f"graph_estimate: {self.graph_estimate} is negative"
            raise ValueError(msg)

    @property
    def sample(self) -> int | None:
        """Sizes to capture for the estimate; None for all."""
        if self.graph_method == "all":
            return None
        return self.graph_sample or (1 if self.graph_method == "first_plus_outputs" else 2)

    def requested(self, total: int) -> int:
        """Bytes asked for on a device of ``total`` bytes."""
        return self.requested_bytes if self.requested_bytes is not None else math.floor(total * self.utilization)

    def as_settings(self) -> dict[str, Any]:
        """By the shared names of settings; what is not set is left out."""
        settings: dict[str, Any] = {"gpu_memory_utilization": self.utilization}
        if self.graph_estimate != "measure":
            settings["graph_estimate"] = self.graph_estimate
        if self.graph_share != 1:
            settings["graph_share"] = self.graph_share
        if self.graph_method != "all":
            settings |= {"graph_method": self.graph_method, "graph_sample": self.sample}
        for name in ("requested_bytes", "kv_cache_memory_bytes", "arena_bytes"):
            if (value := getattr(self, name)) is not None:
                settings[name] = value
        if self.fewer_sizes:
            settings["fewer_sizes"] = self.fewer_sizes
        return settings | {"retries": self.retries, "allow_eager": self.allow_eager}


@attrs.frozen(kw_only=True)
class Inputs:
    """
    What a budget is computed from; all bytes.

    Attributes:
        total, requested: The device, and what was asked for of it.
        used_by_us: Everything of this process: context, libraries, torch, arena.
        free_settled, free_now: Readings of free memory, the first after teardown.
        graphs: Reserved for graphs still to be captured.
        headroom, margin: As the formulas above.
        shortfall: What an earlier try of this start turned out to lack.
        reserve: What the engine will take after sizing, by names of its own.
        mapped: KV bytes that are mapped already and counted in ``used_by_us``.
        block_bytes: One KV block over all layers.
        needed_blocks: Blocks of one longest request; None where nobody said.
        pinned: Explicit KV bytes; None to size them.
        most_blocks: A ceiling that is not memory, such as the capacity of the arena.
        sources: Where each figure came from, by name.
    """

    total: int
    requested: int
    used_by_us: int
    free_settled: int
    free_now: int
    graphs: int
    headroom: int
    margin: int
    block_bytes: int
    shortfall: int = 0
    reserve: Mapping[str, int] = attrs.field(factory=dict)
    mapped: int = 0
    needed_blocks: int | None = None
    pinned: int | None = None
    most_blocks: int | None = None
    sources: dict[str, str] = attrs.field(factory=dict)


def margin_bytes(total: int, *, drift: int = 0, late_return: int = 0) -> int:
    """The margin in bytes: for what a reading cannot see."""
    # What moved beyond the cap was somebody else's: it is a finding, and must not take the budget with it.
    return max(LEAST_MARGIN, total // 1000, min(MOST_DRIFT, max(2 * abs(drift), late_return)))


def headroom_bytes(reserved_peak: int, reserved_after: int) -> int:
    """Bytes that the largest eager step will take again. Reserved, not allocated: fragmentation is memory too."""
    return max(0, reserved_peak - reserved_after)


def compute(inputs: Inputs) -> BudgetComputed:
    """
    Size the KV cache. Where it does not fit nothing is raised: ``missing_bytes`` says by how much.

    Raises:
        ValueError: A block of no bytes; a reserve of less than none, or by a name that a term of ours has.
    """
    if type(inputs.block_bytes) is not int or inputs.block_bytes <= 0:
        msg = f"block_bytes: a KV block of {inputs.block_bytes} bytes; it must have at least one"
        raise ValueError(msg)
    _check_reserve(inputs.reserve)
    free = min(inputs.free_settled, inputs.free_now)
    by_request = inputs.requested - inputs.used_by_us
    source = inputs.sources.get
    terms = [
        BudgetTerm(term="requested", bytes=inputs.requested, source=source("requested", "knob")),
        BudgetTerm(term="used_by_us", bytes=-inputs.used_by_us, source=source("used_by_us", "snapshot")),
        # Only when the device has less than the request leaves; otherwise the request is the limit.
        BudgetTerm(term="not_free", bytes=min(0, free - by_request), source=source("free", "device")),
        BudgetTerm(term="graphs", bytes=-inputs.graphs, source=source("graphs", "estimate")),
        BudgetTerm(term="headroom", bytes=-inputs.headroom, source=source("headroom", "profile")),
        BudgetTerm(term="margin", bytes=-inputs.margin, source=source("margin", "rule")),
        BudgetTerm(term="shortfall", bytes=-inputs.shortfall, source=source("shortfall", "earlier try")),
        *(BudgetTerm(term=name, bytes=-size, source=OF_ENGINE) for name, size in inputs.reserve.items()),
        BudgetTerm(term="already_mapped", bytes=inputs.mapped, source=source("mapped", "arena")),
    ]
    terms = [term for term in terms if term.bytes or term.term in ("requested", "used_by_us", "graphs")]
    available = sum(term.bytes for term in terms)
    wanted = available if inputs.pinned is None else inputs.pinned
    blocks = max(0, wanted // inputs.block_bytes)
    if inputs.most_blocks is not None:
        blocks = min(blocks, inputs.most_blocks)
    least = max(1, inputs.needed_blocks or 1)
    # What the ceiling cuts off is not there either, whatever memory is free.
    held = wanted if inputs.most_blocks is None else inputs.most_blocks * inputs.block_bytes
    return BudgetComputed(
        terms=tuple(terms),
        available_bytes=available,
        block_bytes=inputs.block_bytes,
        blocks=blocks,
        kv_bytes=blocks * inputs.block_bytes,
        requested_bytes=inputs.requested,
        total_bytes=inputs.total,
        reachable_bytes=inputs.used_by_us + free,
        needed_bytes=None if inputs.needed_blocks is None else inputs.needed_blocks * inputs.block_bytes,
        missing_bytes=0 if blocks >= least else least * inputs.block_bytes - min(wanted, held),
    )


def _check_reserve(reserve: object) -> None:
    """What an engine of somebody else's says is anything at all, until it was looked at."""
    if not isinstance(reserve, Mapping):
        raise ValueError(f"reserve: {reserve!r} is no mapping of names to bytes")  # noqa: TRY004 - as all that cannot be
    for name, size in reserve.items():
        if not isinstance(name, str) or not name.isprintable() or not name.strip():
            raise ValueError(f"reserve: {name!r} is no name")
        if name in _TERMS:
            raise ValueError(f"reserve: {name!r} is a term of the budget already\nhint: choose another name")
        if type(size) is not int or not 0 <= size < _MOST:
            raise ValueError(f"reserve: {name!r} is {size!r}, and must be a whole number of bytes, at least 0")


def adds_up(budget: BudgetComputed) -> int:
    """What the terms of a recorded budget leave over; 0 for a sound one."""
    return budget.available_bytes - sum(term.bytes for term in budget.terms)


def term(budget: BudgetComputed, name: str) -> int:
    """One term of a budget in bytes, signed as it was counted; 0 when it has none of that name."""
    return next((each.bytes for each in budget.terms if each.term == name), 0)


def source_of(budget: BudgetComputed, name: str) -> str | None:
    """Where a term came from; None when the budget has none of that name."""
    return next((each.source for each in budget.terms if each.term == name), None)


def request_for(budget: BudgetComputed, kv_bytes: int) -> int:
    """Bytes that would have to be asked for, all charges the same, to leave ``kv_bytes`` for the KV cache."""
    return budget.requested_bytes + term(budget, "not_free") - budget.available_bytes + kv_bytes


def utilization_for(budget: BudgetComputed, kv_bytes: int) -> tuple[float, float] | None:
    """
    Smallest and largest utilization that would leave ``kv_bytes`` for the KV cache; None where no value does.

    Both are rounded to three decimals, inwards. The largest is what was ours and what was free when we sized.
    """
    if budget.total_bytes <= 0:
        return None
    needed = request_for(budget, kv_bytes)
    # In whole thousandths; then as the knob will be read, because 0.3 of a device is not quite three tenths of it.
    lowest = -(-needed * 1000 // budget.total_bytes)
    if math.floor(budget.total_bytes * (lowest / 1000)) < needed:
        lowest += 1
    highest = min(1000, budget.reachable_bytes * 1000 // budget.total_bytes)
    return (lowest / 1000, highest / 1000) if 0 < lowest <= highest else None


def nothing_fits(computed: BudgetComputed, longest: LongestRequest | None) -> BudgetError:
    """The error for a budget that lacks bytes: for one block, or for one longest request."""
    terms = {each.term: each.bytes for each in computed.terms}
    shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in terms.items())
    missing = format_bytes(computed.missing_bytes)
    by_bytes = source_of(computed, "requested") == "requested_bytes"
    request = "requested_bytes" if by_bytes else "gpu_memory_utilization"
    if computed.blocks < 1 or longest is None:
        text = f"nothing is left for the KV cache, {missing} are missing ({shown})"
        return BudgetError(
            text,
            missing_bytes=computed.missing_bytes,
            terms=terms,
            hint=f"raise {request}, or charge less: smaller steps, fewer graphs",
        )
    fits = computed.blocks * longest.block_tokens
    text = f"one request of {longest.tokens} tokens does not fit the KV cache, {missing} are missing ({shown})"
    return BudgetError(
        text,
        missing_bytes=computed.missing_bytes,
        terms=terms,
        code="budget.request_does_not_fit",
        fits={"max_model_len": fits},
        hint=f"a request of {fits} tokens would fit; or raise {request}",
    )
