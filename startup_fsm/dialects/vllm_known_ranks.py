"""Known faults of vLLM that lie with other processes, other ranks, the platform or the host."""

from __future__ import annotations

from typing import Final

from startup_fsm.dialects.base import Cure, KnownFault
from startup_fsm.dialects.versions import Span

_of = Span.of


def _version(to: str) -> tuple[Cure, ...]:
    return (Cure(setting="engine_version", direction="set", to=to),)


OTHERS: Final = (
    KnownFault(
        reference="F19",
        issue="vllm#53591, vllm#45534",
        what="a driver that gives memory back late looks like a neighbour that left",
        cure="0.29.0 goes on where ROCm says so",
        cures=_version("0.29.0"),
        codes=frozenset({"device.neighbour_shrank", "device.drift"}),
        words=("rocm", "gfx9", "hip error"),
        span=_of("0.9.2", "0.29.0"),
    ),
    KnownFault(
        reference="F19",
        issue="vllm#33358",
        what="free memory that did not move at all failed the check",
        cure="0.18.1 lets it pass",
        cures=_version("0.18.1"),
        codes=frozenset({"device.drift"}),
        reason="free_fell",
        span=_of("0.9.2", "0.18.0"),
    ),
    KnownFault(
        reference="F20",
        issue="vllm#55827, vllm#55828",
        what="what a neighbour takes while this engine profiles is charged to this engine",
        cure="start engines that share a device one after the other",
        codes=frozenset({"device.neighbour_grew"}),
        span=_of("0.27.1", None),
    ),
    KnownFault(
        reference="F20",
        issue="vllm#18974, vllm#19312",
        what="memory of other processes was charged to this engine",
        cure="cured in 0.9.2",
        cures=_version("0.9.2"),
        codes=frozenset({"device.neighbour_grew"}),
        span=_of("0.6.4", "0.9.2"),
    ),
    KnownFault(
        reference="F22",
        issue="vllm#13131",
        what="on unified memory what the host frees looks like memory of the device",
        cure="start again while the host is quiet, or pin the KV bytes",
        codes=frozenset({"device.neighbour_shrank", "device.drift"}),
        sign="unified_memory",
    ),
    KnownFault(
        reference="F23",
        issue="vllm#48140",
        what="on unified memory the page cache counts as used, though it could be had",
        cure="drop the page cache before the start",
        cures=(Cure(setting="host_memory", direction="investigate", flag="echo 3 > /proc/sys/vm/drop_caches"),),
        codes=frozenset({"device.not_enough_free"}),
        sign="unified_memory",
    ),
    KnownFault(
        reference="F24",
        issue="vllm#46307, vllm#56824",
        what="on unified memory compilers, page cache and KV cache compete for the same bytes",
        codes=frozenset({"host.out_of_memory"}),
        sign="unified_memory",
    ),
    KnownFault(
        reference="F26",
        issue="vllm#39874",
        what="on a MIG slice an assertion of the allocator hides that memory ran out",
        cure="without expandable_segments in PYTORCH_CUDA_ALLOC_CONF it says so",
        codes=frozenset({"state.raised", "device.out_of_memory", "weights.exceed_device"}),
        words=("nvml_success == r",),
    ),
    KnownFault(
        reference="F27",
        issue="vllm#41848, vllm#50463",
        what="the name of a MIG slice in CUDA_VISIBLE_DEVICES is read as a number",
        cure="give it by its number",
        cures=(Cure(setting="device_selection", direction="set"),),
        codes=frozenset({"state.raised"}),
        words=("'mig-", '"mig-'),
    ),
    KnownFault(
        reference="F30",
        issue="vllm#25359",
        what="NCCL takes its memory after the first look, so nobody is charged for it",
        cure="cured in 0.12.0",
        cures=_version("0.12.0"),
        codes=frozenset({"graphs.not_reserved", "capture.out_of_memory", "verify.out_of_memory", "ranks.uneven"}),
        several=True,
        died=True,
        span=_of("0.9.2", "0.12.0"),
        by_version=True,
    ),
    KnownFault(
        reference="F31",
        issue="vllm#45517",
        what="with tensor and pipeline parallelism one rank may hold far more communicators than the others",
        codes=frozenset({"ranks.uneven"}),
        setting="pipeline_parallel_size",
    ),
    KnownFault(
        reference="F32",
        issue="vllm#34080, vllm#34076, vllm#14120",
        what="stages differ in layers, logits and sampler; the one with least memory for each layer decides for all",
        cure="VLLM_PP_LAYER_PARTITION gives it fewer layers",
        codes=frozenset({"ranks.uneven"}),
        reason="stages",
    ),
    KnownFault(
        reference="F33",
        issue="vllm#54710",
        what="every rank chose the layout of its KV cache by itself",
        codes=frozenset({"ranks.disagree"}),
        words=("layout",),
        span=_of("0.28.0", None),
    ),
    KnownFault(
        reference="F71",
        issue="vllm#58165, flashinfer#5450",
        what="a tuned kernel is used for a shape that it was not tuned for",
        cure="without the autotuner it starts",
        codes=frozenset({"state.raised"}),
        words=("autotun", "tactic"),
        states=frozenset({"warmup", "profile_activations", "verify"}),
    ),
    KnownFault(
        issue="vllm#46933, vllm#45850",
        what="pinning host memory for offloaded KV while a capture is open is not permitted and hangs it",
        cure="a build with vllm#46958, or no offload while starting",
        codes=frozenset({"capture.stalled", "capture.failed", "run.ended_without_trace"}),
        words=("cudahostregister", "hostregister"),
        states=frozenset({"capture_throwaway", "capture_graphs"}),
        span=_of("0.24.0", "0.25.0"),
    ),
    KnownFault(
        issue="vllm-ascend#6611, vllm-ascend#5020",
        what="tensors that layers of a hybrid model share are allocated more than once",
        cure="a lower utilization until it is cured: 0.75 started where 0.85 did not",
        codes=frozenset({"kv.out_of_memory"}),
        words=("vllm_ascend",),
    ),
)
