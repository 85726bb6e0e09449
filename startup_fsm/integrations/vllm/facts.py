"""
What vLLM's own objects say of a start, by our names: settings, figures, the runner.

Names that a version lacks are left out, and nothing here raises.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any, Final

#: Our setting to where vLLM keeps it: a part of its configuration, and the name there.
_SETTINGS: Final = {
    "gpu_memory_utilization": ("cache_config", "gpu_memory_utilization"),
    "kv_cache_memory_bytes": ("cache_config", "kv_cache_memory_bytes"),
    "kv_cache_dtype": ("cache_config", "cache_dtype"),
    "max_model_len": ("model_config", "max_model_len"),
    "max_num_seqs": ("scheduler_config", "max_num_seqs"),
    "max_num_batched_tokens": ("scheduler_config", "max_num_batched_tokens"),
    "tensor_parallel_size": ("parallel_config", "tensor_parallel_size"),
    "pipeline_parallel_size": ("parallel_config", "pipeline_parallel_size"),
    "enforce_eager": ("model_config", "enforce_eager"),
    "quantization": ("model_config", "quantization"),
}
#: What else decides how much memory a start takes, for the fingerprint.
_MORE: Final = {
    "model": ("model_config", "model"),
    "dtype": ("model_config", "dtype"),
    "load_format": ("load_config", "load_format"),
    "data_parallel_size": ("parallel_config", "data_parallel_size"),
    "block_size": ("cache_config", "block_size"),
    "cpu_offload_gb": ("cache_config", "cpu_offload_gb"),
    "cudagraph_mode": ("compilation_config", "cudagraph_mode"),
    "lora": ("lora_config", "max_lora_rank"),
    "speculative": ("speculative_config", "method"),
}


def attribute(owner: Any, *path: str) -> Any:
    """What lies at the end of a path of attributes; None where a step is missing."""
    for name in path:
        try:
            owner = getattr(owner, name, None)
        except Exception:  # noqa: BLE001 - properties of an engine may raise what they like
            return None
        if owner is None:
            return None
    return owner


def settings(config: Any) -> dict[str, Any]:
    """Settings by our names, as they are in force."""
    found = {name: plain(attribute(config, *path)) for name, path in _SETTINGS.items()}
    sizes = capture_sizes(config)
    if sizes:
        found["capture_sizes"] = sizes
    return {name: value for name, value in found.items() if value is not None}


def everything(config: Any) -> dict[str, Any]:
    """Settings, and what else decides about memory; equal where two starts should take the same."""
    more = {name: plain(attribute(config, *path)) for name, path in _MORE.items()}
    return settings(config) | {name: value for name, value in more.items() if value is not None}


def label(config: Any, rank: int | None) -> str | None:
    """What vLLM's log calls a worker, such as ``PP1 TP0``; None for the only one, and for one that is no rank."""
    sizes = (attribute(config, "parallel_config", f"{kind}_parallel_size") for kind in ("pipeline", "tensor"))
    stages, shards = (size if isinstance(size, int) and size > 0 else 1 for size in sizes)
    if rank is None:
        return None
    stage = [f"PP{rank // shards}"] if stages > 1 else []
    shard = [f"TP{rank % shards}"] if shards > 1 else []
    return " ".join(stage + shard) or None


def capture_sizes(config: Any) -> list[int]:
    """Batch sizes that get a graph; empty where none do."""
    sizes = attribute(config, "compilation_config", "cudagraph_capture_sizes")
    if attribute(config, "model_config", "enforce_eager") or not isinstance(sizes, list | tuple):
        return []
    return [size for size in sizes if isinstance(size, int)]


def plain(value: Any) -> Any:
    """A value that can be written down: numbers and words as they are, anything else by its name."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [plain(each) for each in value[:200]]
    name = getattr(value, "name", None)
    return name if isinstance(name, str) else str(value)[:200]


def version() -> str | None:
    """VLLM's version, in its own words."""
    try:
        return str(importlib.import_module("vllm").__version__)
    except Exception:  # noqa: BLE001 - a build without a version is one all the same
        return None


def runner_of(worker: Any) -> str | None:
    """``V1`` or ``V2``, by the module of the runner; None before there is one."""
    runner = attribute(worker, "model_runner")
    if runner is None:
        return None
    module = type(runner).__module__
    return "V2" if ".worker.gpu.model_runner" in module else "V1" if module.endswith("gpu_model_runner") else None


def baseline(worker: Any) -> Iterator[tuple[str, int | float]]:
    """Figures that a worker has after its device was made."""
    yield from _numbers(
        ("total_bytes", attribute(worker, "init_snapshot", "total_memory")),
        ("free_at_start_bytes", attribute(worker, "init_snapshot", "free_memory")),
        ("requested_bytes", attribute(worker, "requested_memory")),
    )


def weights(worker: Any) -> Iterator[tuple[str, int | float]]:
    """Figures that a worker has after its weights were loaded."""
    yield from _numbers(("weights_bytes", attribute(worker, "model_runner", "model_memory_usage")))


def profile(worker: Any) -> Iterator[tuple[str, int | float]]:
    """Figures that a worker has after it profiled."""
    estimate = attribute(worker, "cudagraph_memory_estimate")
    yield from _numbers(
        ("engine_activation_bytes", attribute(worker, "peak_activation_memory")),
        ("engine_outside_torch_bytes", attribute(worker, "non_torch_memory")),
        ("graph_estimate_bytes", estimate or None),
    )


def is_estimate_applied() -> bool | None:
    """Whether vLLM takes its own graph estimate off; None where this version has no such switch."""
    try:
        return bool(importlib.import_module("vllm.envs").VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS)
    except Exception:  # noqa: BLE001 - an older version
        return None


def kv_bytes(config: Any) -> int | None:
    """Bytes of the KV cache that a worker is told to allocate; None where this version says it otherwise."""
    tensors = attribute(config, "kv_cache_tensors")
    if isinstance(tensors, list | tuple):
        sizes = [attribute(each, "size") for each in tensors]
        known = [size for size in sizes if isinstance(size, int)]
        if known and len(known) == len(sizes):
            return sum(known)
    return None


def _numbers(*pairs: tuple[str, Any]) -> Iterator[tuple[str, int | float]]:
    for name, value in pairs:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            continue
        yield name, int(value) if name.endswith("_bytes") else value
