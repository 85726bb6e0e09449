"""
Known faults of vLLM around capture and around memory that a text log can show; the others are in ``vllm_known_ranks``.

Rows of the reference's table that only a live process can show (a holder, a pool id, a tag) have no entry.
"""

from __future__ import annotations

from typing import Final

from startup_fsm.dialects.base import Cure, KnownFault
from startup_fsm.dialects.versions import Span

_of = Span.of
_CAPTURING: Final = frozenset({"capture_throwaway", "capture_graphs"})
_GRAPHS: Final = frozenset({"graphs.not_reserved", "graphs.estimate_short", "capture.out_of_memory"})
_ESTIMATE_OFF: Final = Cure(
    setting="graph_estimate", direction="remove", flag="VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0"
)


#: What skips the profiling capture; the estimate switched off only keeps what was measured from being taken off.
_UNPROFILED: Final = (
    Cure(setting="kv_cache_memory_bytes", direction="set"),
    Cure(setting="enforce_eager", direction="set", flag="--enforce-eager"),
)
_SKIPS: Final = "explicit KV bytes and starts without graphs skip the profiling capture"


def _version(to: str) -> tuple[Cure, ...]:
    return (Cure(setting="engine_version", direction="set", to=to),)


CAPTURE: Final = (
    KnownFault(
        reference="F01",
        issue="vllm#49224",
        what="the V2 runner, the default of dense models since 0.25.1, reserves nothing for its graphs",
        cure="cured in 0.29.0 (vllm#53306); until then VLLM_USE_V2_MODEL_RUNNER=0 has the runner that does",
        cures=_version("0.29.0"),
        codes=frozenset({"graphs.not_reserved"}),
        runner="V2",
        span=_of("0.25.1", "0.29.0"),
        by_version=True,
    ),
    KnownFault(
        reference="F02",
        issue="vllm#53679, vllm#53682",
        what="graphs of the draft model were captured into the pool that the real capture opens again",
        cure="builds with vllm#53682, 0.29.0 among them, use a throwaway pool for all of the profile",
        cures=_version("0.29.0"),
        codes=frozenset({"capture.pool_reused"}),
        words=("cachinghostallocator",),
        span=_of("0.28.0", "0.29.0"),
    ),
    KnownFault(
        reference="F03",
        issue="vllm#28426",
        what="a pool id was used again after all its graphs were gone",
        codes=frozenset({"capture.pool_reused"}),
        words=("cudacachingallocator",),
    ),
    KnownFault(
        reference="F04",
        issue="vllm#53581, vllm#53584, vllm#53593",
        what="the model looks up metadata of a layer that a profiling step does not build",
        cure=f"a build with the fix of that model; {_SKIPS}",
        cures=_UNPROFILED,
        codes=frozenset({"state.raised", "capture.failed"}),
        words=("keyerror",),
        states=frozenset({"capture_throwaway", "bootstrap_kv"}),
        span=_of("0.28.0", None),
    ),
    KnownFault(
        reference="F05",
        issue="vllm#55774",
        what="a query of the profiling capture is longer than the workspace that was sized for it",
        cure=f"fewer capture sizes; {_SKIPS}",
        cures=(*_UNPROFILED, Cure(setting="capture_sizes", direction="lower")),
        codes=frozenset({"state.raised", "capture.failed"}),
        words=("query length", "query_len", "exceeds workspace"),
        states=frozenset({"capture_throwaway"}),
        span=_of("0.28.0", None),
    ),
    KnownFault(
        reference="F06",
        issue="vllm#48840",
        what="symmetric memory of NCCL needs the id of the graph pool, which the V2 runner does not set",
        codes=frozenset({"capture.failed"}),
        reason="graph_pool_id",
    ),
    KnownFault(
        reference="F07",
        issue="vllm#36634",
        what="the override of the profiling blocks leaked into the real start",
        cure="0.18.1 has the fix; without the profile it does not come up",
        cures=_version("0.18.1"),
        codes=frozenset({"capture.failed", "state.raised"}),
        sign="blocks_overridden",
        states=_CAPTURING | {"bootstrap_kv"},
        span=_of("0.17.0", "0.18.1"),
    ),
    KnownFault(
        reference="F08",
        issue="vllm#30515, vllm#34094",
        what="capture sizes were capped to the state blocks after they had been chosen",
        cure="0.20.2 refuses such a start and says how many sequences fit",
        codes=frozenset({"budget.sequences_do_not_fit"}),
        sign="capture_sizes_capped",
        span=_of("0.16.0", "0.20.0"),
    ),
    KnownFault(
        reference="F10",
        issue="vllm#50780",
        what="the first full sample may hold a transient of its warm-up, as with hybrid models, which is no graph",
        cure="pin the KV bytes, or switch the estimate off and lower the utilization by the real graphs",
        codes=frozenset({"graphs.estimate_long"}),
        runner="V1",
        span=_of("0.18.0", None),
    ),
    KnownFault(
        reference="F12",
        issue="vllm#53013, vllm#45178",
        what="one large sample is multiplied by the number of graphs",
        cure="VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 started at a lower utilization",
        cures=(_ESTIMATE_OFF,),
        codes=frozenset({"graphs.estimate_absurd"}),
        span=_of("0.18.0", None),
    ),
    KnownFault(
        reference="F13",
        issue="vllm#57475, vllm#57595",
        what="nothing but the estimate is kept for the graphs; the 150 MiB of the printed suggestion are not (F17)",
        codes=frozenset({"graphs.estimate_short"}),
        span=_of("0.20.0", None),
    ),
    KnownFault(
        reference="F41",
        issue="vllm#43923, vllm#42609",
        what="expandable segments and the registration of custom all-reduce exclude each other",
        cure="without expandable_segments in PYTORCH_CUDA_ALLOC_CONF, or --disable-custom-all-reduce",
        codes=frozenset({"capture.failed"}),
        reason="ipc_handle",
    ),
    KnownFault(
        reference="F45",
        issue="vllm#40381",
        what="the workspace of FlashInfer has a fixed size, smaller than this shape needs",
        cure="fewer batched tokens, or a larger VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE",
        codes=frozenset({"state.raised", "capture.failed", "workspace.grew"}),
        words=("alignedallocator", "workspace buffer", "buffer overflow when allocating"),
    ),
    KnownFault(
        reference="F55",
        issue="vllm#45032, vllm#48179",
        what="a shape that was not run before the workspace was locked needs a larger one",
        cure="fewer batched tokens, or a build that warms this shape",
        codes=frozenset({"workspace.grew"}),
        span=_of("0.13.0", None),
    ),
    KnownFault(
        reference="F59",
        issue="vllm#29049, vllm#25914",
        what="with adapters every graph is captured twice, once with and once without them",
        cure="-O '{\"cudagraph_specialize_lora\": false}' captures one set",
        cures=(Cure(setting="lora", direction="lower", flag="-O '{\"cudagraph_specialize_lora\": false}'"),),
        codes=_GRAPHS | {"verify.out_of_memory"},
        setting="lora",
        span=_of("0.11.1", None),
    ),
    KnownFault(
        reference="F60",
        issue="vllm#36720, vllm#44740, vllm#48526",
        what="a driver that gives memory back late, or shares it with the host, makes free readings lie",
        cure="pin the KV bytes",
        codes=frozenset({"graphs.estimate_negative"}),
        span=_of("0.17.0", None),
    ),
)

MEMORY: Final = (
    KnownFault(
        reference="F09",
        issue="vllm#34094, vllm#38270",
        what="a hybrid model needs one state block for every sequence",
        codes=frozenset({"budget.sequences_do_not_fit"}),
    ),
    KnownFault(
        reference="F15",
        issue="vllm#48483",
        what="the profiling KV cache was sized by tokens and not by sequences",
        cure=f"a build with vllm#48483, 0.27.0 among them; {_SKIPS}",
        cures=(*_version("0.27.0"), *_UNPROFILED),
        codes=frozenset({"kv.out_of_memory"}),
        states=frozenset({"bootstrap_kv"}),
        span=_of("0.18.0", "0.27.0"),
        by_version=True,
    ),
    KnownFault(
        reference="F36",
        issue="vllm#40256, vllm#37096",
        what="with sleep mode memory outside torch comes out negative, and the KV cache too large",
        cure="cured in 0.27.1 (vllm#49208)",
        cures=_version("0.27.1"),
        codes=frozenset({"budget.counted_twice"}),
        span=_of("0.7.0", "0.27.1"),
    ),
    KnownFault(
        reference="F37",
        issue="vllm#48680, vllm#49151",
        what="with sleep mode the pool keeps the source copy of weights that were processed",
        cure="without sleep mode it loads",
        codes=frozenset({"weights.exceed_device", "device.out_of_memory"}),
        words=("cumem",),
        states=frozenset({"load_weights"}),
    ),
    KnownFault(
        reference="F38",
        issue="vllm#13941",
        what="what sleep gave back was taken by somebody else, and nothing looks before it wakes up",
        cure="find out who took it",
        cures=(Cure(setting="other_process", direction="investigate"),),
        codes=frozenset({"device.out_of_memory"}),
        words=("wake_up",),
        states=frozenset({"serving"}),
    ),
    KnownFault(
        reference="F42",
        issue="vllm#40812, vllm#29544",
        what="expandable segments exclude the memory pools of sleep mode",
        cure="without expandable_segments in PYTORCH_CUDA_ALLOC_CONF",
        codes=frozenset({"state.raised"}),
        words=("expandable segments are not compatible",),
    ),
    KnownFault(
        reference="F43",
        issue="vllm#40887, flashinfer#4916",
        what="the autotuner runs after the KV cache has filled the device; where it runs out it keeps untuned kernels",
        cure="a lower utilization leaves it room",
        codes=frozenset({"device.out_of_memory"}),
        sign="autotuner_fell_back",
        states=frozenset({"warmup"}),
    ),
    KnownFault(
        reference="F44",
        issue="vllm#47127",
        what="a workspace for experts is sized for the worst routing",
        cure="fewer batched tokens",
        codes=frozenset({"profile.out_of_memory"}),
        words=("workspace", "cutlass", "fused_moe"),
    ),
    KnownFault(
        reference="F47",
        issue="vllm#48037, vllm#37521",
        what="sampling with several draft tokens is not in the profile",
        cure="a lower utilization, or fewer sequences",
        codes=frozenset({"verify.out_of_memory", "device.out_of_memory"}),
        setting="speculative",
    ),
    KnownFault(
        reference="F49",
        issue="vllm#14067, vllm#13221",
        what="the draft model was loaded after the measurement",
        cure="0.8 and later count it",
        cures=_version("0.9.0"),
        codes=frozenset({"kv.out_of_memory", "graphs.not_reserved"}),
        setting="speculative",
        span=_of(None, "0.8.0"),
        by_version=True,
    ),
    KnownFault(
        reference="F50",
        issue="vllm#11210, vllm#48469",
        what="the encoder of a multimodal model was not in the profile",
        cure="0.7.0 and later profile it",
        cures=_version("0.7.0"),
        codes=frozenset({"device.out_of_memory"}),
        states=frozenset({"serving"}),
        span=_of("0.6.4", "0.7.0"),
        by_version=True,
    ),
    KnownFault(
        reference="F52",
        issue="vllm#52872, vllm#52935",
        what="the profile passes over the recurrent kernels of a hybrid model, and their buffers are not in it",
        cure="fewer batched tokens, or a lower utilization",
        codes=frozenset({"verify.out_of_memory"}),
        words=("gated_delta", "gdn_attn", "/fla/"),
    ),
    KnownFault(
        reference="F53",
        issue="vllm#56698",
        what="explicit KV bytes skip the measurement, and nothing compares them with what is free",
        codes=frozenset({"budget.pinned_too_large"}),
        span=_of("0.10.2", None),
    ),
    KnownFault(
        reference="F58",
        issue="vllm#30637, vllm#27508, vllm#17939",
        what="the sampler runs after capture on purpose, and its buffers are not in the budget",
        cure="fewer sequences, or a lower utilization",
        codes=frozenset({"verify.out_of_memory"}),
        words=("sampler",),
    ),
    KnownFault(
        reference="F65",
        issue="vllm#41158, vllm#41268",
        what="torch 2.10 splits large blocks while weights are processed, and small ones keep them",
        cure="cured in 0.22.1",
        cures=_version("0.22.1"),
        codes=frozenset({"weights.exceed_device", "device.out_of_memory"}),
        words=("process_weights_after_loading",),
        states=frozenset({"load_weights"}),
        span=_of("0.16.0", "0.22.1"),
    ),
    KnownFault(
        reference="F67",
        issue="vllm#34954, vllm#36384",
        what="kernels tune themselves on the first request, not in the profile",
        cure="a lower utilization, or a build with vllm#36384",
        codes=frozenset({"device.out_of_memory"}),
        words=("autotun", "/fla/"),
        states=frozenset({"serving", "verify"}),
    ),
    KnownFault(
        reference="F69",
        issue="vllm#13036",
        what="the weights were measured on another device than the one that they are on, as nothing",
        cure="a later version measures the device that it uses",
        cures=(Cure(setting="engine_version", direction="set"),),
        codes=frozenset(
            {"kv.out_of_memory", "graphs.not_reserved", "capture.out_of_memory", "verify.out_of_memory"}
            | {"device.out_of_memory"}
        ),
        sign="weights_not_measured",
        span=_of(None, "0.8.0"),
    ),
)
