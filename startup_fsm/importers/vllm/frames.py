"""
Where an exception was raised, by the functions that it came through: outermost first, refined by inner ones.

A rule holds inside some states: ``initialize_kv_cache`` allocates the real KV cache, but inside the profile of the
graphs a small one. Functions that run in several states are placed by what the process said before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Final

import attrs

from startup_fsm.importers.facts import Frame, Heard
from startup_fsm.importers.vllm.phases import REAL, THROWAWAY, capture_state, is_sized, sampling

#: State and part; None for what is not proven.
Place = tuple[str | None, str | None]

#: Inside no state that is known yet.
_NOWHERE: Final = "-"
_PROFILING: Final = ("profile_activations", "bootstrap_kv", THROWAWAY, "teardown")

_GRAPH_FILES: Final = ("torch/cuda/graphs.py", "torch_npu/npu/graphs.py", "torch/xpu/graphs.py")
#: Where the engine's own functions with common names are.
_ENGINE_FILES: Final = ("vllm/v1/", "vllm/worker/", "vllm/compilation/", "vllm/spec_decode/", "vllm_ascend/")
_DRAFT_FILES: Final = ("spec_decode", "speculator", "proposer", "eagle", "medusa", "draft", "mtp")
_MODEL_FILES: Final = ("model_executor/models/", "model_executor/layers/", "vllm/models/", "vllm_ascend/models/")
_COMPILER_FILES: Final = ("torch/_dynamo", "torch/_inductor", "torch/_functorch", "vllm/compilation")
_TUNER_FILES: Final = ("autotuner.py", "triton_heuristics.py", "select_algorithm.py")

_CAPTURE: Final = frozenset(
    {
        *("capture_model", "capture", "_capture", "capture_graph", "_capture_cudagraphs", "_warmup_and_capture"),
        *("_capture_budget_graph", "_capture_ubatches", "_capture_ubatch_thread", "capture_inner_cudagraphs"),
    }
)
_SAMPLE: Final = frozenset({"_dummy_sampler_run", "_dummy_pooler_run", "_dummy_pooler_run_task"})
_WARM_KERNELS: Final = frozenset({"kernel_warmup", "warmup_kernels"})
_RUN_STEP: Final = frozenset({"execute_model", "sample_tokens", "execute_dummy_batch"})
_PROFILE: Final = frozenset(
    {
        *("determine_available_memory", "determine_num_available_blocks", "profile_num_available_blocks"),
        *("profile_run", "warming_up_model"),
    }
)
_ENCODE: Final = frozenset(
    {
        *("profile_encoder_cache", "_execute_mm_encoder", "get_multimodal_embeddings", "embed_multimodal"),
        *("_process_image_input", "_process_video_input", "get_image_features", "get_video_features"),
    }
)
_COMPILE: Final = frozenset(
    {
        *("compile", "_compile", "_compile_inner", "compile_fx", "compile_fx_inner", "_compile_fx_inner"),
        *("codegen_and_compile", "aot_compile", "compile_wrapper_inner", "call_user_compiler"),
    }
)
_TUNE: Final = frozenset(
    {
        *("_bench", "bench", "do_bench", "do_bench_gpu", "benchmark", "benchmark_all_configs", "autotune"),
        *("autotune_to_one_config", "_profile_runners", "_profile_single_kernel"),
    }
)
_PLAN: Final = frozenset(
    {
        *("_check_enough_kv_cache_memory", "check_enough_kv_cache_memory", "_auto_fit_max_model_len"),
        *("get_kv_cache_configs", "get_kv_cache_config", "unify_kv_cache_configs", "get_kv_cache_groups"),
        *("raise_if_cache_size_invalid", "generate_scheduler_kv_cache_config", "check_kv_cache_spec_registry"),
        *("reserve_mm_ipc_gpu_memory", "_reserve_mm_ipc_gpu_memory", "resolve_kv_cache_layout"),
    }
)
_ALLOCATE: Final = frozenset(
    {
        *("initialize_from_config", "initialize_kv_cache", "initialize_kv_cache_tensors", "init_kv_cache"),
        *("_allocate_kv_cache", "_allocate_kv_cache_tensors", "_reshape_kv_cache_tensors", "allocate_gpu_cache"),
        *("initialize_cache", "init_cache_engine", "_init_cache_engine"),
        *("bind_kv_cache", "bind_kv_cache_to_layers"),
    }
)
_WARM: Final = frozenset({"compile_or_warm_up_model", "_compile_or_warm_up_model"})
_LOAD: Final = frozenset(
    {
        *("load_model", "_load_model", "get_model", "initialize_model", "create_weights", "load_weights"),
        *("process_weights_after_loading", "_process_weights_after_loading"),
    }
)
_INIT: Final = frozenset(
    {
        *("init_device", "_init_device", "init_gpu_memory", "request_memory", "init_distributed_environment"),
        *("init_worker_distributed_environment", "_init_worker_distributed_environment"),
        *("ensure_model_parallel_initialized", "initialize_model_parallel"),
    }
)


@attrs.frozen(slots=True)
class _Rule:
    """
    Inside one of the states ``inside`` a frame of one of the ``functions`` leads to ``state``.

    Attributes:
        functions: Empty for any.
        part: None keeps the part where the state stays the same.
        files: Pieces of paths, one of which the frame's file holds; empty for any.
    """

    functions: frozenset[str]
    state: str
    inside: frozenset[str]
    part: str | None = None
    files: tuple[str, ...] = ()

    def is_of(self, frame: Frame) -> bool:
        """Whether it is about such a frame, inside whatever state."""
        is_function = not self.functions or frame.function in self.functions
        return is_function and (not self.files or _is_in(frame, self.files))


def _is_in(frame: Frame, pieces: Iterable[str]) -> bool:
    return any(piece in frame.file for piece in pieces)


def _rule(
    functions: Iterable[str],
    state: str,
    *inside: str,
    part: str | None = None,
    files: tuple[str, ...] = (),
) -> _Rule:
    return _Rule(frozenset(functions), state, frozenset(inside), part, files)


#: The first rule that holds for a frame counts.
_RULES: Final = (
    _rule({"_cleanup_profiling_kv_cache", "_teardown_profiling_state"}, "teardown", _NOWHERE, *_PROFILING),
    _rule({"profile_cudagraph_memory"}, THROWAWAY, _NOWHERE, *_PROFILING),
    _rule({"_init_minimal_kv_cache_for_profiling"}, "bootstrap_kv", _NOWHERE, *_PROFILING),
    _rule(_ALLOCATE, "bootstrap_kv", "bootstrap_kv", THROWAWAY),
    _rule(_CAPTURE, THROWAWAY, *_PROFILING, files=_ENGINE_FILES),
    _rule(_CAPTURE, REAL, REAL, "warmup", "allocate_kv", files=_ENGINE_FILES),
    _rule((), REAL, "warmup", "allocate_kv", files=_GRAPH_FILES),
    _rule(_PROFILE, "profile_activations", _NOWHERE, "init_device", "load_weights", "profile_activations"),
    _rule(_SAMPLE, "profile_activations", "profile_activations", part="sampler"),
    _rule(_ENCODE, "profile_activations", "profile_activations", part="encoder"),
    _rule(_COMPILE, "profile_activations", "profile_activations", part="compile", files=_COMPILER_FILES),
    _rule(_TUNE, "profile_activations", "profile_activations", part="autotune", files=_TUNER_FILES),
    _rule(_PLAN, "size_kv", _NOWHERE, "profile_activations", "size_kv", "allocate_kv"),
    _rule(_ALLOCATE, "allocate_kv", _NOWHERE, "size_kv", "allocate_kv"),
    _rule(_WARM, "warmup", _NOWHERE, "size_kv", "allocate_kv", "warmup"),
    # All that V0 does in it is to capture.
    _rule({"_warm_up_model", "warm_up_model"}, REAL, _NOWHERE, "allocate_kv"),
    _rule(_SAMPLE, "verify", "warmup", "verify", part="sampler_warmup"),
    _rule({"load_model"}, "load_weights", "load_weights", part="draft_worker_init", files=_DRAFT_FILES),
    _rule(_LOAD, "load_weights", _NOWHERE, "init_device", "load_weights"),
    _rule({"__init__"}, "load_weights", _NOWHERE, "init_device", "load_weights", files=_MODEL_FILES),
    _rule(_INIT, "init_device", _NOWHERE, "init_device"),
    _rule({"__init__"}, "init_device", _NOWHERE, "init_device", files=("pynccl.py", "custom_all_reduce.py")),
    _rule({"run_busy_loop", "wake_up", "sleep"}, "serving", _NOWHERE, files=_ENGINE_FILES),
)


@functools.lru_cache(maxsize=1_024)
def _rules_of(frame: Frame) -> tuple[_Rule, ...]:
    """Ranks print the same frames, and so do exceptions that are raised from each other."""
    return tuple(rule for rule in _RULES if rule.is_of(frame))


def located(frames: Sequence[Frame], heard: Heard) -> Place:
    """State and part in which a stack of frames stands; None for what it does not prove."""
    state, part = _NOWHERE, None
    for frame in frames:
        rule = next((rule for rule in _rules_of(frame) if state in rule.inside), None)
        there = (rule.state, rule.part) if rule is not None else _by_course(frame, state, heard)
        if there is None:
            continue
        inner = there[1] or (_graph_part(frame) if there[0] in (REAL, THROWAWAY) else None)
        part = part or inner if there[0] == state else inner
        state = there[0]
    if state != _NOWHERE:
        return state, part
    # Between the calls to the workers the engine only plans.
    is_planning = bool(frames) and frames[-1].function == "_initialize_kv_caches"
    return "size_kv" if is_planning else None, None


def sampler_place(seen: Place, heard: Heard) -> Place:
    """Where a dummy run of the sampler ran out of memory: by frames, by the course, else after the capture."""
    if seen[0] in ("profile_activations", "verify"):
        return seen
    place = sampling(heard)
    return place if place[0] is not None else ("verify", "sampler_warmup")


def _by_course(frame: Frame, state: str, heard: Heard) -> tuple[str, str | None] | None:
    """Where a function that runs in several states was called, as far as the course tells."""
    name = frame.function
    if name in _WARM_KERNELS and state in (_NOWHERE, "warmup"):
        return _warmed(name, heard)
    if state != _NOWHERE:
        return None
    if _is_in(frame, _GRAPH_FILES) or (name in _CAPTURE and _is_in(frame, _ENGINE_FILES)):
        return capture_state(heard), None
    if name in _SAMPLE:
        place, part = sampling(heard)
        return None if place is None else (place, part)
    if name in _RUN_STEP and _is_in(frame, _ENGINE_FILES):
        is_early = heard.state in ("init_device", "load_weights", "profile_activations") and not is_sized(heard)
        return ("profile_activations", None) if is_early else ("serving", None)
    return None


def _warmed(name: str, heard: Heard) -> tuple[str, str | None]:
    """Kernels are warmed before the capture; by ``warmup_kernels`` after it, in versions that capture first."""
    has_captured = heard.state in (REAL, "verify") or any(map(heard.has, ("L103", "L104", "L105")))
    is_before = name == "kernel_warmup" or heard.state in ("size_kv", "allocate_kv", "warmup")
    return ("warmup", None) if is_before and not has_captured else ("verify", "kernel_warmup")


def _graph_part(frame: Frame) -> str | None:
    if _is_in(frame, _DRAFT_FILES):
        return "draft"
    return "encoder" if "encoder" in frame.file else None
