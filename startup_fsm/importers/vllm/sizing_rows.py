"""
Planning and allocation of the KV cache (L71 to L73, L75 to L88), and what its checks print (C16 to C21, C52).

What is planned before the profile is over belongs to the small KV cache that graphs are profiled with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from startup_fsm.importers.facts import Fact, Heard, Row, Sign, Step, count_figure
from startup_fsm.importers.vllm.phases import planning_state
from startup_fsm.importers.vllm.wording import (
    NUMBER,
    amount,
    count,
    figures_of,
    gib,
    phrase,
    say,
    search_clauses,
    share,
)

_IN: Final = Step("size_kv")
_FITS: Final = Step("size_kv", "request_fits")


def _planned(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    # A worker that only says this plans the small cache, an engine process the real one: its next line tells.
    if heard.state is not None:
        yield Step(planning_state(heard))


def _override(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    before, to = int(found[1]), int(found[2])
    if before == 0:
        # Nothing was measured yet: blocks for the small cache, also on a rank that prints nothing of its profile.
        yield Step("bootstrap_kv", moment="begins")
        yield Sign("blocks_overridden", {"from": before, "to": to})
        return
    state = planning_state(heard)
    yield Step(state)
    if state == "size_kv":
        yield Sign("blocks_overridden", {"from": before, "to": to})
        yield count_figure("gpu_blocks", found[2])


def _auto_fit(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    yield _IN
    before, after = (int(number.replace(",", "")) for number in found.group(1, 2))
    yield Sign("max_model_len_reduced", {"from": before, "to": after})
    yield count_figure("max_model_len", found[2])
    yield from figures_of(found)


def _corrected(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    yield _IN
    yield Sign("kv_corrected", {"available_bytes": int(found[1]), "wanted_bytes": int(found[2])})


def _capped(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    yield Step(planning_state(heard))
    yield Sign("capture_sizes_capped", {"from": int(found[1]), "to": int(found[2])})
    yield from figures_of(found)


#: What CPU workers print of their node: what the KV cache gets, of what.
_NODE: Final = (
    rf"Auto set \({gib('kv_available_bytes')}/{gib('total_bytes')}\) GiB for KV cache",
    rf"Explicitly set \({gib('kv_cache_bytes')}/{gib('total_bytes')}\) GiB for KV cache",
    rf"with {amount('requested_bytes')} requested memory for the worker",
)


def _node(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    yield _IN
    if found[0].startswith("Explicitly"):
        yield Sign("kv_pinned")
    yield from search_clauses(_NODE, found.string)


_NOW: Final = share("gpu_memory_utilization")
_SUGGESTED: Final = share("suggested_utilization")

_GRAPH_ESTIMATE: Final = (
    Row(
        "L71",
        " is equivalent to --gpu-memory-utilization=",
        rf"current --gpu-memory-utilization={_NOW} is equivalent to --gpu-memory-utilization="
        rf"{share('equivalent_utilization')}(?: without .{{0,200}}?to {_SUGGESTED})?",
        say(_IN, Sign("graph_profile_enabled")),
    ),
    Row(
        "L72",
        "CUDA graph memory profiling will be enabled by default",
        rf"profiling will be enabled by default(?:.{{0,400}}?--gpu-memory-utilization from {_NOW} to {_SUGGESTED})?",
        say(_IN, Sign("graph_profile_optional")),
    ),
    Row(
        "L73",
        "CUDA graph memory profiling is disabled",
        rf"profiling is disabled(?:.{{0,400}}?--gpu-memory-utilization from {_NOW} to {_SUGGESTED})?",
        say(_IN, Sign("graph_profile_disabled")),
    ),
)

_PLAN: Final = (
    Row(
        "L75",
        " blocks: ",
        rf"^# \w{{1,20}} blocks: {count('gpu_blocks')}(?:, # CPU blocks: {count('cpu_blocks')})?",
        say(_IN),
    ),
    Row("L79", " KV cache size: ", rf"[\w+) ] KV cache size: {count('kv_tokens')} tokens", say(_IN)),
    Row(
        "L78",
        "Maximum concurrency for ",
        rf"Maximum concurrency for {count('max_model_len')} tokens per request: {NUMBER}x",
        say(_IN),
    ),
    Row(
        "L82",
        " with num_gpu_blocks_override=",
        r"Overriding num_gpu_blocks=(\d{1,12}) with num_gpu_blocks_override=(\d{1,12})",
        _override,
    ),
    Row("L83", " padding layers, may waste ", r"Add \d{1,9} padding layers, may waste at most", _planned),
    Row(
        "L84",
        "Auto-fit max_model_len: reduced ",
        r"Auto-fit max_model_len: reduced from (\d[\d,]{0,15}) to (\d[\d,]{0,15}) to fit in "
        rf"(?:available .{{1,60}}? \({amount('kv_available_bytes')})?",
        _auto_fit,
    ),
    phrase("L84b", "Auto-fit max_model_len: full model context length", say(_IN)),
    Row("L85", "Multiplying the GPU KV cache size by the ", r"KV cache size by the d?cp_world_size \d", say(_IN)),
    Row(
        "L86",
        "Capping cudagraph capture sizes",
        r"Capping cudagraph capture sizes from max (\d{1,9}) to (\d{1,9}) to fit Mamba cache blocks "
        rf"\({count('mamba_blocks')} blocks available\)",
        _capped,
    ),
    # Of our own plugin, in the engine's log.
    Row(
        "corrected",
        "startup_fsm: KV cache corrected from ",
        r"startup_fsm: KV cache corrected from (\d{1,18}) to (\d{1,18}) bytes",
        _corrected,
    ),
    phrase("L87", "HiSparse HMA: ", say(Step("allocate_kv"))),
    Row("L88", " GiB for KV cache on node ", r"(?:Explicitly|Auto) set \(", _node),
)

_CHECKS: Final = (
    Row(
        "C18",
        "To serve at least one request with the model",
        rf"max seq len \({count('max_model_len')}\), \({amount('kv_needed_bytes')} KV cache is needed, which is larger "
        rf"than the available KV cache memory \({amount('kv_available_bytes')}\)"
        rf"(?:.{{0,200}}?estimated maximum model length is {count('estimated_max_model_len')})?",
        say(),
    ),
    Row(
        "C19",
        "tokens that can be stored in KV cache (",
        rf"max seq len \({count('max_model_len')}\) is larger than the maximum number of tokens that can be stored in "
        rf"KV cache \({count('kv_tokens')}\)",
        say(),
    ),
    Row(
        "C21",
        " exceeds available Mamba cache blocks ",
        rf"max_num_seqs \({count('max_num_seqs')}\) exceeds available Mamba cache blocks \({count('mamba_blocks')}\)",
        say(),
    ),
    Row(
        "C16",
        "frontend multimodal GPU decoding reserves",
        rf"but only {amount('kv_available_bytes')} is available",
        say(),
    ),
    Row(
        "C52",
        "The worker already uses ",
        rf"already uses {amount('weights_and_non_torch_bytes')} .{{0,80}}?more than the {amount('requested_bytes')}",
        say(),
    ),
    Row(
        "C52",
        "on kv cache allocation is less than ",
        rf"\({NUMBER}/{gib('total_bytes')} GiB\) on kv cache allocation is less than requested memory for kv "
        rf"\({gib('kv_available_bytes')}/{gib('requested_bytes')} GiB\)",
        say(),
    ),
    Row(
        "C52",
        "on kv cache allocation is less than ",
        rf"\({NUMBER}/{gib('total_bytes')} GiB\) on kv cache allocation is less than requested memory for kv "
        rf"\({gib('kv_cache_bytes')} GiB\)",
        say(Sign("kv_pinned")),
    ),
)

ROWS: Final = (*_GRAPH_ESTIMATE, *_PLAN, *_CHECKS)
