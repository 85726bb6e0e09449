"""Starts of public threads, by their figures: outcome, first finding, advice that helps, and none that hurts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from startup_fsm.findings import CODES, SETTINGS
from startup_fsm.memory import KIB
from tests.unit.logged_starts import Log, changes, codes, gib, mib

#: Of a start that stops: nothing is wrong with it that the log shows.
STOPS = ("run.ended_without_trace",)


@attrs.frozen
class Case:
    """What a right reader says of a log."""

    outcome: str
    state: str | None
    first: tuple[str | None, ...]
    accepts: tuple[tuple[str, str], ...] = ()
    forbidden: tuple[tuple[str, str], ...] = ()
    part: str | None = None


CASES: dict[str, tuple[Callable[[], Log], Case]] = {}

RAISE, LOWER, SET, REMOVE, LOOK = "raise", "lower", "set", "remove", "investigate"
UTILIZATION, FRACTION = "gpu_memory_utilization", "mem_fraction_static"


def case(outcome: str, state: str | None, *first: str | None, **more: Any) -> Callable[[Any], Any]:
    """Register a log with what is right about it."""

    def registered(made: Callable[[], Log]) -> Callable[[], Log]:
        CASES[made.__name__] = (made, Case(outcome, state, first, **more))
        return made

    return registered


@case(
    "error",
    "size_kv",
    "budget.negative",
    "weights.exceed_request",
    accepts=((FRACTION, RAISE), ("tensor_parallel_size", RAISE), ("quantization", SET)),
    forbidden=((FRACTION, LOWER),),
)
def negative_tokens() -> Log:
    log = Log("sglang")
    first = log.process("DP0 TP0", 0).state("load_weights")
    first.figures(weights_bytes=gib(166.59), avail_after_load_bytes=gib(21.73)).state("size_kv")
    first.figures(kv_tokens=-561981, max_total_tokens_requested=131072)
    for rank in range(1, 8):
        log.process(f"DP{rank} TP{rank}", rank).state("size_kv").figures(kv_tokens=-561981)
    first.fails("budget", "no_blocks", message="Not enough memory. Please try to increase --mem-fraction-static.")
    return log


@case(
    "error",
    "capture_graphs",
    "capture.failed",
    accepts=(("engine_version", SET), ("none", LOOK)),
    forbidden=(
        (FRACTION, RAISE),
        (FRACTION, LOWER),
        ("enforce_eager", SET),
        ("capture_sizes", LOWER),
        (UTILIZATION, LOWER),
    ),
)
def no_kernel_image() -> Log:
    log = Log("sglang")
    only = log.process().state("load_weights").figures(weights_bytes=gib(23.23), avail_after_load_bytes=gib(6.9))
    only.state("allocate_kv").figures(kv_tokens=21456, k_bytes=gib(1.64), v_bytes=gib(1.64))
    only.figures(avail_after_pool_bytes=gib(3.36)).state("capture_graphs")
    only.figures(avail_before_capture_bytes=gib(2.85))
    only.fails("capture", "no_kernel_image", message="RMSNorm failed with error code no kernel image is available")
    return log


@case(
    "error",
    "load_weights",
    "ranks.uneven",
    accepts=(("engine_version", SET), ("device_selection", LOOK)),
    forbidden=((FRACTION, RAISE), (UTILIZATION, RAISE)),
    part="draft_worker_init",
)
def unbalanced_draft() -> Log:
    log = Log("sglang")
    only = log.process("TP1", 1).state("load_weights")
    only.figures(min_per_gpu_bytes=gib(8.884), local_free_bytes=gib(11.9016))
    frames = ("srt/managers/scheduler.py __init__", "srt/speculative/eagle_worker.py __init__")
    message = "The memory capacity is unbalanced. Some GPUs may be occupied by other processes."
    only.fails("raised", "unbalanced", part="draft_worker_init", error="ValueError", message=message, where=frames)
    return log


@case(
    "incomplete",
    "capture_graphs",
    "capture.stalled",
    "state.stalled",
    "run.ended_without_trace",
    accepts=((FRACTION, LOWER), ("capture_sizes", LOWER), ("enforce_eager", SET), ("engine_version", SET)),
    forbidden=((FRACTION, RAISE),),
)
def hidden_capture_failure() -> Log:
    log = Log("sglang")
    first = log.process("DP0 TP0", 0).state("capture_graphs")
    first.figures(avail_before_capture_bytes=gib(3.66), avail_first_batch_bytes=gib(3.10))
    first.sign("addresses_registered", n=0)
    for rank in range(1, 7):
        log.process(f"DP{rank} TP{rank}", rank).state("capture_graphs").sign("addresses_registered", n=0)
    return log


@case(
    "oom",
    "allocate_kv",
    "kv.out_of_memory",
    accepts=((FRACTION, LOWER), ("tensor_parallel_size", RAISE), ("quantization", SET)),
    forbidden=((FRACTION, RAISE),),
)
def pool_does_not_fit() -> Log:
    log = Log("sglang")
    log.process().state("allocate_kv").fails(
        "oom",
        "out_of_memory",
        error="torch.OutOfMemoryError",
        oom_tried_bytes=mib(32),
        oom_free_bytes=mib(13),
        total_bytes=gib(23.52),
        process_bytes=gib(23.48),
        torch_allocated_bytes=gib(22.67),
    )
    return log


@case(
    "oom",
    None,
    "device.out_of_memory",
    "weights.exceed_device",
    "device.neighbour_present",
    accepts=(("quantization", SET), ("tensor_parallel_size", RAISE), ("other_process", LOOK)),
    forbidden=((FRACTION, RAISE),),
)
def sentence_alone() -> Log:
    log = Log("sglang")
    log.process().fails(
        "oom",
        message="CUDA out of memory. Tried to allocate 226.00 MiB.",
        oom_tried_bytes=mib(226),
        oom_free_bytes=mib(71.25),
        total_bytes=gib(15.58),
        process_bytes=gib(13.94),
        torch_allocated_bytes=gib(13.64),
        torch_reserved_unallocated_bytes=mib(67.23),
    )
    return log


@case("incomplete", "allocate_kv", *STOPS, None)
def healthy_and_cut() -> Log:
    log = Log("sglang")
    for rank, left in enumerate((25.40, 25.37, 25.37, 25.52)):
        each = log.process(f"TP{rank}", rank).state("allocate_kv")
        each.figures(kv_tokens=2206208, k_bytes=gib(67.33), v_bytes=gib(67.33), avail_after_pool_bytes=gib(left))
    return log


@case("ready", None, None)
def summary_line_alone() -> Log:
    log = Log("sglang")
    log.process().figures(kv_tokens=2086558, avail_final_bytes=gib(17.22), max_running_requests=33).ready()
    return log


@case(
    "error",
    "size_kv",
    "graphs.estimate_absurd",
    accepts=(("graph_estimate", REMOVE), ("kv_cache_memory_bytes", SET)),
    forbidden=((UTILIZATION, RAISE),),
)
def estimate_of_118_gib() -> Log:
    log = Log()
    worker = log.process("DP1 TP1 EP3", 3).state("capture_throwaway").state("size_kv")
    worker.figures("Estimated CUDA graph memory: 118.65 GiB total", graph_estimate_bytes=gib(118.65))
    log.process().state("size_kv").fails("budget", "no_blocks", error="ValueError", message="No available memory")
    return log


@case(
    "error",
    "size_kv",
    "budget.request_does_not_fit",
    accepts=(("max_model_len", LOWER), (UTILIZATION, RAISE), ("kv_cache_dtype", SET)),
    forbidden=((UTILIZATION, LOWER), ("max_model_len", RAISE)),
    part="request_fits",
)
def one_million_tokens() -> Log:
    return _request(Log(), max_model_len=1048576, needed=22.5, left=17.39, fits=810208)


@case(
    "error",
    "size_kv",
    "budget.request_does_not_fit",
    accepts=((UTILIZATION, RAISE), ("capture_sizes", LOWER), ("tensor_parallel_size", RAISE), ("quantization", SET)),
    forbidden=((UTILIZATION, LOWER), ("max_model_len", RAISE)),
    part="request_fits",
)
def no_length_is_useful() -> Log:
    return _request(Log(), max_model_len=131072, needed=1.34, left=0.3, fits=720)


def _request(log: Log, *, max_model_len: int, needed: float, left: float, fits: int) -> Log:
    engine = log.process().state("size_kv")
    engine.figures(max_model_len=max_model_len, kv_needed_bytes=gib(needed), kv_available_bytes=gib(left))
    engine.figures(estimated_max_model_len=fits)
    engine.fails("budget", "request_does_not_fit", part="request_fits", error="ValueError", message="To serve at least")
    return log


@case(
    "error",
    "size_kv",
    "budget.negative",
    accepts=((UTILIZATION, RAISE), ("max_num_batched_tokens", LOWER), ("quantization", SET)),
    forbidden=((UTILIZATION, LOWER),),
)
def negative_budget_of_v0() -> Log:
    log = Log()
    only = log.process().state("load_weights").figures(weights_bytes=gib(5.2032)).state("profile_activations")
    only.figures(
        "the current vLLM instance can use total_gpu_memory (8.00GiB) x gpu_memory_utilization (0.70) = 5.60GiB",
        total_bytes=gib(8),
        gpu_memory_utilization=0.7,
        requested_bytes=gib(5.6),
    )
    only.figures(
        "PyTorch activation peak memory takes 1.42GiB",
        engine_outside_torch_bytes=gib(0.03),
        engine_activation_bytes=gib(1.42),
        kv_available_bytes=gib(-1.05),
    )
    only.state("size_kv").figures(gpu_blocks=0, cpu_blocks=4681, max_model_len=4096)
    only.fails("budget", "no_blocks", error="ValueError", message="No available memory for the cache blocks.")
    return log


@case(
    "error",
    "size_kv",
    "budget.sequences_do_not_fit",
    accepts=(("max_num_seqs", LOWER),),
    forbidden=((UTILIZATION, LOWER), ("max_num_seqs", RAISE)),
)
def fewer_state_blocks() -> Log:
    log = Log(version="0.25.1")
    engine = log.process().state("size_kv").figures(max_num_seqs=1024, mamba_blocks=614)
    engine.fails("budget", "sequences_do_not_fit", error="ValueError", message="max_num_seqs (1024) exceeds")
    return log


@case(
    "error",
    "init_device",
    "device.not_enough_free",
    accepts=(("other_process", LOOK), ("device_selection", LOOK)),
    forbidden=((UTILIZATION, RAISE), (UTILIZATION, LOWER)),
    part="pre_load_check",
)
def device_of_somebody_else() -> Log:
    return _free(Log(), free=0.22, total=30.3, share=0.7, asked=21.21)


@case(
    "error",
    "init_device",
    "device.not_enough_free",
    accepts=((UTILIZATION, LOWER), ("other_process", LOOK)),
    forbidden=((UTILIZATION, RAISE),),
    part="pre_load_check",
)
def missed_by_a_hair() -> Log:
    return _free(Log(), free=19.77, total=22.05, share=0.9, asked=19.84)


def _free(log: Log, *, free: float, total: float, share: float, asked: float) -> Log:
    engine = log.process().state("init_device")
    engine.figures(free_at_start_bytes=gib(free), total_bytes=gib(total), requested_bytes=gib(asked))
    engine.figures(gpu_memory_utilization=share)
    engine.fails(
        "budget", "not_enough_free", part="pre_load_check", error="ValueError", message="Free memory on device"
    )
    return log


@case(
    "error",
    "profile_activations",
    "device.neighbour_shrank",
    "device.drift",
    accepts=(("other_process", LOOK), ("kv_cache_memory_bytes", SET)),
    forbidden=((UTILIZATION, RAISE), (UTILIZATION, LOWER)),
)
def neighbour_left() -> Log:
    log = Log()
    engine = log.process().state("profile_activations")
    engine.figures(initial_free_bytes=gib(82.94), current_free_bytes=gib(90.17))
    engine.fails("raised", "free_grew", error="AssertionError", message="Error in memory profiling.")
    return log


@case(
    "oom",
    "allocate_kv",
    "host.out_of_memory",
    "run.ended_without_trace",
    accepts=((UTILIZATION, LOWER), ("cpu_kv_space", LOWER), ("host_memory", LOOK)),
    forbidden=((UTILIZATION, RAISE), ("max_model_len", LOWER)),
)
def killed_by_the_kernel() -> Log:
    log = Log(version="0.6.3")
    only = log.process().state("load_weights").figures(weights_bytes=gib(4.3752)).state("size_kv")
    only.figures(gpu_blocks=11836, cpu_blocks=4681, max_model_len=200).state("allocate_kv")
    only.fails("host_oom", "host_out_of_memory", error="", message="Killed")
    return log


@case(
    "oom",
    "capture_graphs",
    "graphs.not_reserved",
    "capture.out_of_memory",
    accepts=((UTILIZATION, LOWER), ("max_num_seqs", LOWER), ("enforce_eager", SET)),
    forbidden=((UTILIZATION, RAISE),),
)
def one_rank_of_thirty_two() -> Log:
    log = Log()
    head = log.process("pid 1001").state("capture_graphs", text="Capturing cudagraphs for decoding.")
    second = log.process("pid 2001 10.0.0.2").state("profile_activations")
    second.figures(total_bytes=gib(44.53), gpu_memory_utilization=0.98, requested_bytes=gib(43.64))
    second.figures(
        weights_bytes=gib(20.64),
        engine_outside_torch_bytes=gib(0.28),
        engine_activation_bytes=gib(1.52),
        kv_available_bytes=gib(21.20),
    )
    third = log.process("pid 3001 10.0.0.3").state("capture_graphs")
    third.fails("oom", "out_of_memory", message="CUDA out of memory", oom_tried_bytes=mib(2), oom_free_bytes=448 * KIB)
    assert head.open == "capture_graphs"
    return log


@case(
    "oom",
    "verify",
    "verify.out_of_memory",
    accepts=(("max_num_seqs", LOWER), (UTILIZATION, LOWER)),
    forbidden=((UTILIZATION, RAISE), ("max_num_seqs", RAISE)),
    part="sampler_warmup",
)
def sampler_with_1024_rows() -> Log:
    log = Log()
    first = log.process("rank 0", 0).state("verify").figures(sampler_dummy_requests=1024)
    first.fails(
        "oom",
        "sampler_out_of_memory",
        part="sampler_warmup",
        message="CUDA out of memory occurred when warming up sampler with 1024 dummy requests.",
        oom_tried_bytes=gib(1.74),
        oom_free_bytes=mib(953.94),
        total_bytes=gib(15.48),
        process_bytes=gib(14.53),
        torch_allocated_bytes=gib(12.19),
        graph_private_pool_bytes=mib(81.88),
    )
    log.process("rank 7", 7).state("verify").fails("oom", "sampler_out_of_memory", part="sampler_warmup")
    return log


@case(
    "oom",
    "capture_graphs",
    "graphs.not_reserved",
    "capture.out_of_memory",
    accepts=((UTILIZATION, LOWER), ("enforce_eager", SET), ("max_num_seqs", LOWER)),
    forbidden=((UTILIZATION, RAISE),),
)
def driver_ran_out_in_capture_end() -> Log:
    log = Log()
    only = log.process().state("profile_activations")
    only.figures(
        "the current vLLM instance can use total_gpu_memory (21.99GiB) x gpu_memory_utilization (0.98) = 21.55GiB",
        total_bytes=gib(21.99),
        gpu_memory_utilization=0.98,
        requested_bytes=gib(21.55),
    )
    only.state("capture_graphs").fails("oom", "driver_out_of_memory", message="CUDA error: out of memory")
    return log


@case(
    "oom",
    "load_weights",
    "weights.exceed_device",
    accepts=(("tensor_parallel_size", RAISE), ("pipeline_parallel_size", RAISE), ("quantization", SET)),
    forbidden=((UTILIZATION, RAISE), (UTILIZATION, LOWER)),
)
def weights_fill_the_device() -> Log:
    log = Log()
    log.process().state("load_weights").fails(
        "oom",
        "out_of_memory",
        oom_tried_bytes=mib(84),
        oom_free_bytes=mib(93.06),
        total_bytes=gib(31.35),
        process_bytes=gib(30.33),
        torch_allocated_bytes=gib(29.39),
        torch_reserved_unallocated_bytes=mib(309.08),
    )
    return log


@case(
    "oom",
    "serving",
    "device.out_of_memory",
    accepts=((UTILIZATION, LOWER), ("engine_version", SET)),
    forbidden=((UTILIZATION, RAISE),),
)
def first_images() -> Log:
    log = Log(version="0.6.5")
    only = log.process().state("size_kv").figures(gpu_blocks=31207).ready()
    only.open = None
    only.state("serving").fails(
        "oom", "out_of_memory", oom_tried_bytes=mib(322), oom_free_bytes=mib(249.88), total_bytes=gib(79.1)
    )
    return log


@case(
    "incomplete",
    "size_kv",
    "graphs.estimate_negative",
    accepts=(("kv_cache_memory_bytes", SET), ("graph_estimate", REMOVE), (UTILIZATION, LOWER)),
    forbidden=((UTILIZATION, RAISE), ("kv_cache_memory_bytes", RAISE)),
)
def estimate_gives_memory_back() -> Log:
    log = Log()
    only = log.process().state("teardown")
    only.figures("Estimated CUDA graph memory: -10.33 GiB total", graph_estimate_bytes=gib(-10.33))
    only.state("size_kv").figures(kv_available_bytes=gib(32.09))
    return log


@case("incomplete", "size_kv", *STOPS, None, "graphs.not_reserved")
def estimate_not_taken_off() -> Log:
    log = Log()
    only = log.process().state("teardown").figures(graph_estimate_bytes=gib(0.26))
    only.state("size_kv").figures(kv_available_bytes=gib(17.36), gpu_memory_utilization=0.7, kv_tokens=188640)
    only.sign("graph_profile_optional").sign("capture_sizes_capped", **{"from": 512, "to": 352})
    return log


@case(
    "ready",
    None,
    "graphs.not_reserved",
    "graphs.estimate_long",
    "budget.overrun",
    accepts=(("kv_cache_memory_bytes", SET), ("kv_cache_memory_bytes", LOWER), (UTILIZATION, LOWER)),
)
def estimate_switched_off() -> Log:
    log = Log()
    rank = log.process("PP1 TP2", 6).state("teardown").figures(graph_estimate_bytes=gib(0.58))
    rank.state("size_kv").sign("graph_profile_disabled")
    rank.state("capture_graphs").figures(graph_actual_bytes=gib(0.1))
    rank.figures(free_at_start_bytes=gib(22.93), total_bytes=gib(23.56), requested_bytes=gib(22.03))
    rank.figures(gpu_memory_utilization=0.935, weights_and_non_torch_bytes=gib(19.47))
    rank.figures(engine_activation_bytes=gib(0.6), kv_cache_bytes=gib(1.95))
    rank.figures(suggested_kv_bytes_requested=1828800984, suggested_kv_bytes_full=2798683648)
    rank.ready()
    return log


def eight_b(log: Log, *, estimate: float | None, share: float, asked: float, left: float, graphs: float) -> Any:
    """A Llama 8B shape on an H200, vLLM 0.25.1, all of it at level DEBUG, up to the end of the capture."""
    only = log.process().state("init_device").figures(free_at_start_bytes=gib(139.29), total_bytes=gib(139.8))
    only.figures(requested_bytes=gib(asked), gpu_memory_utilization=share)
    only.state("load_weights").figures(weights_bytes=gib(15)).state("profile_activations")
    if estimate is not None:
        only.state("teardown").figures(graph_estimate_bytes=gib(estimate))
    activation, outside = (1.78, 0.22) if estimate is None else (1.95, 0.23)
    only.figures(engine_activation_bytes=gib(activation), engine_outside_torch_bytes=gib(outside))
    only.state("size_kv").figures(kv_available_bytes=gib(left), kv_tokens=round(left * 8192), max_model_len=8192)
    return only.state("capture_graphs").figures(graph_actual_bytes=gib(graphs))


@case(
    "ready",
    None,
    "graphs.not_reserved",
    "budget.overrun",
    accepts=((UTILIZATION, LOWER), ("kv_cache_memory_bytes", SET), ("engine_version", SET)),
)
def second_runner_reserves_nothing() -> Log:
    log = Log(version="0.25.1")
    only = eight_b(log, estimate=None, share=0.9, asked=125.82, left=108.81, graphs=0.99)
    only.sign("runner", runner="V2").figures(suggested_kv_bytes_requested=115622026752)
    only.ready()
    return log


@case(
    "ready",
    None,
    "graphs.estimate_short",
    "budget.overrun",
    accepts=((UTILIZATION, LOWER), ("kv_cache_memory_bytes", SET)),
)
def estimate_is_short() -> Log:
    log = Log(version="0.25.1")
    only = eight_b(log, estimate=0.5, share=0.9, asked=125.82, left=108.14, graphs=0.65)
    only.sign("graph_profile_enabled").figures(suggested_kv_bytes_requested=115790727168).ready()
    return log


@case(
    "oom",
    "verify",
    "graphs.estimate_short",
    "budget.overrun",
    "verify.out_of_memory",
    accepts=((UTILIZATION, LOWER), ("max_num_seqs", LOWER), ("kv_cache_memory_bytes", SET)),
    forbidden=((UTILIZATION, RAISE), ("max_num_seqs", RAISE)),
    part="sampler_warmup",
)
def sampler_dies_at_0995() -> Log:
    log = Log(version="0.25.1")
    only = eight_b(log, estimate=0.5, share=0.995, asked=139.1, left=121.42, graphs=0.65)
    only.sign("graph_profile_enabled").state("verify").figures(sampler_dummy_requests=1024)
    only.fails(
        "oom",
        "sampler_out_of_memory",
        part="sampler_warmup",
        oom_tried_bytes=mib(502),
        oom_free_bytes=mib(343.12),
        process_bytes=gib(139.46),
        torch_allocated_bytes=gib(138.31),
        torch_reserved_unallocated_bytes=mib(129.65),
        graph_private_pool_bytes=mib(340),
    )
    return log


@case(
    "oom",
    "allocate_kv",
    "kv.out_of_memory",
    accepts=((UTILIZATION, LOWER), ("kv_cache_memory_bytes", SET), ("engine_version", SET)),
    forbidden=((UTILIZATION, RAISE),),
)
def tensors_twice_on_an_npu() -> Log:
    log = Log("vllm-ascend", version="0.13.0")
    log.process("TP0", 0).state("allocate_kv").fails(
        "oom",
        "out_of_memory",
        message="NPU out of memory. Tried to allocate 2.57 GiB",
        where=("vllm_ascend/worker/model_runner_v1.py _allocate_kv_cache_tensors",),
        oom_tried_bytes=gib(2.57),
        oom_free_bytes=gib(1.96),
        total_bytes=gib(60.96),
        torch_allocated_bytes=gib(57.49),
        torch_reserved_bytes=gib(57.62),
    )
    return log


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    """Each start is read as its thread found it, and nobody is sent the wrong way."""
    made, right = CASES[name]
    verdict = made().verdict()

    assert (verdict.outcome, verdict.failed_state) == (right.outcome, right.state)
    assert right.part is None or verdict.part == right.part
    assert next(iter(codes(verdict)), None) in right.first
    assert not right.accepts or set(changes(verdict)[:3]) & set(right.accepts)
    assert set(changes(verdict)) & set(right.forbidden) == set()


@pytest.mark.parametrize("name", CASES)
def test_words_are_registered(name: str) -> None:
    """Codes and settings are those of the lists; a setting is said once; every finding says where it was read."""
    verdict = CASES[name][0]().verdict()

    assert {each.finding.code for each in verdict.findings} <= set(CODES)
    said = [setting for setting, _ in changes(verdict)]
    assert set(said) <= set(SETTINGS)
    assert len(said) == len(set(said))
    assert all(each.evidence and all("line" in shown for shown in each.evidence) for each in verdict.findings)


@pytest.mark.parametrize("name", CASES)
def test_a_ready_start_has_no_error(name: str) -> None:
    """What a start came to ready with is no error."""
    verdict = CASES[name][0]().verdict()

    assert verdict.outcome != "ready" or all(each.finding.severity != "error" for each in verdict.findings)
