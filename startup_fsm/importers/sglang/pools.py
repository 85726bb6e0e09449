"""SGLang's budget and pools: tokens, KV, sliding windows, mamba states, host tiers, address space and what backs it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from startup_fsm.importers.facts import Fact, Figure, Heard, Row, Setting, Sign, Step, bytes_figure, count_figure
from startup_fsm.importers.sglang.words import COUNT, DRAFT_PART, NUMBER, POOL_END, behind, count, memory

_RESERVED: Final = (Step("reserve_kv"), Sign("reserved_address_space"))


def _draft(heard: Heard) -> str | None:
    """The target's pool is there: another one is the draft model's."""
    return DRAFT_PART if heard.has(POOL_END) else None


def _sizing(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (Step("size_kv", _draft(heard)),)


def _fewer_tokens(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    step = Step("size_kv", _draft(heard))
    if step.part is not None:
        return (step,)
    return (step, count_figure("max_total_tokens_requested", found[1]), count_figure("kv_tokens", found[2]))


def _fraction(number: str) -> tuple[Fact, ...]:
    name = "mem_fraction_static"
    return (Setting(name, float(number)), Figure(name, float(number)))


def _no_memory(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return () if found[1] is None else _fraction(found[1])


def _weights_leave_nothing(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    suggested = () if found[2] is None else (Figure("suggested_utilization", float(found[2])),)
    return (*_fraction(found[1]), *suggested)


def _fewer_than_a_request(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    # Printed at the end of a start, when nothing is sized any more.
    return (count_figure("kv_tokens", found[1]), count_figure("max_model_len", found[2]))


def _window_tokens(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    step = Step("size_kv", _draft(heard))
    return (step,) if step.part is not None else (step, count_figure("kv_tokens", found[1] or found[2]))


def _kv(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    step = Step("allocate_kv", _draft(heard))
    return (step,) if step.part is not None else (step, *_kv_figures(behind(found)))


def _kv_figures(text: str) -> Iterable[Fact]:
    halves = (*memory("k_bytes", "K size", text), *memory("v_bytes", "V size", text))
    whole = memory("kv_cache_bytes", "KV size", text)
    if len(halves) == len(("K", "V")):
        resolution = sum(half.resolution or 0 for half in halves)
        whole = (Figure("kv_cache_bytes", sum(half.value for half in halves), "GB", resolution),)
    return (*count("kv_tokens", "#tokens", text), *halves, *whole)


def _labelled_kv(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (Step("allocate_kv", _draft(heard)),)


def _reserved(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    # Addresses are no memory: no figures.
    return _RESERVED


def _windows(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    if found[1] != "mem usage":
        return _RESERVED
    step = Step("allocate_kv", _draft(heard))
    if step.part is not None:
        return (step,)
    tokens = () if found[3] is None else (count_figure("kv_tokens", found[3]),)
    return (step, *bytes_figure("kv_cache_bytes", found[2], "GB"), *tokens)


def _unified(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    if found[1] != "allocated":
        return _RESERVED
    return (Step("allocate_kv"), *bytes_figure("kv_cache_bytes", found[2], "B"))


def _mamba(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    slots = () if _draft(heard) is not None else count("mamba_blocks", "max_mamba_cache_size", behind(found))
    return (Step("allocate_kv", "mamba_pool"), *slots)


def _host(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (Step("allocate_kv", "host_pool"),)


def _pool_end(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    step = Step("allocate_kv", _draft(heard), "ends")
    return (step,) if step.part is not None else (step, *memory("avail_after_pool_bytes", "avail mem", behind(found)))


def _after_capture(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    """Graphs were captured against addresses; now the memory behind them is sized and committed."""
    text = found[1]
    if text.startswith("draft KV cache allocated"):
        return (Step("commit_kv", DRAFT_PART),)
    if text.startswith("KV cache allocated"):
        return (Step("commit_kv"), Sign("post_capture_resized"), *_kv_figures(text))
    sized = Step("size_kv", None, "inside" if heard.state == "size_kv" else "begins")
    capped = re.match(rf"max_running_requests {COUNT} -> {COUNT}", text)
    return (sized,) if capped is None else (sized, count_figure("max_running_requests", capped[2]))


ROWS: Final = (
    Row("sgl.kv_dtype", "Using KV cache dtype", r"\bUsing KV cache dtype: ", _sizing),
    Row(
        "sgl.fewer_tokens",
        "is larger than the profiled value",
        rf"\bmax_total_tokens={COUNT} is larger than the profiled value {COUNT}",
        _fewer_tokens,
    ),
    Row(
        "sgl.no_memory",
        "Please try to increase --mem-fraction-static",
        r"\bNot enough memory\. Please try to increase --mem-fraction-static"
        r"(?:[^=\n]{0,120}mem_fraction_static=(\d{1,3}(?:\.\d{1,9})?))?",
        _no_memory,
    ),
    Row(
        "sgl.weights_leave_nothing",
        "Loaded weights leave no GPU memory",
        r"\bLoaded weights leave no GPU memory [^=\n]{0,80}--mem-fraction-static=(\d{1,3}(?:\.\d{1,9})?)\b"
        r"(?:[^\d\n]{1,80}(\d\.\d{1,6}))?",
        _weights_leave_nothing,
    ),
    Row(
        "sgl.fewer_than_a_request",
        "KV pool holds",
        rf"\bKV pool holds {COUNT} tokens, fewer than --context-length {COUNT}",
        _fewer_than_a_request,
    ),
    Row(
        "sgl.window_tokens",
        "liding window memory pool",
        rf"\bUse [Ss]liding window memory pool[^=\n]{{0,40}}(?:full_layer_tokens={COUNT}, )?swa_layer_tokens={COUNT}",
        _window_tokens,
    ),
    Row("sgl.kv", "KV Cache is allocated", r"(?<!\w )\bKV Cache is allocated\.", _kv),
    Row("sgl.labelled_kv", "KV Cache is allocated", r"\w KV Cache is allocated\.", _labelled_kv),
    Row("sgl.kv_reserved", "KV Cache VA upper bound", r"\bKV Cache VA upper bound\.", _reserved),
    Row(
        "sgl.windows",
        "SWAKVPool",
        rf"\bSWAKVPool (mem usage|VA upper bound): {NUMBER} GB(?:, swa size: \d{{1,15}}, full size: {COUNT})?",
        _windows,
    ),
    Row(
        "sgl.unified",
        "UnifiedKVPool",
        r"\bUnifiedKVPool (allocated|reserved VA upper bound): total_bytes=[^(\n]{0,40}\(=(\d{1,15}) B\)",
        _unified,
    ),
    Row("sgl.mamba", "Mamba Cache is allocated", r"\bMamba Cache is allocated\.", _mamba),
    Row("sgl.host", "host memory", r"\bAllocating [^\n]{0,120}\bhost memory\b", _host, "sglang"),
    Row(POOL_END, "Memory pool end", r"\bMemory pool end\b", _pool_end),
    Row("sgl.arena", "KvVmmArena[", r"\bKvVmmArena\[\w{0,40}\] ready: ", _reserved),
    Row("sgl.after_capture", "Post-capture KV sizing: ", r"\bPost-capture KV sizing: (.{1,400})", _after_capture),
)
