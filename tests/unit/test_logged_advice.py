"""Advice on logged starts: values that the printed numbers allow, in the engine's own spelling, in one direction."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from startup_fsm.logged.start import read_start
from startup_fsm.memory import GIB
from tests.unit.logged_starts import HALF, Log, changes, flag, gib, mib, value


def advice(verdict, setting):
    """The advice on one setting."""
    return next(each for each in verdict.advice if any(change.setting == setting for change in each.changes))


def negative(left: float, *, total: float = 80, share: float = 0.5, **knobs) -> Log:
    """A start whose budget is negative, with all its terms."""
    log = Log(version="0.26.0", **knobs)
    only = log.process().state("init_device").figures(free_at_start_bytes=gib(total - 1), total_bytes=gib(total))
    only.figures(requested_bytes=gib(total * share), gpu_memory_utilization=share)
    only.state("load_weights").figures(weights_bytes=gib(total * share - left - 3))
    only.figures(engine_activation_bytes=gib(2.5), engine_outside_torch_bytes=gib(0.5))
    only.state("size_kv").figures(kv_available_bytes=gib(left))
    only.fails("budget", "no_blocks", error="ValueError", message="No available memory for the cache blocks.")
    return log


class TestRaise:
    def test_solved(self):
        """The smallest utilization that leaves room for a KV cache, and the interval that the device allows."""
        verdict = negative(-2.0).verdict()
        found = advice(verdict, "gpu_memory_utilization")

        # 42 GiB are charged, 80/64 GiB stand in for one request, and the margin and the digits come on top.
        assert found.changes[0].to == pytest.approx(0.542, abs=0.001)
        assert found.interval == (found.changes[0].to, 0.987)
        assert found.changes[0].flag == f"--gpu-memory-utilization {found.changes[0].to:.3f}"
        assert found.leftover_bytes == pytest.approx(gib(79) - gib(80) * found.changes[0].to, abs=2)

    def test_nothing_fits(self):
        """Where no share helps none is said, and how much is missing is."""
        verdict = negative(-60.0).verdict()

        assert ("gpu_memory_utilization", "raise") not in changes(verdict)
        assert verdict.missing_bytes == pytest.approx(gib(100 + 80 / 64 - 79) + 2 * HALF, abs=2)
        assert "missing" in advice(verdict, "tensor_parallel_size").because

    def test_fewer_tokens(self):
        """The step is cut by what is missing, where that is less than it takes."""
        verdict = negative(-0.5, max_num_batched_tokens=8192).verdict()

        to = value(verdict, "max_num_batched_tokens")
        assert to % 16 == 0
        assert 2.5 * (1 - to / 8192) >= 0.5

    def test_not_by_tokens_alone(self):
        """A step that takes less than what is missing is no help."""
        assert ("max_num_batched_tokens", "lower") not in changes(negative(-9.0).verdict())

    def test_explicit_bytes(self):
        """Where the KV bytes are explicit no share moves them."""
        verdict = negative(-2.0, kv_cache_memory_bytes=GIB).verdict()

        assert all(setting != "gpu_memory_utilization" for setting, _ in changes(verdict))

    def test_a_fraction(self):
        """SGLang's share is one of what was free before loading."""
        log = Log("sglang", mem_fraction_static=0.55)
        only = log.process().state("load_weights")
        only.figures(weights_bytes=gib(45), avail_after_load_bytes=gib(34)).state("size_kv")
        only.fails("budget", "no_blocks", message="Not enough memory. Please try to increase --mem-fraction-static.")
        verdict = log.verdict()

        # 45 GiB of 79 are 0.570; one sixty-fourth for a cache, the margin, and the digits.
        assert value(verdict, "mem_fraction_static") == 0.587
        assert flag(verdict, "mem_fraction_static") == "--mem-fraction-static 0.587"


class TestLower:
    def test_near_miss(self):
        """What is free, on the safe side of the printed digits."""
        log = Log()
        only = log.process().state("init_device").figures(free_at_start_bytes=gib(19.77), total_bytes=gib(22.05))
        only.figures(requested_bytes=gib(19.84), gpu_memory_utilization=0.9)
        only.fails("budget", "not_enough_free", part="pre_load_check", message="Free memory on device")
        verdict = log.verdict()

        assert value(verdict, "gpu_memory_utilization") == 0.896
        assert flag(verdict, "gpu_memory_utilization") == "--gpu-memory-utilization 0.896"
        assert 0.896 * (22.05 + 0.005) <= 19.77 - 0.005

    def test_room_for_graphs_too(self):
        """Where graphs come on top of the request, what is free must hold them as well."""
        log = Log(version="0.25.1")
        only = log.process().state("init_device").figures(free_at_start_bytes=gib(139.29), total_bytes=gib(139.8))
        only.figures(requested_bytes=gib(139.38), gpu_memory_utilization=0.997)
        only.fails("budget", "not_enough_free", part="pre_load_check", message="Free memory on device")

        assert value(log.verdict(), "gpu_memory_utilization") == 0.989

    def test_the_first_step(self):
        """A step that failed at one block may ask for four; the KV cache that stays is said."""
        log = Log(version="0.30.0")
        only = log.process().state("init_device").figures(free_at_start_bytes=gib(79), total_bytes=gib(80))
        only.figures(requested_bytes=gib(76), gpu_memory_utilization=0.95)
        only.state("size_kv").figures(kv_available_bytes=gib(40), kv_tokens=400_000, max_model_len=8192)
        only.state("verify").figures(sampler_dummy_requests=1024)
        only.fails("oom", "sampler_out_of_memory", oom_tried_bytes=gib(1), oom_free_bytes=gib(0.5))
        verdict = log.verdict()

        # 76 - (4 - 0.5) - 0.0625 GiB of 80.
        assert value(verdict, "gpu_memory_utilization") == 0.905
        assert "of KV cache stay" in advice(verdict, "gpu_memory_utilization").because
        assert value(verdict, "max_num_seqs") == 128

    def test_no_room_for_one_request(self):
        """A share that leaves no room for one longest request is no advice."""
        log = Log(version="0.30.0")
        only = log.process().state("init_device").figures(free_at_start_bytes=gib(79), total_bytes=gib(80))
        only.figures(requested_bytes=gib(76), gpu_memory_utilization=0.95)
        only.state("size_kv").figures(kv_available_bytes=gib(2), kv_tokens=20_000, max_model_len=16_384)
        only.state("verify").fails("oom", "out_of_memory", oom_tried_bytes=gib(1), oom_free_bytes=gib(0.5))

        assert changes(log.verdict()) == [("max_num_seqs", "lower"), ("max_num_batched_tokens", "lower")]

    def test_as_much_as_one_request_leaves(self):
        """Where four blocks leave too little, the share falls as far as one longest request lets it, with a margin."""
        log = Log(version="0.30.0", max_num_batched_tokens=8192)
        only = log.process().state("init_device").figures(free_at_start_bytes=gib(79), total_bytes=gib(80))
        only.figures(requested_bytes=gib(76), gpu_memory_utilization=0.95)
        only.state("size_kv").figures(kv_available_bytes=gib(6), kv_tokens=32_768, max_model_len=16_384)
        only.state("verify", "kernel_warmup").fails(
            "oom", "out_of_memory", oom_tried_bytes=gib(2), oom_free_bytes=gib(1)
        )
        verdict = log.verdict()

        given = round(80 * (0.95 - value(verdict, "gpu_memory_utilization")), 3)
        assert 1 < given < 3
        # A quarter of what 8192 tokens asked for at once was free twice over.
        assert value(verdict, "max_num_batched_tokens") == 1024

    def test_not_even_the_failed_block(self):
        """Where one longest request leaves less than the failed block lacked, no share is said."""
        log = Log(version="0.30.0")
        only = log.process().state("init_device").figures(free_at_start_bytes=gib(79), total_bytes=gib(80))
        only.figures(requested_bytes=gib(76), gpu_memory_utilization=0.95)
        only.state("size_kv").figures(kv_available_bytes=gib(3), kv_tokens=17_000, max_model_len=16_384)
        only.state("serving").fails("oom", "out_of_memory", oom_tried_bytes=gib(2), oom_free_bytes=gib(1))

        assert ("gpu_memory_utilization", "lower") not in changes(log.verdict())

    def test_rows_of_the_sampler(self):
        """What the sampler asks for goes by sequences: fewer tokens of a step are no answer."""
        log = Log(version="0.30.0")
        only = log.process().state("size_kv").figures(kv_available_bytes=gib(6))
        only.state("verify").fails(
            "oom", "out_of_memory", part="sampler_warmup", oom_tried_bytes=gib(2), oom_free_bytes=gib(1)
        )

        assert ("max_num_batched_tokens", "lower") not in changes(log.verdict())

    def test_weights_that_were_measured_as_nothing(self):
        """Of a sum without the weights no value follows; the direction does."""
        log = Log(version="0.7.2")
        only = log.process().state("load_weights").figures(weights_bytes=0).sign("weights_not_measured")
        only.state("size_kv").figures(requested_bytes=gib(21), total_bytes=gib(23.5), gpu_memory_utilization=0.9)
        only.figures(kv_available_bytes=gib(21), kv_tokens=170_000, max_model_len=8192)
        only.state("allocate_kv").fails("oom", "out_of_memory", oom_tried_bytes=gib(0.6), oom_free_bytes=gib(0.4))
        verdict = log.verdict()

        assert "F69" in verdict.findings[0].finding.message
        assert changes(verdict)[:2] == [("gpu_memory_utilization", "lower"), ("engine_version", "set")]
        assert value(verdict, "gpu_memory_utilization") is None

    @pytest.mark.parametrize(
        ("state", "reason", "category"),
        [("capture_throwaway", "out_of_memory", "oom"), ("bootstrap_kv", "out_of_memory", "oom")],
    )
    def test_profile_of_graphs(self, state, reason, category):
        """The estimate switched off is measured all the same: explicit KV bytes and no graphs skip the profile."""
        log = Log(version="0.28.0")
        log.process().state(state).fails(category, reason, oom_tried_bytes=gib(2), oom_free_bytes=gib(1))
        said = changes(log.verdict())

        assert ("kv_cache_memory_bytes", "set") in said
        assert ("enforce_eager", "set") in said
        assert ("graph_estimate", "remove") not in said

    def test_old_versions_have_no_explicit_bytes(self):
        """A flag that the version does not have is not said."""
        for version, has in (("0.9.2", False), ("0.10.2", True)):
            log = Log(version=version)
            only = log.process().state("init_device").figures(free_at_start_bytes=gib(79), total_bytes=gib(80))
            only.figures(requested_bytes=gib(72), gpu_memory_utilization=0.9, weights_bytes=gib(15))
            only.state("size_kv").figures(kv_available_bytes=gib(50), max_model_len=8192)
            only.state("capture_graphs").sign("runner", runner="V1").figures(graph_actual_bytes=gib(2)).ready()

            assert (("kv_cache_memory_bytes", "set") in changes(log.verdict())) == has

    def test_the_engines_own_suggestion(self):
        """Its number is repeated where the log's figures agree with it, and replaced where they do not."""
        for said, to in ((gib(47.8), gib(47.8)), (gib(30), gib(48) - mib(64)), (gib(49), gib(48) - mib(64))):
            log = Log(version="0.25.1")
            only = log.process().state("init_device").figures(free_at_start_bytes=gib(79), total_bytes=gib(80))
            only.figures(requested_bytes=gib(72), gpu_memory_utilization=0.9)
            only.state("size_kv").figures(kv_available_bytes=gib(50)).sign("runner", runner="V2")
            only.state("capture_graphs").figures(graph_actual_bytes=gib(2), suggested_kv_bytes_requested=said).ready()

            assert value(log.verdict(), "kv_cache_memory_bytes") == to


class TestLengths:
    def request(self, **figures):
        """One longest request that does not fit."""
        log = Log(version="0.22.1")
        only = log.process().state("size_kv").figures(**figures)
        only.fails("budget", "request_does_not_fit", part="request_fits", message="To serve at least one request")
        return log.verdict()

    def test_the_engines_word(self):
        """The length that the engine computed."""
        verdict = self.request(
            max_model_len=32768,
            kv_needed_bytes=gib(4.5),
            kv_available_bytes=gib(3.58),
            estimated_max_model_len=26032,
        )

        assert flag(verdict, "max_model_len") == "--max-model-len 26032"
        assert changes(verdict)[0] == ("max_model_len", "lower")

    def test_solved(self):
        """Without it, the share of the request that there is room for, in whole blocks, on the safe side."""
        verdict = self.request(max_model_len=100_000, kv_needed_bytes=gib(4.26), kv_available_bytes=gib(4.25))

        assert value(verdict, "max_model_len") == 99_520
        assert 99_520 * (4.26 + 0.005) <= 100_000 * (4.25 - 0.005)

    def test_useless(self):
        """A length that is of no use comes last, and is said to be little."""
        verdict = self.request(
            max_model_len=131072, kv_needed_bytes=gib(1.34), kv_available_bytes=gib(0.3), estimated_max_model_len=720
        )

        assert changes(verdict)[0] == ("gpu_memory_utilization", "raise")
        assert changes(verdict)[-1] == ("max_model_len", "lower")
        assert ("kv_cache_dtype", "set") not in changes(verdict)

    def test_v0(self):
        """The tokens that the KV cache holds."""
        verdict = self.request(max_model_len=131072, kv_tokens=81536)

        assert value(verdict, "max_model_len") == 81536
        assert flag(verdict, "kv_cache_dtype") == "--kv-cache-dtype fp8"

    def test_sequences(self):
        """As many sequences as there are state blocks."""
        log = Log(version="0.25.1")
        only = log.process().state("size_kv").figures(max_num_seqs=1024, mamba_blocks=614)
        only.fails("budget", "sequences_do_not_fit", message="max_num_seqs (1024) exceeds")

        assert flag(log.verdict(), "max_num_seqs") == "--max-num-seqs 614"


class TestDevices:
    def test_first_doubling_that_fits(self):
        """Weights and cache are split; the first doubling that leaves one request its room."""
        log = Log(version="0.26.0", tensor_parallel_size=2)
        only = log.process().state("init_device").figures(free_at_start_bytes=gib(79), total_bytes=gib(80))
        only.figures(requested_bytes=gib(72), gpu_memory_utilization=0.9, weights_bytes=gib(160))
        only.figures(kv_available_bytes=gib(-91)).state("size_kv")
        only.fails("budget", "no_blocks", message="No available memory")

        # At 4 devices 80 GiB of weights are freed, at 8 it is 120.
        assert value(log.verdict(), "tensor_parallel_size") == 8

    def test_by_labels(self):
        """How many there are is read from the ranks where nobody said it."""
        log = Log()
        for rank in range(4):
            log.process(f"TP{rank}", rank).state("load_weights")
        log.processes[2].fails("oom", "out_of_memory", oom_tried_bytes=GIB, oom_free_bytes=0)

        assert value(log.verdict(), "tensor_parallel_size") == 8


class TestSpelling:
    def test_capture_sizes_by_version(self):
        """Each version's own flag; V0 has none, and captures every size up to its sequences."""
        for version, spelled in (
            ("0.9.2", "--cuda-graph-sizes 256"),
            ("0.12.0", "--max-cudagraph-capture-size 256"),
        ):
            log = Log(version=version, capture_sizes=[1, 2, 512])
            log.process().sign("runner", runner="V1").state("capture_graphs").fails("oom", "driver_out_of_memory")

            assert flag(log.verdict(), "capture_sizes") == spelled
        log = Log(version="0.7.3", max_num_seqs=256)
        log.process().state("capture_graphs").fails("oom", "driver_out_of_memory")

        assert flag(log.verdict(), "max_num_seqs") == "--max-num-seqs 128"

    def test_sglang(self):
        """The last resort and the largest batch in SGLang's words."""
        log = Log("sglang", capture_sizes=[1, 32])
        log.process().state("capture_graphs").fails("oom", "driver_out_of_memory")
        verdict = log.verdict()

        assert flag(verdict, "capture_sizes") == "--cuda-graph-max-bs 16"
        assert flag(verdict, "enforce_eager") == "--disable-cuda-graph"

    def test_unknown_engine(self):
        """An engine that nobody named has no flags."""
        log = Log("torch")
        log.process().state("load_weights").fails("oom", "out_of_memory", oom_tried_bytes=GIB, oom_free_bytes=0)

        assert all(change.flag is None for each in log.verdict().advice for change in each.changes)

    def test_a_cure_that_it_has(self):
        """A version that has the cure is not told to take it."""
        for version, told in (("0.25.1", True), ("0.30.0", False)):
            log = Log(version=version)
            log.process().sign("runner", runner="V2").state("capture_graphs").fails("oom", "driver_out_of_memory")

            assert (("engine_version", "set") in changes(log.verdict())) == told


BYTES = st.floats(min_value=0.1, max_value=200).map(gib)


@given(
    total=BYTES,
    share=st.floats(min_value=0.05, max_value=1).map(lambda value: round(value, 3)),
    weights=BYTES,
    graphs=st.one_of(st.none(), BYTES),
    tried=st.one_of(st.none(), BYTES),
    state=st.sampled_from(["size_kv", "allocate_kv", "capture_graphs", "verify", "ready"]),
)
def test_no_value_is_refused_by_the_numbers(total, share, weights, graphs, tried, state):
    """A share that is said leaves room for a KV cache, does not exceed what was free, and is none that it had."""
    log = Log(version="0.26.0")
    free = total - GIB // 2
    asked = round(total * share)
    only = log.process().state("init_device").figures(free_at_start_bytes=free, total_bytes=total)
    only.figures(requested_bytes=asked, gpu_memory_utilization=share, weights_bytes=weights)
    only.figures(kv_available_bytes=asked - weights).state("size_kv").sign("runner", runner="V2")
    if graphs is not None:
        only.figures(graph_actual_bytes=graphs)
    if state == "ready":
        only.ready()
    elif state == "size_kv":
        only.fails("budget", "no_blocks", message="No available memory")
    else:
        told = {} if tried is None else {"oom_tried_bytes": tried, "oom_free_bytes": 0}
        only.state(state).fails("oom", "out_of_memory", **told)
    verdict = log.verdict()
    sizing = read_start(log.sources()).sizing

    assert sizing is not None
    for each in verdict.advice:
        for change in each.changes:
            if change.setting == "gpu_memory_utilization" and change.to is not None:
                assert change.to != share
                assert (change.to > share) == (change.direction == "raise")
                assert total * change.to - weights > 0
                assert total * change.to + sizing.later_bytes <= free
            if change.setting == "kv_cache_memory_bytes" and change.to is not None:
                assert 0 < change.to < max(asked - weights, 1)


FIGURES = (
    "total_bytes",
    "free_at_start_bytes",
    "requested_bytes",
    "weights_bytes",
    "engine_activation_bytes",
    "engine_outside_torch_bytes",
    "weights_and_non_torch_bytes",
    "graph_estimate_bytes",
    "graph_actual_bytes",
    "kv_available_bytes",
    "kv_cache_bytes",
    "kv_needed_bytes",
    "kv_tokens",
    "max_model_len",
    "max_num_seqs",
    "mamba_blocks",
    "estimated_max_model_len",
    "suggested_kv_bytes_requested",
    "oom_tried_bytes",
    "oom_free_bytes",
    "process_bytes",
    "torch_allocated_bytes",
    "torch_reserved_bytes",
    "gpu_memory_utilization",
    "mem_fraction_static",
    "avail_after_load_bytes",
    "avail_after_pool_bytes",
    "avail_after_capture_bytes",
    "k_bytes",
    "v_bytes",
    "initial_free_bytes",
    "current_free_bytes",
    "sampler_dummy_requests",
    "cpu_blocks",
)
REASONS = (
    "not_enough_free",
    "external_weights",
    "free_grew",
    "free_fell",
    "no_blocks",
    "request_does_not_fit",
    "sequences_do_not_fit",
    "ranks_differ",
    "unbalanced",
    "out_of_memory",
    "driver_out_of_memory",
    "sampler_out_of_memory",
    "host_out_of_memory",
    "not_capturable",
    "no_kernel_image",
    "illegal_access",
    "pool_use_count",
    "workspace_locked",
    "ipc_handle",
    "graph_pool_id",
    "peer",
    "timeout",
    "signal",
    "",
)
CATEGORIES = ("budget", "raised", "oom", "host_oom", "capture", "pool", "peer", "signal")
STATES = ("init_device", "load_weights", "profile_activations", "bootstrap_kv", "capture_throwaway", "size_kv")
LATER = ("allocate_kv", "warmup", "capture_graphs", "verify", "serving", "a_state_of_its_own")
SIGNS = ("graph_profile_disabled", "graph_profile_enabled", "graphs_skipped", "kv_pinned", "unified_memory")
NUMBERS = st.one_of(st.integers(-(2**40), 2**40), st.sampled_from([0, 1, -1]))
KNOBS = st.dictionaries(
    st.sampled_from(
        ["kv_cache_memory_bytes", "max_num_seqs", "capture_sizes", "tensor_parallel_size", "enforce_eager"]
    ),
    st.one_of(st.integers(-8, 2**40), st.booleans(), st.text(max_size=8), st.lists(st.integers(0, 512), max_size=3)),
)


@given(
    source=st.sampled_from(["vllm", "vllm-ascend", "sglang", "torch", "unknown"]),
    version=st.sampled_from([None, "0.6.3", "0.8.5", "0.19.1", "0.25.1", "0.33.0", "not a version"]),
    knobs=KNOBS,
    figures=st.dictionaries(st.sampled_from(FIGURES), NUMBERS),
    signs=st.lists(st.sampled_from(SIGNS), max_size=3),
    state=st.sampled_from((None, *STATES, *LATER)),
    end=st.one_of(st.just("ready"), st.just("stops"), st.tuples(st.sampled_from(CATEGORIES), st.sampled_from(REASONS))),
)
def test_whatever_a_log_says(source, version, knobs, figures, signs, state, end):
    """Every start gets a verdict whose advice says each setting once and gives no value that it had."""
    log = Log(source, version, **knobs)
    only = log.process("TP0", 0)
    if state is not None:
        only.state(state)
    only.figures(**figures)
    for name in signs:
        only.sign(name)
    if end == "ready":
        only.ready()
    elif end != "stops":
        told = {name: size for name, size in figures.items() if name in ("oom_tried_bytes", "oom_free_bytes")}
        only.fails(*end, message="as printed", **told)
    verdict = log.verdict()
    said = [change.setting for each in verdict.advice for change in each.changes]

    assert verdict.outcome in {"ready", "oom", "error", "hang", "incomplete", "interrupted"}
    assert len(said) == len(set(said))
    assert all(change.to is None or change.to != change.before for each in verdict.advice for change in each.changes)
    assert all(isinstance(account.bytes, int) for account in verdict.ledger)
    assert verdict.as_json()["outcome"] == attrs.asdict(verdict)["outcome"]
