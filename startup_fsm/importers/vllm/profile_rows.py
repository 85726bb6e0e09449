"""
The activation profile (L40 to L62), and what its checks print (C11, C14).

V0 reports in several lines, each of which comes alone and may be cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from startup_fsm.importers.facts import Fact, Heard, Row, Sign, Step
from startup_fsm.importers.vllm.phases import compiling
from startup_fsm.importers.vllm.wording import NUMBER, amount, figures_of, phrase, plain_bytes, say, say_by, share

_IN: Final = Step("profile_activations")
_END: Final = Step("profile_activations", moment="ends")
_SIZED: Final = Step("size_kv")

_COMPILING: Final = say_by(lambda heard: (compiling(heard),))
_SECONDS: Final = r"\d{1,9}(?:\.\d{1,6})? s"


def _compiled(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    # Compiled, so that whatever fails next fails of something else; the part stays where it began.
    yield Step(compiling(heard).state)


def _plan_applied(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    yield _IN
    yield Sign("startup_plan_applied", {"kv_cache_memory_bytes": int(found["kv_cache_bytes"])})
    yield from figures_of(found)


_COMPILE: Final = (
    phrase("L41", "Starting torch.compile", _COMPILING),
    phrase("L41", "Using cache directory: ", _COMPILING),
    Row("L41", "Dynamo bytecode transform time: ", rf"Dynamo bytecode transform time: {_SECONDS}", _COMPILING),
    Row("L42", "Compiling a graph for ", rf"Compiling a graph for .{{1,200}}? takes {_SECONDS}", _COMPILING),
    phrase("L43", "Directly load the compiled graph", _COMPILING),
    Row("L44", "AOT compil", r"Directly load AOT compilation from path |saved AOT compiled function to ", _COMPILING),
    Row("L45", "torch.compile takes ", rf"torch\.compile takes {_SECONDS} in total", _compiled),
    Row("L46", "torch.compile took ", rf"torch\.compile took {_SECONDS} in total", _compiled),
    phrase("compile", "Warming up model for the compilation", _COMPILING),
)

_V0: Final = Sign("runner", {"runner": "V0"})

_V0_REPORT: Final = (
    Row(
        "L48",
        "Memory profiling results: total_gpu_memory=",
        rf"total_gpu_memory={amount('total_bytes')} initial_memory_usage={amount('initial_used_bytes')} "
        rf"peak_torch_memory={amount('peak_torch_bytes')} memory_usage_post_profile={NUMBER}GiB "
        rf"non_torch_memory={amount('engine_outside_torch_bytes')} kv_cache_size={amount('kv_available_bytes')} "
        rf"gpu_memory_utilization={share('gpu_memory_utilization')}",
        say(_V0, _SIZED),
    ),
    Row("L49", "Memory profiling results:", r"Memory profiling results:\s{0,20}\Z", say(_V0, _END)),
    Row("L49", "total_gpu_memory", rf"^\s{{0,20}}total_gpu_memory\s{{1,40}}{amount('total_bytes')}", say(_END)),
    Row(
        "L49",
        "gpu_memory_utilization",
        rf"^\s{{0,20}}gpu_memory_utilization\s{{1,40}}{share('gpu_memory_utilization')}\s{{0,20}}\Z",
        say(_END),
    ),
    Row(
        "L49",
        "non_torch_memory",
        rf"^\s{{0,20}}non_torch_memory\s{{1,40}}{amount('engine_outside_torch_bytes')}",
        say(),
    ),
    Row(
        "L49",
        "available_kv_cache_memory",
        rf"available_kv_cache_memory\s{{1,40}}{amount('kv_available_bytes')}",
        say(_SIZED),
    ),
    Row("L50", "Memory profiling takes ", rf"Memory profiling takes {NUMBER} seconds(?!\. Total)", say(_V0, _END)),
    Row(
        "L50",
        "current vLLM instance can use",
        r"current vLLM instance can use\s{1,40}"
        rf"(?:total_gpu_memory \({amount('total_bytes')}\) x gpu_memory_utilization "
        rf"\({share('gpu_memory_utilization')}\) = )?{amount('requested_bytes')}",
        say(_V0, _END),
    ),
    Row("L50", "model weights take", rf"model weights take\s{{1,40}}{amount('weights_bytes')}", say(_END)),
    Row("L50", "non_torch_memory takes ", rf"non_torch_memory takes {amount('engine_outside_torch_bytes')}", say(_END)),
    Row(
        "L50",
        "PyTorch activation peak memory",
        rf"PyTorch activation peak memory(?: takes)?\s{{1,40}}{amount('engine_activation_bytes')}",
        say(_END),
    ),
    Row(
        "L50",
        "memory reserved for KV Cache is ",
        rf"rest of the memory reserved for KV Cache is {amount('kv_available_bytes')}",
        say(_SIZED),
    ),
)

_V1_REPORT: Final = (
    Row(
        "L51",
        "Total non KV cache memory: ",
        rf"torch peak memory increase: {amount('engine_activation_bytes')}; non-torch forward increase memory: "
        rf"{amount('engine_outside_torch_bytes')}; weights memory: {amount('weights_bytes')}",
        say(_END),
    ),
    Row(
        "L51",
        "total consumed (from mem_get_info): ",
        rf"torch peak memory increase: {amount('engine_activation_bytes')}; total consumed \(from mem_get_info\): "
        rf"{amount('weights_and_non_torch_bytes')}; weights memory: {amount('weights_bytes')}",
        say(_END),
    ),
    Row(
        "L53",
        "requested GPU memory: ",
        rf"Initial free memory: {amount('free_at_start_bytes')}, free memory: {NUMBER} GiB, "
        rf"requested GPU memory: {amount('requested_bytes')}",
        say(_END),
    ),
    Row(
        "L54",
        " (util), ",
        rf"Initial free memory: {amount('free_at_start_bytes')}; Requested memory: {share('gpu_memory_utilization')} "
        rf"\(util\), {amount('requested_bytes')}",
        say(_END),
    ),
    Row("L55", "Free memory after profiling: ", rf"Free memory after profiling: {NUMBER} GiB \(total\)", say(_END)),
    Row(
        "L56", "Available KV cache memory: ", rf"Available KV cache memory: {amount('kv_available_bytes')}", say(_SIZED)
    ),
    Row(
        "L57",
        "memory profiling",
        rf"Initial free memory {amount('free_at_start_bytes')}, reserved {amount('kv_cache_bytes')} (?:memory )?for KV "
        r"Cache as specified by kv_cache_memory_bytes",
        say(_SIZED, Sign("kv_pinned")),
    ),
    Row(
        "L58",
        " during profiling (initial ",
        rf"Free memory grew by {NUMBER} GiB during profiling \(initial {amount('initial_free_bytes')}, "
        rf"current {amount('current_free_bytes')}\)",
        say(_IN, Sign("free_grew_tolerated")),
    ),
    Row(
        "L59",
        "Before memory profiling run, ",
        rf"total GPU memory: {amount('total_bytes')}, model load takes {amount('weights_bytes')}",
        say(_IN),
    ),
    Row(
        "L59",
        "After memory profiling run, ",
        rf"peak memory usage is {amount('peak_torch_bytes')}, ?torch mem is {NUMBER} MB, "
        rf"?non-torch mem is {amount('engine_outside_torch_bytes')}",
        say(_END),
    ),
    Row(
        "L60",
        "for frontend multimodal decoding",
        rf"Reserving {NUMBER} GiB of GPU memory for frontend multimodal decoding .{{0,300}}?"
        rf"KV cache memory reduced to {amount('kv_available_bytes')}",
        say(_SIZED),
    ),
    Row(
        "L61",
        "Applying persisted startup plan",
        r"Applying persisted startup plan .{0,80}?kv_cache_memory_bytes="
        r"(?P<kv_cache_bytes>\d{1,20})(?P<kv_cache_bytes_unit>)",
        _plan_applied,
    ),
    phrase("L62", "Startup plan not applied: ", say(_IN, Sign("startup_plan_refused"))),
)

_CHECKS: Final = (
    Row(
        "C11",
        "Error in memory profiling.",
        rf"Initial free memory {plain_bytes('initial_free_bytes')}, ?current free memory "
        rf"{plain_bytes('current_free_bytes')}",
        say(),
    ),
    Row(
        "C11",
        "Initial used memory ",
        rf"Initial used memory {plain_bytes('initial_used_bytes')}, ?currently used",
        say(),
    ),
    Row(
        "C14",
        "occurred when warming up sampler",
        r"warming up sampler with (?P<sampler_dummy_requests>\d{1,9}) dummy requests",
        say(),
    ),
    Row(
        "C14",
        "occurred when warming up pooler",
        r"warming up pooler .{0,80}?with (?P<sampler_dummy_requests>\d{1,9}) dummy requests",
        say(),
    ),
)

ROWS: Final = (
    Row(
        "L40",
        "Encoder cache will be initialized with a budget of ",
        r"Encoder cache will be initialized",
        say(Step("profile_activations", "encoder")),
    ),
    *_COMPILE,
    Row("L47", "Initial profiling/warmup run took ", rf"Initial profiling/warmup run took {_SECONDS}", _compiled),
    *_V0_REPORT,
    *_V1_REPORT,
    *_CHECKS,
)
