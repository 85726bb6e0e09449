"""vLLM: its flags, its budget and its wordings by version (0.6 to 0.33), as data."""

from __future__ import annotations

from typing import Final

import attrs

from startup_fsm.dialects.base import Charged, DefaultRunner, Dialect, Flag, Reservation, Wording
from startup_fsm.dialects.versions import ANY, Span
from startup_fsm.dialects.vllm_known import CAPTURE, MEMORY
from startup_fsm.dialects.vllm_known_ranks import OTHERS
from startup_fsm.memory import MIB

_of = Span.of

_FLAGS: Final = {
    "gpu_memory_utilization": (Flag(spelling="--gpu-memory-utilization {}", decimals=3, least=0.001, most=1.0),),
    "kv_cache_memory_bytes": (Flag(spelling="--kv-cache-memory {}", unit="bytes", least=1, span=_of("0.10.2", None)),),
    "max_model_len": (Flag(spelling="--max-model-len {}", unit="tokens", least=1),),
    "max_num_seqs": (Flag(spelling="--max-num-seqs {}", unit="sequences", least=1),),
    "max_num_batched_tokens": (Flag(spelling="--max-num-batched-tokens {}", unit="tokens", least=1),),
    # The runner of the years before has a graph for every size up to max_num_seqs, and no flag for them.
    "capture_sizes": (
        Flag(spelling="--cuda-graph-sizes {}", unit="largest size", least=1, span=_of("0.8.5", "0.11.1")),
        Flag(spelling="--max-cudagraph-capture-size {}", unit="largest size", least=1, span=_of("0.11.1", None)),
    ),
    "enforce_eager": (Flag(spelling="--enforce-eager"),),
    "tensor_parallel_size": (Flag(spelling="--tensor-parallel-size {}", least=1),),
    "pipeline_parallel_size": (Flag(spelling="--pipeline-parallel-size {}", least=1),),
    "kv_cache_dtype": (Flag(spelling="--kv-cache-dtype {}"),),
    "quantization": (Flag(spelling="--quantization {}"),),
    "graph_estimate": (
        Flag(
            spelling="VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS={}",
            unit="0 or 1, in the environment",
            least=0,
            most=1,
            span=_of("0.18.1", None),
        ),
    ),
    "cpu_kv_space": (Flag(spelling="--swap-space {}", unit="GiB", least=0, span=_of(None, "0.11.0")),),
    "device_selection": (Flag(spelling="CUDA_VISIBLE_DEVICES={}"),),
}

_CHARGED: Final = (
    Charged(
        figures=("weights_bytes", "engine_activation_bytes", "engine_outside_torch_bytes"),
        span=_of(None, "0.27.1"),
    ),
    # Device-wide: what anybody took between the first look and the end of the profile.
    Charged(figures=("weights_and_non_torch_bytes", "engine_activation_bytes"), span=_of("0.27.1", None)),
)

_RUNNERS: Final = (
    DefaultRunner(runner="V0", span=_of(None, "0.8.0")),
    DefaultRunner(runner="V1", span=_of("0.8.0", "0.25.1")),
    # Of dense models.
    DefaultRunner(runner="V2", span=_of("0.25.1", None)),
)

_RESERVATIONS: Final = (
    Reservation(runner="V0", how="no"),
    Reservation(runner="V1", how="no", span=_of(None, "0.18.0")),
    Reservation(runner="V1", how="opt_in", span=_of("0.18.0", "0.20.0")),
    Reservation(runner="V1", how="yes", span=_of("0.20.0", None)),
    Reservation(runner="V2", how="no", span=_of(None, "0.29.0")),
    Reservation(runner="V2", how="yes", span=_of("0.29.0", None)),
)

_WORDINGS: Final = (
    Wording(pattern=r"Loading model weights took \d", span=_of(None, "0.8.0")),
    Wording(pattern=r"Model loading took \d{1,6}\.\d{4} GB and ", span=_of("0.8.0", "0.8.5")),
    Wording(pattern=r"Model loading took \d{1,6}\.\d{4} GiB and ", span=_of("0.8.5", "0.14.0")),
    Wording(pattern=r"Model loading took \d{1,6}\.\d{4} GiB memory and ", span=_of("0.11.1", "0.14.0")),
    Wording(pattern=r"Model loading took \d{1,6}\.\d{1,2} GiB memory and ", span=_of("0.14.0", None)),
    Wording(pattern=r"Memory profiling results: total_gpu_memory", span=_of("0.6.4", "0.6.6"), runner="V0"),
    Wording(
        pattern=r"current vLLM instance can use total_gpu_memory|PyTorch activation peak memory takes",
        span=_of("0.6.6", "0.11.0"),
        runner="V0",
    ),
    Wording(pattern=r"# \w{1,12} blocks: \d{1,9}, # CPU blocks: \d", span=_of(None, "0.11.1"), runner="V0"),
    Wording(pattern=r"Capturing cudagraphs for decoding", span=_of("0.6.4", "0.11.0"), runner="V0"),
    Wording(pattern=r"Capturing the model for CUDA graphs", span=_of(None, "0.6.4"), runner="V0"),
    Wording(pattern=r"Available KV cache memory: -?\d{1,6}\.\d", span=_of("0.9.0", None)),
    Wording(pattern=r"(?:Estimated|Profiling) CUDA graph memory: ", span=_of("0.17.1", None), runner="V1"),
    Wording(pattern=r"In v0\.19, CUDA graph|become the default in v0\.19", span=_of("0.17.1", "0.20.0")),
    Wording(pattern=r"default (?:since|as of) v0\.21\.0", span=_of("0.20.2", None)),
    Wording(pattern=r"torch\.compile takes \d", span=_of("0.6.6", "0.18.0")),
    Wording(pattern=r"torch\.compile took \d|Initial profiling/warmup run took", span=_of("0.18.0", None)),
    Wording(pattern=r"non-torch forward increase memory", span=_of("0.9.2", "0.27.1")),
    Wording(pattern=r"consumed memory \(weights \+ non-torch\)|total consumed \(from mem", span=_of("0.27.0", None)),
    Wording(pattern=r"Using V2 Model Runner", span=_of("0.16.0", None), runner="V2"),
    Wording(pattern=r"init engine \(profile.{1,60} took \d{1,6}\.\d\d seconds", span=_of("0.6.6", "0.20.0")),
    Wording(pattern=r"init engine \(profile.{1,60} took \d{1,6}\.\d\d s(?: \(|\Z)", span=_of("0.20.0", None)),
    Wording(pattern=r"KV cache size: [\d,]{1,20} tokens, Maximum", span=_of("0.28.0", None)),
    Wording(pattern=r"exceeds available Mamba cache blocks", span=_of("0.20.0", None)),
    Wording(
        pattern=r"[Ee]rror in memory profiling\. Initial free memory \d{1,6}\.\d{1,3} GiB", span=_of("0.9.1", None)
    ),
    Wording(
        pattern=r"Free memory on device \([\d.]{1,12}/[\d.]{1,12} GiB\) on startup is less", span=_of("0.9.2", "0.14.0")
    ),
    Wording(pattern=r"Free memory on device \w{1,12}:\d{1,3} \(", span=_of("0.14.0", None)),
)

VLLM: Final = Dialect(
    engine="vllm",
    flags=_FLAGS,
    charged=_CHARGED,
    runners=_RUNNERS,
    reservations=_RESERVATIONS,
    wordings=_WORDINGS,
    known=(*CAPTURE, *MEMORY, *OTHERS),
    margin_bytes=150 * MIB,
)

#: vllm-ascend sizes as vLLM does, captures afterwards, and takes nothing off for it.
VLLM_ASCEND: Final = attrs.evolve(
    VLLM,
    engine="vllm-ascend",
    flags=_FLAGS | {"device_selection": (Flag(spelling="ASCEND_RT_VISIBLE_DEVICES={}"),), "graph_estimate": ()},
    runners=(DefaultRunner(runner="NPU", span=ANY),),
    reservations=(Reservation(runner="NPU", how="no"),),
    wordings=(),
)
