"""
The budget of a start again with other settings: one arithmetic for journals of our own and for text logs. Pure.

    available = share x base - charged

``base`` is what the share is a share of: the device, or for engines that size by a fraction of free memory what was
free before loading. ``charged`` is everything that is taken off, each term once. All figures are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import attrs

from startup_fsm import budget
from startup_fsm.events import BudgetTerm
from startup_fsm.fold import RunState
from startup_fsm.memory import format_bytes

#: Shares are given with three decimals.
_STEPS: Final = 1000

#: Terms that are split between devices that share each layer, those that go by the tokens of a step, and the graphs.
_SPLIT: Final = frozenset({"weights"})
_BY_TOKENS: Final = frozenset({"activation", "headroom"})
_GRAPHS: Final = "graphs"

#: Bytes of one number of the KV cache, by the word for it.
_NARROW: Final = ("fp8", "fp8_e4m3", "fp8_e5m2", "int8")
_WIDE: Final = ("auto", "bfloat16", "float16", "half", "bf16", "fp16", None)


@attrs.frozen(kw_only=True)
class Sizing:
    """
    How a KV cache was sized.

    Attributes:
        setting: Our name of the share: ``gpu_memory_utilization`` or ``mem_fraction_static``.
        share: As it was given; None where nobody said.
        base_bytes: What it is a share of; None where nobody said.
        terms: What is charged, as negative bytes, by name.
        available_bytes: What was left for the KV cache; negative where nothing was.
        reachable_bytes: The largest request that the device could have honoured; None where nobody looked.
        later_bytes: What comes on top of the request after sizing, such as graphs that nobody reserved.
        pinned_bytes: Explicit KV bytes, which no share moves; None where they are sized.
        tokens: What the available bytes hold; None where nobody said.
        needed_bytes: What one longest request takes; None where nobody said.
        longest_tokens: Its tokens.
        resolution_bytes: Half a unit of the last printed digit of the coarsest reading; 0 for exact ones.
        settings: By our names, as they were given.
        assumed: What the arithmetic takes for granted, in words.
    """

    setting: str = "gpu_memory_utilization"
    share: float | None = None
    base_bytes: int | None = None
    terms: tuple[BudgetTerm, ...] = ()
    available_bytes: int
    reachable_bytes: int | None = None
    later_bytes: int = 0
    pinned_bytes: int | None = None
    tokens: int | None = None
    needed_bytes: int | None = None
    longest_tokens: int | None = None
    resolution_bytes: int = 0
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    assumed: tuple[str, ...] = ()

    @property
    def charged_bytes(self) -> int:
        """All terms together, as positive bytes."""
        return -sum(term.bytes for term in self.terms)

    @property
    def token_bytes(self) -> float | None:
        """KV bytes of one token; None where neither a cache nor a request tells them."""
        if self.tokens and self.kv_bytes > 0:
            return self.kv_bytes / self.tokens
        return self.needed_bytes / self.longest_tokens if self.needed_bytes and self.longest_tokens else None

    @property
    def request_bytes(self) -> int | None:
        """What one longest request takes, from what was printed of it or from its tokens."""
        if self.needed_bytes is not None:
            return self.needed_bytes
        each = self.token_bytes
        return None if each is None or self.longest_tokens is None else math.ceil(each * self.longest_tokens)

    @property
    def kv_bytes(self) -> int:
        """Bytes that the KV cache gets."""
        return self.available_bytes if self.pinned_bytes is None else self.pinned_bytes

    @property
    def top_bytes(self) -> int | None:
        """The largest request that leaves room for what comes on top of it; None where the device is not known."""
        top = self.reachable_bytes if self.reachable_bytes is not None else self.base_bytes
        return None if top is None else top - self.later_bytes - self.resolution_bytes

    def at(self, share: float) -> int | None:
        """What a share leaves for the KV cache; None where its base is not known."""
        return None if self.base_bytes is None else math.floor(self.base_bytes * share) - self.charged_bytes

    def lowest(self, kv_bytes: int) -> float | None:
        """Smallest share, in thousandths, that leaves ``kv_bytes``, whatever the printed digits hide; None: unknown."""
        if not self.base_bytes:
            return None
        needed = self.charged_bytes + kv_bytes + self.resolution_bytes
        step = max(1, -(-needed * _STEPS // self.base_bytes))
        # As the engine will read it: 0.3 of a device is not quite three tenths of it.
        return (step + (math.floor(self.base_bytes * (step / _STEPS)) < needed)) / _STEPS

    def highest(self) -> float | None:
        """Largest share, in thousandths, that the device can honour with all that comes on top; None: unknown."""
        top = self.top_bytes
        if not self.base_bytes or top is None:
            return None
        return max(0, min(_STEPS, top * _STEPS // self.base_bytes)) / _STEPS

    def interval(self, kv_bytes: int) -> tuple[float, float] | None:
        """Shares that leave ``kv_bytes`` and that the device can honour; None where there are none, or unknown."""
        low, high = self.lowest(kv_bytes), self.highest()
        return (low, high) if low is not None and high is not None and low <= high else None

    def missing(self, kv_bytes: int) -> int:
        """Bytes that are short of ``kv_bytes`` at the largest share; 0 where they fit, or where nobody can tell."""
        top = self.top_bytes
        return 0 if top is None else max(0, self.charged_bytes + kv_bytes - top)

    def leftover(self, share: float) -> int | None:
        """Bytes of the device that a share leaves to nobody; None where what it can honour was not read."""
        if self.base_bytes is None or self.reachable_bytes is None:
            return None
        return self.reachable_bytes - self.later_bytes - math.ceil(self.base_bytes * share)


@attrs.frozen(kw_only=True)
class Side:
    """
    One side of a comparison.

    Attributes:
        share, requested_bytes: Of the request; None where it is not known.
        terms: Charged, negative.
        available_bytes, kv_bytes: What is left, and what the KV cache gets.
        tokens: What it holds; None where a token's bytes are not known.
        request_fits: Whether one longest request fits; None where its bytes are not known.
        leftover_bytes: Of the device, at ready.
    """

    share: float | None
    requested_bytes: int | None
    terms: tuple[BudgetTerm, ...]
    available_bytes: int
    kv_bytes: int
    tokens: int | None
    request_fits: bool | None
    leftover_bytes: int | None


@attrs.frozen(kw_only=True)
class WhatIf:
    """
    A budget before and after.

    Attributes:
        before, after: As their class says.
        interval: Shares that hold one longest request after the changes; None where there are none, or unknown.
        missing_bytes: What is short at the largest share after the changes.
        assumed: What the arithmetic takes for granted, in words.
    """

    before: Side
    after: Side
    interval: tuple[float, float] | None
    missing_bytes: int
    assumed: tuple[str, ...] = ()


def what_if(sizing: Sizing, changes: Mapping[str, Any]) -> WhatIf:
    """
    The same start with other settings.

    Args:
        sizing: How it was sized.
        changes: By our names of settings, as :func:`changed` takes them.

    Raises:
        ValueError: A setting whose effect cannot be computed from a budget, or a value that is none.
    """
    after = changed(sizing, changes)
    least = after.request_bytes or 1
    return WhatIf(
        before=_side(sizing),
        after=_side(after),
        # Explicit KV bytes are there whatever the share is.
        interval=None if after.pinned_bytes is not None else after.interval(least),
        missing_bytes=after.missing(least),
        assumed=after.assumed,
    )


def changed(sizing: Sizing, changes: Mapping[str, Any]) -> Sizing:
    """
    The sizing with other settings.

    Args:
        sizing: How it was sized.
        changes: The share, ``kv_cache_memory_bytes``, ``max_model_len``, ``max_num_batched_tokens``,
            ``chunked_prefill_size``, ``graph_estimate`` (bytes), ``enforce_eager``, ``tensor_parallel_size`` or
            ``kv_cache_dtype``.

    Raises:
        ValueError: Any other setting, or a value that is none.
    """
    for name, value in changes.items():
        if name == sizing.setting:
            sizing = _at_share(sizing, value)
        elif name in _CHANGES:
            sizing = _CHANGES[name](sizing, name, value)
        else:
            known = ", ".join(sorted({sizing.setting, *_CHANGES}))
            msg = f"{name}: a budget does not tell what it changes; it tells {known}"
            raise ValueError(msg)
        sizing = attrs.evolve(sizing, settings={**sizing.settings, name: value})
    return sizing


def sizing_of_journal(run: RunState) -> Sizing | None:
    """How a start of our own was sized last; None where it came to no budget."""
    if not run.budgets:
        return None
    computed = run.budgets[-1][1]
    share = run.knob("gpu_memory_utilization")
    if not isinstance(share, float) or run.knob("requested_bytes") is not None:
        share = computed.requested_bytes / max(1, computed.total_bytes)
    # What the device lacks is no charge: a larger request would not bring it back.
    terms = tuple(term for term in computed.terms if term.term not in ("requested", "not_free"))
    lacking = budget.term(computed, "not_free")
    visit = run.last("size_kv")
    block_tokens = None if visit is None else visit.notes.get("block_tokens")
    longest = run.knob("max_model_len") or (None if visit is None else visit.notes.get("longest_tokens"))
    return Sizing(
        share=share,
        base_bytes=computed.total_bytes,
        terms=terms,
        available_bytes=computed.available_bytes,
        reachable_bytes=computed.reachable_bytes,
        pinned_bytes=run.knob("kv_cache_memory_bytes"),
        tokens=computed.blocks * block_tokens if isinstance(block_tokens, int) else None,
        needed_bytes=computed.needed_bytes,
        longest_tokens=longest if isinstance(longest, int) else None,
        settings={} if run.started is None else run.started.knobs,
        assumed=() if not lacking else (f"{format_bytes(-lacking)} of the request were not free",),
    )


def _side(sizing: Sizing) -> Side:
    each, needed = sizing.token_bytes, sizing.request_bytes
    kv_bytes = max(0, sizing.kv_bytes)
    asked = sizing.base_bytes is not None and sizing.share is not None
    requested = math.floor(sizing.base_bytes * sizing.share) if asked else None  # type: ignore[operator]
    return Side(
        share=sizing.share,
        requested_bytes=requested,
        terms=sizing.terms,
        available_bytes=sizing.available_bytes,
        kv_bytes=kv_bytes,
        tokens=None if each is None else int(kv_bytes / each),
        request_fits=None if needed is None else kv_bytes >= needed,
        leftover_bytes=_left(sizing),
    )


def _left(sizing: Sizing) -> int | None:
    """Of the device, at ready; explicit KV bytes are there whatever the share is."""
    if sizing.pinned_bytes is not None and sizing.reachable_bytes is not None:
        return sizing.reachable_bytes - sizing.later_bytes - sizing.charged_bytes - sizing.pinned_bytes
    return None if sizing.share is None else sizing.leftover(sizing.share)


def _number(name: str, value: Any, *, least: float = 0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        msg = f"{name}: {value!r} is no number of at least {least:g}"
        raise ValueError(msg)
    return value


def _at_share(sizing: Sizing, value: Any) -> Sizing:
    share = _number(sizing.setting, value)
    if not 0 < share <= 1:
        msg = f"{sizing.setting}: {value!r} is not above 0 and at most 1"
        raise ValueError(msg)
    available = sizing.at(share)
    if available is None:
        msg = f"{sizing.setting}: nothing tells what it is a share of"
        raise ValueError(msg)
    top = sizing.reachable_bytes
    if top is not None and sizing.base_bytes is not None:
        available = min(available, top - sizing.charged_bytes)
    return _resized(sizing, available, share=float(share))


def _resized(sizing: Sizing, available: int, **more: Any) -> Sizing:
    """More or fewer bytes for the KV cache, and as many tokens more or fewer."""
    each = sizing.token_bytes
    after = attrs.evolve(sizing, available_bytes=available, **more)
    return after if each is None else attrs.evolve(after, tokens=max(0, int(after.kv_bytes / each)))


def _charge(sizing: Sizing, name: str, factor: float, names: frozenset[str], assumed: str) -> Sizing:
    charged = [term.term in names and term.source != budget.OF_ENGINE for term in sizing.terms]
    if not any(charged):
        raise ValueError(f"{name}: nothing tells what is charged for it")
    terms = tuple(
        attrs.evolve(term, bytes=round(term.bytes * factor)) if is_charged else term
        for term, is_charged in zip(sizing.terms, charged, strict=True)
    )
    freed = sum(new.bytes - old.bytes for new, old in zip(terms, sizing.terms, strict=True))
    return _resized(sizing, sizing.available_bytes + freed, terms=terms, assumed=(*sizing.assumed, assumed))


def _tokens_of_a_step(sizing: Sizing, name: str, value: Any) -> Sizing:
    before = sizing.settings.get(name)
    if isinstance(before, bool) or not isinstance(before, int) or before <= 0:
        msg = f"{name}: nothing tells what it was"
        raise ValueError(msg)
    factor = _number(name, value, least=1) / before
    return _charge(sizing, name, factor, _BY_TOKENS, "what a step takes goes by its tokens")


def _devices(sizing: Sizing, name: str, value: Any) -> Sizing:
    before = sizing.settings.get(name, 1)
    before = before if isinstance(before, int) and before > 0 else 1
    factor = before / _number(name, value, least=1)
    after = _charge(sizing, name, factor, _SPLIT, "weights and KV cache are split evenly; the rest stays as it is")
    needed = None if after.needed_bytes is None else math.ceil(after.needed_bytes * factor)
    tokens = None if after.tokens is None else int(after.tokens / factor)
    return attrs.evolve(after, needed_bytes=needed, tokens=tokens)


def _number_format(sizing: Sizing, name: str, value: Any) -> Sizing:
    said = sizing.settings.get(name)
    before = said if isinstance(said, str) else None
    widths: dict[Any, int] = dict.fromkeys(_NARROW, 1) | dict.fromkeys(_WIDE, 2)
    if not isinstance(value, str) or value not in widths or before not in widths:
        msg = f"{name}: {before!r} to {value!r} is no change that can be computed"
        raise ValueError(msg)
    factor = widths[value] / widths[before]
    needed = None if sizing.needed_bytes is None else math.ceil(sizing.needed_bytes * factor)
    tokens = None if sizing.tokens is None else int(sizing.tokens / factor)
    assumed = (*sizing.assumed, "all of the KV cache is in this format")
    return attrs.evolve(sizing, needed_bytes=needed, tokens=tokens, assumed=assumed)


def _longest(sizing: Sizing, name: str, value: Any) -> Sizing:
    tokens, before = int(_number(name, value, least=1)), sizing.longest_tokens
    needed = sizing.needed_bytes
    if needed is not None and before:
        needed = math.ceil(needed * tokens / before)
    return attrs.evolve(sizing, longest_tokens=tokens, needed_bytes=needed)


def _pinned(sizing: Sizing, name: str, value: Any) -> Sizing:
    return _resized(sizing, sizing.available_bytes, pinned_bytes=int(_number(name, value, least=1)))


def _graphs(sizing: Sizing, name: str, value: Any) -> Sizing:
    to = int(_number(name, value))
    was = -sum(term.bytes for term in sizing.terms if term.term == _GRAPHS)
    terms = (
        *(term for term in sizing.terms if term.term != _GRAPHS),
        BudgetTerm(term=_GRAPHS, bytes=-to, source="what if"),
    )
    # What is reserved for them does not come on top any more, and what is not does.
    later = max(0, sizing.later_bytes + was - to)
    return _resized(sizing, sizing.available_bytes + was - to, terms=terms, later_bytes=later)


def _eager(sizing: Sizing, name: str, value: Any) -> Sizing:
    if value is not True:
        msg = f"{name}: {value!r}: what graphs would take is not known before they are captured"
        raise ValueError(msg)
    return attrs.evolve(_graphs(sizing, "graph_estimate", 0), later_bytes=0)


_CHANGES: Final = {
    "kv_cache_memory_bytes": _pinned,
    "max_model_len": _longest,
    "max_num_batched_tokens": _tokens_of_a_step,
    "chunked_prefill_size": _tokens_of_a_step,
    "graph_estimate": _graphs,
    "enforce_eager": _eager,
    "tensor_parallel_size": _devices,
    "kv_cache_dtype": _number_format,
}
