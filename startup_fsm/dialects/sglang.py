"""
SGLang: its flags, its budget and its known faults, as data.

    KV bytes = free now - free before loading x (1 - mem_fraction_static)

so the fraction is a share of what was free before loading, and holds the weights and the pool; graphs and activations
must find room in the rest.
"""

from __future__ import annotations

from typing import Final

from startup_fsm.dialects.base import Charged, Cure, DefaultRunner, Dialect, Flag, KnownFault
from startup_fsm.dialects.versions import ANY, Span

_of = Span.of

_FLAGS: Final = {
    "mem_fraction_static": (Flag(spelling="--mem-fraction-static {}", decimals=3, least=0.001, most=0.999),),
    "max_model_len": (Flag(spelling="--context-length {}", unit="tokens", least=1),),
    "max_running_requests": (Flag(spelling="--max-running-requests {}", unit="requests", least=1),),
    "max_num_seqs": (Flag(spelling="--max-running-requests {}", unit="requests", least=1),),
    "chunked_prefill_size": (Flag(spelling="--chunked-prefill-size {}", unit="tokens", least=1),),
    "capture_sizes": (Flag(spelling="--cuda-graph-max-bs {}", unit="largest batch", least=1),),
    "enforce_eager": (Flag(spelling="--disable-cuda-graph"),),
    "tensor_parallel_size": (Flag(spelling="--tp-size {}", least=1),),
    "pipeline_parallel_size": (Flag(spelling="--pp-size {}", least=1),),
    "kv_cache_dtype": (Flag(spelling="--kv-cache-dtype {}"),),
    "quantization": (Flag(spelling="--quantization {}"),),
    "device_selection": (Flag(spelling="CUDA_VISIBLE_DEVICES={}"),),
}

_KNOWN: Final = (
    KnownFault(
        issue="sglang#7249",
        what="this build of the kernels has no code for this device",
        cure="a build for its architecture (Blackwell: CUDA 12.8 or later)",
        cures=(Cure(setting="engine_version", direction="set"),),
        codes=frozenset({"capture.failed", "state.raised"}),
        reason="no_kernel_image",
    ),
    KnownFault(
        issue="sglang#5416, sglang#5426",
        what="the seed was broadcast on the wrong device, and its contexts lie on one GPU as the draft is checked",
        cure="a version after 0.4.5; SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK=1 passes the check",
        cures=(Cure(setting="engine_version", direction="set", to="0.4.6"),),
        codes=frozenset({"ranks.uneven"}),
        words=("eagleworker", "eagle_worker", "draft_worker", "draft_worker_init"),
        span=_of(None, "0.4.6"),
    ),
    KnownFault(
        issue="sglang#1533, sglang#5426",
        what="ranks on unlike or partly used devices are refused beyond a tenth of difference",
        cure="SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK=1 passes the check",
        codes=frozenset({"ranks.uneven"}),
    ),
    KnownFault(
        issue="sglang#11275",
        what="what one rank raises inside a capture is hidden: the others wait for it in a collective",
        cure="the stack of the rank that prints nothing shows the error",
        codes=frozenset({"capture.stalled"}),
        sign="addresses_registered",
        span=_of(None, "0.5.4"),
    ),
    KnownFault(
        issue="sglang#29942",
        what="a buffer of DeepEP is made inside the capture",
        codes=frozenset({"capture.failed", "capture.out_of_memory"}),
        words=("deep_ep", "deepep"),
    ),
    KnownFault(
        issue="sglang#14476",
        what="piecewise graphs of many ragged sizes have no bound",
        cure="fewer sizes",
        codes=frozenset({"capture.out_of_memory"}),
        words=("piecewise",),
    ),
    KnownFault(
        issue="sglang#16143",
        what="the first graph pays one-off workspaces of several GiB",
        codes=frozenset({"capture.out_of_memory"}),
        words=("flashattention", "fa3", "deepseek"),
    ),
    KnownFault(
        issue="sglang#4330",
        what="with a draft model the window between too little for the pool and too little for the rest may be empty",
        cure="fewer capture sizes or a smaller draft widen it",
        codes=frozenset({"budget.negative", "capture.out_of_memory"}),
        setting="speculative",
    ),
    KnownFault(
        issue="sglang#36583",
        what="garbage of loading was still held when free memory was read",
        codes=frozenset({"budget.negative"}),
        words=("eagle",),
    ),
)

SGLANG: Final = Dialect(
    engine="sglang",
    share="mem_fraction_static",
    share_of="",
    flags=_FLAGS,
    charged=(Charged(figures=("weights_bytes",)),),
    # Whether graphs have room is a guess in the fraction, made before anything is known of them: nothing is reserved
    # that could be compared.
    runners=(DefaultRunner(runner="SGLang", span=ANY),),
    known=_KNOWN,
)
