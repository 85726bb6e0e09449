"""
Frames of SGLang to the state that they prove: functions and files, innermost first.

A traceback names files and functions and no classes, so a pool's ``__init__`` is known by where it stands. An event
loop around a frame means that the server served already, whatever was called in it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Final

import attrs

from startup_fsm.importers.facts import Frame
from startup_fsm.importers.sglang.words import DRAFT_PART


@attrs.frozen(slots=True)
class Place:
    """A state and, where known, its part."""

    state: str
    part: str | None = None


@attrs.frozen(slots=True)
class _Rule:
    """A state by function (whole) and file (its end, or a piece); empty for any."""

    place: Place
    function: str
    file: str = ""

    def holds(self, frame: Frame) -> bool:
        return re.fullmatch(self.function, frame.function) is not None and (
            not self.file or re.search(self.file, frame.file) is not None
        )


_SIZE: Final = Place("size_kv")
_ALLOCATE: Final = Place("allocate_kv")
_CAPTURE: Final = Place("capture_graphs")

_SERVING: Final = _Rule(
    Place("serving"),
    r"(?:run_)?event_loop\w{0,60}|forward_thread_func_?|_?(?:execute_server|wait_and)_warmup|handle_loop",
)

_RULES: Final = (
    _Rule(
        Place("allocate_kv", "host_pool"), r"\w+", r"/mem_cache/(?:memory_pool_host|pool_host|hiradix_cache|hicache)"
    ),
    _Rule(Place("allocate_kv", "host_pool"), r"\w+", r"/managers/cache_controller\.py$"),
    _Rule(Place("commit_kv"), r"_?commit\w{0,40}", r"/mem_cache/"),
    _Rule(Place("reserve_kv"), r"\w+", r"/mem_cache/kv_vmm_backing\.py$"),
    _Rule(
        _SIZE,
        r"_?profile_(?:available_bytes|max_num_tokens?)|_?handle_max_mamba_cache|_?resolve_memory_pool_config"
        r"|_?apply_token_constraints|resolve_max_num_reqs|config_from_budget|set_num_tokens?_hybrid\w{0,20}"
        r"|get_cell_size_per_token",
    ),
    _Rule(_SIZE, r"\w+", r"/pool_configurator\.py$"),
    _Rule(
        _ALLOCATE,
        r"__init__|_?(?:create|init|alloc|allocate|build|finalize)_?\w{0,60}",
        r"/mem_cache/|/memory_pool\w{0,20}\.py$",
    ),
    _Rule(
        _SIZE,
        r"_?init_(?:target_)?memory_pools?|alloc_memory_pool|configure|configure_kv_cache_dtype"
        r"|post_capture_resize_kv_pool|compute_post_capture_kv_resize",
    ),
    _Rule(
        Place("init_device"),
        r"init_torch_distributed|_?init_parallel\w{0,40}|measure_pre_model_load_memory|_check_tp_memory_balance"
        r"|init_distributed_environment|initialize_(?:model_parallel|dp_attention)|init_layer_runtime|_prewarm_\w{1,60}",
    ),
    _Rule(_CAPTURE, r"_?capture\w{0,60}|make_graphed_callables"),
    _Rule(_CAPTURE, r"(?!replay)\w+", r"torch/cuda/graphs\.py$"),
    _Rule(
        _CAPTURE,
        r"(?!replay|can_run|load_batch)\w+",
        r"/\w{0,60}graph_runner\.py$|/cuda_graph_setup\.py$|/cuda_piecewise_backend\.py$|/runner_backend/",
    ),
    _Rule(_CAPTURE, r"init_(?:\w{1,30}_)?(?:cuda|device|npu|xpu)_graphs?"),
    _Rule(Place("verify", "sampler_warmup"), r"prewarm_sampling"),
    _Rule(Place("verify"), r"prewarm_graph_pool_borrow"),
    _Rule(
        Place("warmup"),
        r"_?(?:init|get)_attention_backends?\w{0,30}|init_all_attention_backends|kernel_warmup|\w{0,20}autotune|init_cublas"
        r"|maybe_precompile_model_kernels\w{0,30}",
    ),
    _Rule(
        Place("load_weights"),
        r"_?load_(?:model|weight)\w{0,60}|_?initialize_model|create_weights|process_weights_after_loading|init_lora_manager"
        r"|(?:start|finalize)_startup_weight_load",
    ),
    _Rule(Place("load_weights"), r"\w+", r"/model_loader/"),
)

#: Workers of draft models, and runners of their graphs.
_DRAFT_FILE: Final = r"/speculative/\w{0,80}(?:worker|graph_runner)\w{0,20}\.py$"
_DRAFT_FUNCTION: Final = r"(?:maybe_)?init_draft_worker|launch_draft_worker"
_MAMBA: Final = r"\w{0,40}mamba\w{0,20}_pools?|_?build_hybrid_req_pool|_?build_hybrid_mamba\w{0,30}"
_PIECES: Final = r"/(?:piecewise|prefill)_cuda_graph_runner\.py$|/cuda_piecewise_backend\.py$"
_PIECES_FUNCTION: Final = r"init_(?:piecewise|prefill)_cuda_graphs?|capture_prefill\w{0,20}"
_RUNNER: Final = r"/\w{0,60}graph_runner\.py$|/cuda_graph_setup\.py$"


def place_of(frames: Sequence[Frame]) -> Place | None:
    """Where the frames prove that it was raised; None where none of them is known."""
    if _any(frames, _SERVING.function):
        return _SERVING.place
    place = next((place for frame in reversed(frames) if (place := _place_in(frame)) is not None), None)
    if _any(frames, _DRAFT_FUNCTION, _DRAFT_FILE):
        # The groups of a draft model are a part of loading it.
        state = "load_weights" if place is None or place.state == "init_device" else place.state
        return Place(state, DRAFT_PART)
    if place == _ALLOCATE and _any(frames, _MAMBA):
        return Place("allocate_kv", "mamba_pool")
    return _capture_part(frames) if place == _CAPTURE else place


@functools.lru_cache(maxsize=1_024)
def _place_in(frame: Frame) -> Place | None:
    """Ranks print the same frames, and so do exceptions that are raised from each other."""
    return next((rule.place for rule in _RULES if rule.holds(frame)), None)


def _capture_part(frames: Sequence[Frame]) -> Place:
    if _any(frames, _PIECES_FUNCTION, _PIECES):
        return Place("capture_graphs", "piecewise")
    return Place("capture_graphs", "full") if _any(frames, "", _RUNNER) else _CAPTURE


def _any(frames: Sequence[Frame], function: str, file: str = "") -> bool:
    """Whether a frame has such a function, or lies in such a file."""
    return any(_is(frame, function, file) for frame in frames)


@functools.lru_cache(maxsize=4_096)
def _is(frame: Frame, function: str, file: str) -> bool:
    is_function = bool(function) and re.fullmatch(function, frame.function) is not None
    return is_function or (bool(file) and re.search(file, frame.file) is not None)
