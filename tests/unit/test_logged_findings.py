"""Findings of logged starts: the first violated invariant, by state, version and figures."""

from __future__ import annotations

import pytest

from startup_fsm.memory import GIB
from tests.unit.logged_starts import Log, changes, codes, gib, mib, value


def sized(log: Log, *, estimate: float | None = None, actual: float | None = None, **signs: dict):
    """A process that came to the end of its capture, with terms that add up without any estimate."""
    only = log.process().state("init_device").figures(free_at_start_bytes=gib(79), total_bytes=gib(80))
    only.figures(requested_bytes=gib(72), gpu_memory_utilization=0.9)
    taken = max(0, estimate or 0) if "graph_profile_enabled" in signs else 0
    only.state("load_weights").figures(weights_bytes=gib(15), engine_activation_bytes=gib(2))
    only.figures(engine_outside_torch_bytes=gib(0.5))
    if estimate is not None:
        only.state("teardown").figures(graph_estimate_bytes=gib(estimate))
    only.state("size_kv").figures(kv_available_bytes=gib(54.5 - taken), kv_tokens=400_000, max_model_len=8192)
    for name, inputs in signs.items():
        only.sign(name, **inputs)
    only.state("capture_graphs")
    return only if actual is None else only.figures(graph_actual_bytes=gib(actual))


class TestGraphs:
    @pytest.mark.parametrize(
        ("version", "runner", "code"),
        [
            ("0.10.2", "V0", "graphs.not_reserved"),
            ("0.17.1", "V1", "graphs.not_reserved"),
            ("0.19.1", "V1", "graphs.not_reserved"),
            ("0.25.1", "V2", "graphs.not_reserved"),
            ("0.28.0", "V2", "graphs.not_reserved"),
        ],
    )
    def test_versions_that_reserve_nothing(self, version, runner, code):
        """V0, V1 before its profile and while it was opt-in, V2 before 0.29: graphs come on top."""
        log = Log(version=version)
        sized(log, actual=1, runner={"runner": runner}).ready()
        verdict = log.verdict()

        assert codes(verdict) == [code]
        assert verdict.findings[0].finding.state == "size_kv"
        assert verdict.findings[0].finding.severity == "warning"

    @pytest.mark.parametrize(
        ("actual", "code"), [(1.0, None), (1.05, None), (1.2, "graphs.estimate_short"), (0.4, "graphs.estimate_long")]
    )
    def test_estimate(self, actual, code):
        """An estimate is judged beyond 64 MiB and a tenth where it is short, 256 MiB and three tenths where it is long."""
        log = Log(version="0.30.0")
        sized(log, estimate=1.0, actual=actual, graph_profile_enabled={}).ready()

        assert codes(log.verdict()) == ([] if code is None else [code])

    def test_small_graphs(self):
        """Graphs that nobody would notice are no finding."""
        log = Log(version="0.17.1")
        sized(log, actual=0.05, runner={"runner": "V1"}).ready()

        assert codes(log.verdict()) == []

    def test_eager(self):
        """Without graphs nothing had to be reserved."""
        log = Log(version="0.25.1", enforce_eager=True)
        sized(log, graphs_skipped={}).ready()

        assert codes(log.verdict()) == []

    def test_capture_ran_out(self):
        """Where nothing was reserved, a capture that runs out is the fault of sizing."""
        log = Log(version="0.25.1")
        sized(log, runner={"runner": "V2"}).fails("oom", "driver_out_of_memory", message="CUDA error: out of memory")
        verdict = log.verdict()

        assert codes(verdict) == ["graphs.not_reserved"]
        assert verdict.findings[0].finding.severity == "error"
        assert verdict.failed_state == "capture_graphs"

    def test_capture_ran_out_of_its_estimate(self):
        """An estimate and all that lay outside the request were not enough: it was short."""
        log = Log(version="0.30.0")
        sized(log, estimate=1.0, graph_profile_enabled={}).fails("oom", "driver_out_of_memory", message="CUDA error")

        assert codes(log.verdict()) == ["graphs.estimate_short"]

    def test_nothing_is_known(self):
        """Without version and budget nobody can say what was reserved."""
        log = Log()
        log.process().state("capture_graphs").fails("oom", "driver_out_of_memory", message="CUDA error: out of memory")

        assert codes(log.verdict()) == ["capture.out_of_memory"]

    def test_sglang_is_not_judged(self):
        """A fraction that leaves room by a rule of thumb reserves nothing that could be compared."""
        log = Log("sglang")
        log.process().state("capture_graphs").fails("oom", "out_of_memory", oom_tried_bytes=GIB, oom_free_bytes=0)
        verdict = log.verdict()

        assert codes(verdict) == ["capture.out_of_memory"]
        assert changes(verdict)[:2] == [("mem_fraction_static", "lower"), ("capture_sizes", "lower")]

    def test_negative_in_a_ready_start(self):
        """A negative estimate that was used is a warning where the start came to ready all the same."""
        log = Log(version="0.30.0")
        sized(log, estimate=-3.0, graph_profile_enabled={}, actual=0.5).ready()
        verdict = log.verdict()

        assert codes(verdict)[0] == "graphs.estimate_negative"
        assert {each.finding.severity for each in verdict.findings} == {"warning"}

    def test_long_and_absurd(self):
        """An impossible estimate of a ready start is said once, with the cache that there could be."""
        log = Log(version="0.22.1")
        only = sized(log, estimate=25.0, graph_profile_enabled={}, actual=1.0)
        only.ready()
        verdict = log.verdict()

        assert codes(verdict) == ["graphs.estimate_absurd"]
        assert value(verdict, "kv_cache_memory_bytes") == gib(29.5) + gib(25) - gib(1) - mib(64)

    def test_serving_comes_first(self):
        """A start that came to ready died of what it served, whatever it stood above its request."""
        log = Log(version="0.17.1")
        only = sized(log, actual=1, runner={"runner": "V1"}).ready()
        only.open = None
        only.state("serving").fails("oom", "out_of_memory", oom_tried_bytes=GIB, oom_free_bytes=mib(500))

        assert codes(log.verdict()) == ["device.out_of_memory", "graphs.not_reserved"]

    def test_as_far_as_one_request_allows(self):
        """Where room for a usual set of graphs would leave no request its own, as much as there is, if that may do."""
        for tried, told in ((136, True), (900, False)):
            log = Log(version="0.30.0")
            only = log.process().state("init_device").figures(free_at_start_bytes=gib(22.2), total_bytes=gib(22.4))
            only.figures(requested_bytes=gib(21.9), gpu_memory_utilization=0.978)
            only.state("size_kv").figures(kv_available_bytes=gib(3.2), kv_tokens=150_000, max_model_len=116_000)
            only.figures(graph_estimate_bytes=gib(0.46)).state("capture_graphs")
            only.fails("oom", "out_of_memory", oom_tried_bytes=mib(tried), oom_free_bytes=mib(20))

            assert (("gpu_memory_utilization", "lower") in changes(log.verdict())) == told

    def test_absurd_by_the_device(self):
        """More than a quarter of the device is no memory of graphs."""
        log = Log(version="0.30.0")
        sized(log, estimate=21.0, graph_profile_enabled={}).fails("budget", "no_blocks", message="No available memory")

        assert codes(log.verdict()) == ["graphs.estimate_absurd"]

    def test_switched_off_is_not_absurd(self):
        """An estimate that was not taken off harms nobody."""
        log = Log(version="0.30.0")
        sized(log, estimate=40.0, graph_profile_disabled={}, actual=0.03).ready()

        assert codes(log.verdict()) == []


class TestBudget:
    def test_weights_exceed_the_request(self):
        """Weights that alone are more than was asked for."""
        log = Log(version="0.10.2")
        only = log.process().state("load_weights").figures(weights_bytes=gib(20))
        only.figures(total_bytes=gib(80), requested_bytes=gib(16), gpu_memory_utilization=0.2)
        only.state("size_kv").fails("budget", "no_blocks", message="No available memory")

        assert codes(log.verdict()) == ["weights.exceed_request"]

    def test_negative_in_print(self):
        """A log that stops after it printed a negative budget has shown why it will not go on."""
        log = Log()
        log.process().state("size_kv").figures(kv_available_bytes=gib(-1))

        assert codes(log.verdict()) == ["budget.negative", "run.ended_without_trace"]

    def test_outside_torch_of_somebody_else(self):
        """Tens of GiB outside torch are not this engine's: a neighbour took them while it measured."""
        log = Log(version="0.28.0")
        only = log.process().state("profile_activations").figures(total_bytes=gib(80), requested_bytes=gib(72))
        only.figures(weights_bytes=gib(40), engine_outside_torch_bytes=gib(31), engine_activation_bytes=gib(2))
        only.state("size_kv").figures(kv_available_bytes=gib(-1)).fails("budget", "no_blocks", message="No memory")

        verdict = log.verdict()

        assert codes(verdict) == ["device.neighbour_grew", "budget.negative"]
        assert changes(verdict)[0] == ("other_process", "investigate")
        assert ("gpu_memory_utilization", "raise") not in changes(verdict)

    def test_negative_outside_torch(self):
        """A negative term gives the KV cache what there is not."""
        log = Log(version="0.20.2")
        only = log.process().state("profile_activations").figures(engine_outside_torch_bytes=gib(-4))
        only.state("size_kv").figures(kv_available_bytes=gib(50)).ready()
        verdict = log.verdict()

        assert codes(verdict) == ["budget.counted_twice"]
        assert "F36" in verdict.findings[0].finding.message

    def test_overrun_of_more_than_graphs(self):
        """What stands above the request beyond its graphs is said by itself."""
        log = Log(version="0.25.1")
        only = sized(log, actual=0.05, runner={"runner": "V2"})
        only.figures(kv_cache_bytes=gib(56)).ready()

        assert codes(log.verdict()) == ["budget.overrun"]

    def test_unused(self):
        """A start that leaves a tenth of its request to nobody wastes it."""
        log = Log(version="0.25.1")
        only = sized(log, actual=0.05, runner={"runner": "V2"})
        only.figures(kv_cache_bytes=gib(40)).ready()

        assert codes(log.verdict()) == ["budget.unused"]
        assert changes(log.verdict()) == [("none", "investigate")]

    def test_suggestion_that_counts_twice(self):
        """A suggestion far below what its own figures allow is refused, and said in a note."""
        log = Log(version="0.30.0")
        only = sized(log, actual=1.2, estimate=1.0, graph_profile_enabled={})
        only.figures(suggested_kv_bytes_requested=-20 * GIB).ready()
        verdict = log.verdict()
        notes = [each.finding.code for each in verdict.findings if each.finding.severity == "note"]

        assert notes == ["budget.counted_twice"]
        assert all(change.to is None or change.to > 0 for advice in verdict.advice for change in advice.changes)

    @pytest.mark.parametrize("state", ["allocate_kv", "capture_graphs", "verify", "warmup", "serving"])
    def test_pinned(self, state):
        """Explicit KV bytes skip the measurement; what runs out after them is their fault."""
        log = Log(version="0.25.1", kv_cache_memory_bytes=gib(70))
        only = log.process().state("load_weights").figures(weights_bytes=gib(15), total_bytes=gib(80))
        only.sign("kv_pinned").state(state).fails(
            "oom", "out_of_memory", oom_tried_bytes=mib(500), oom_free_bytes=mib(100), torch_allocated_bytes=gib(79)
        )
        verdict = log.verdict()

        assert codes(verdict)[0] == "budget.pinned_too_large"
        assert changes(verdict)[0] == ("kv_cache_memory_bytes", "lower")
        assert ("gpu_memory_utilization", "lower") not in changes(verdict)

    @pytest.mark.parametrize("override", [{"from": 0, "to": 16}, {"from": 900, "to": 100}])
    def test_blocks_that_leave_room(self, override):
        """Blocks of the small cache that graphs are profiled with, or fewer than were sized, take nobody's room."""
        log = Log()
        only = log.process().state("size_kv").sign("blocks_overridden", **override)
        only.state("allocate_kv").fails("oom", "out_of_memory", oom_tried_bytes=GIB, oom_free_bytes=0)

        assert codes(log.verdict()) == ["kv.out_of_memory"]

    def test_corrected(self):
        """Graphs that a plugin took off itself are a note, and so is an overrun by terms that it knew of."""
        log = Log(version="0.25.1")
        inputs = {"available_bytes": gib(54.5), "wanted_bytes": gib(52)}
        sized(log, actual=1.2, runner={"runner": "V2"}, kv_corrected=inputs).ready()
        verdict = log.verdict()

        assert codes(verdict) == []
        assert verdict.advice == ()
        assert [each.finding.code for each in verdict.findings] == ["graphs.not_reserved"]

    @pytest.mark.parametrize(("peak", "found"), [(71.9, []), (73.5, ["budget.overrun"])])
    def test_measured(self, peak, found):
        """What was measured at most counts more than a sum of terms, corrected or not."""
        log = Log(version="0.25.1")
        inputs = {"available_bytes": gib(54.5), "wanted_bytes": gib(54.4)}
        only = sized(log, actual=1.2, runner={"runner": "V2"}, kv_corrected=inputs)
        only.state("verify").figures(used_peak_bytes=gib(peak)).ready()
        verdict = log.verdict()

        assert codes(verdict) == found
        assert [each.finding.observed for each in verdict.findings if each.finding.severity != "note"] == [
            gib(peak) for _ in found
        ]

    def test_a_corrected_start_may_fail(self):
        """Of one that ran out of memory its graphs are no note."""
        log = Log(version="0.25.1")
        inputs = {"available_bytes": gib(54.5), "wanted_bytes": gib(54.4)}
        only = sized(log, actual=1.2, runner={"runner": "V2"}, kv_corrected=inputs)
        only.state("verify").fails("oom", "out_of_memory", oom_tried_bytes=GIB, oom_free_bytes=0)

        assert codes(log.verdict())[0] == "graphs.not_reserved"

    def test_overridden_blocks(self):
        """More blocks than were sized protect nothing."""
        log = Log()
        only = log.process().state("size_kv").sign("blocks_overridden", **{"from": 1000, "to": 9000})
        only.state("allocate_kv").fails("oom", "out_of_memory", oom_tried_bytes=GIB, oom_free_bytes=0)

        assert codes(log.verdict())[0] == "budget.pinned_too_large"


class TestDevice:
    def test_weights_beside_others(self):
        """Weights that fit the device and not what others leave of it."""
        log = Log()
        log.process().state("load_weights").fails(
            "oom",
            "out_of_memory",
            oom_tried_bytes=mib(500),
            oom_free_bytes=mib(100),
            total_bytes=gib(80),
            process_bytes=gib(20),
        )
        verdict = log.verdict()

        assert codes(verdict)[0] == "device.neighbour_present"
        assert changes(verdict)[0] == ("other_process", "investigate")
        assert not any(setting == "gpu_memory_utilization" for setting, _ in changes(verdict))

    def test_neighbour_grew(self):
        """Somebody took memory after the engine looked, and more than it lacked."""
        log = Log(version="0.30.0")
        only = sized(log, estimate=1.0, graph_profile_enabled={})
        only.fails(
            "oom",
            "out_of_memory",
            oom_tried_bytes=mib(20),
            oom_free_bytes=mib(10),
            process_bytes=gib(73),
        )
        verdict = log.verdict()

        assert codes(verdict)[0] == "device.neighbour_grew"
        assert changes(verdict)[0] == ("other_process", "investigate")

    def test_named_tenants(self):
        """The only place where a log names another process is the sentence."""
        log = Log()
        only = log.process().sign("tenant", pid=77, bytes=gib(3)).state("load_weights")
        only.fails("oom", "out_of_memory", oom_tried_bytes=GIB, oom_free_bytes=mib(3), total_bytes=gib(24))
        verdict = log.verdict()

        assert "process 77" in next(
            each.finding.message for each in verdict.findings if each.finding.code == "device.neighbour_present"
        )

    def test_drift_on_unified_memory(self):
        """Where host and device share memory nobody can be named for what moved."""
        log = Log()
        only = log.process().sign("unified_memory").state("profile_activations")
        only.figures(initial_free_bytes=gib(10), current_free_bytes=gib(11)).fails("raised", "free_grew")
        verdict = log.verdict()

        assert codes(verdict) == ["device.drift"]
        assert "F22" in verdict.findings[0].finding.message

    def test_free_that_stood_still(self):
        """A check that does not let equal readings pass is no neighbour."""
        log = Log(version="0.14.1")
        only = log.process().state("profile_activations")
        only.figures(initial_free_bytes=gib(10), current_free_bytes=gib(10)).fails("raised", "free_fell")

        assert codes(log.verdict()) == ["device.drift"]

    def test_autotuner(self):
        """A warm-up that ran out and went on has kernels that are not tuned."""
        log = Log(version="0.25.1")
        log.process().state("warmup").sign("autotuner_fell_back", count=64).ready()
        verdict = log.verdict()

        assert codes(verdict) == ["device.out_of_memory"]
        assert "64 times" in verdict.findings[0].finding.message
        assert "F43" in verdict.findings[0].finding.message


class TestRanks:
    def test_uneven(self):
        """One poor rank, or a poor stage, decides for all."""
        for names, fault in ((("TP0", "TP1"), ""), (("PP0", "PP1"), "F32")):
            log = Log(version="0.10.2")
            for rank, (name, left) in enumerate(zip(names, (40, 31), strict=True)):
                log.process(name, rank).state("size_kv").figures(kv_available_bytes=gib(left)).ready()
            verdict = log.verdict()

            assert codes(verdict) == ["ranks.uneven"]
            assert fault in verdict.findings[0].finding.message
            # Of NCCL after the first look only an end without memory tells.
            assert "F30" not in verdict.findings[0].finding.message

    @pytest.mark.parametrize(
        ("names", "first", "second", "is_uneven"),
        [
            # As many blocks fit both: the second has half of the layers.
            (("PP0", "PP1"), {"weights_bytes": 40}, {"weights_bytes": 20}, False),
            (("PP0", "PP1"), {"weights_bytes": 40}, {"weights_bytes": 39}, True),
            (("PP0", "PP1"), {"weights_bytes": 40, "gpu_blocks": 400}, {"weights_bytes": 39, "gpu_blocks": 390}, False),
            (("PP0", "PP1"), {"weights_bytes": 20, "gpu_blocks": 400}, {"weights_bytes": 40, "gpu_blocks": 200}, True),
            # Ranks of one stage hold the same layers, whatever else is in their weights.
            (("PP0 TP0", "PP0 TP1"), {"weights_bytes": 40}, {"weights_bytes": 20}, True),
        ],
    )
    def test_stages(self, names, first, second, is_uneven):
        """Stages are compared by what each has for a block, or else for a byte of its weights."""
        log = Log(version="0.10.2")
        for rank, (name, left, held) in enumerate(zip(names, (30, 15), (first, second), strict=True)):
            figures = {key: size if key == "gpu_blocks" else gib(size) for key, size in held.items()}
            process = log.process(name, rank).state("size_kv")
            process.figures(kv_available_bytes=gib(left), **figures).ready()

        assert ("ranks.uneven" in codes(log.verdict())) == is_uneven

    def test_one_rank_holds_more_at_start(self):
        """Communicators of one rank that take GiB more than those of the others."""
        log = Log(version="0.22.1")
        for rank, free in enumerate((131.04, 138.4, 138.4)):
            log.process(f"PP0 TP{rank}", rank).state("init_device").figures(free_at_start_bytes=gib(free)).ready()
        verdict = log.verdict()

        assert codes(verdict) == ["ranks.uneven"]
        assert "F31" in verdict.findings[0].finding.message

    def test_missing(self):
        """A rank that never came where most of them are."""
        log = Log(tensor_parallel_size=4)
        for rank in range(3):
            log.process(f"TP{rank}", rank).state("capture_graphs")

        assert codes(log.verdict()) == ["run.ended_without_trace", "ranks.missing"]

    def test_disagree(self):
        """Ranks that came to unlike plans."""
        log = Log(version="0.30.0")
        log.process().state("size_kv").fails("raised", "ranks_differ", message="Workers disagree on KV cache layouts")
        verdict = log.verdict()

        assert codes(verdict) == ["ranks.disagree"]
        assert "F33" in verdict.findings[0].finding.message

    def test_a_worker_without_a_word(self):
        """A worker that dies without a trace is said so."""
        log = Log()
        only = log.process().state("capture_graphs").sign("worker_died", name="VllmWorker-3", code=-11)
        only.fails("peer", "peer", message="Worker proc VllmWorker-3 died unexpectedly")

        assert codes(log.verdict()) == ["run.ended_without_trace"]


class TestKnown:
    @pytest.mark.parametrize(("lora", "is_named"), [(True, True), (False, False), (None, False)])
    def test_switches(self, lora, is_named):
        """A switch that is on is in use."""
        log = Log(version="0.11.1", **({} if lora is None else {"lora": lora}))
        only = log.process().state("size_kv").sign("runner", runner="V1").figures(kv_available_bytes=gib(5))
        only.state("capture_graphs").fails("oom", "out_of_memory", oom_tried_bytes=mib(64), oom_free_bytes=mib(41))

        assert ("F59" in log.verdict().findings[0].finding.message) == is_named


class TestOthers:
    @pytest.mark.parametrize(
        ("category", "reason", "state", "code"),
        [
            ("capture", "not_capturable", "capture_graphs", "capture.failed"),
            ("capture", "illegal_access", "capture_graphs", "capture.failed"),
            ("raised", "illegal_access", "profile_activations", "state.raised"),
            ("capture", "ipc_handle", "capture_graphs", "capture.failed"),
            ("capture", "workspace_locked", "serving", "workspace.grew"),
            ("pool", "pool_use_count", "capture_graphs", "capture.pool_reused"),
            ("budget", "external_weights", "init_device", "weights.exceed_request"),
            ("signal", "signal", "load_weights", "run.ended_by_signal"),
            ("raised", "timeout", "load_weights", "state.stalled"),
            ("raised", "", "load_weights", "state.raised"),
            ("oom", "out_of_memory", "profile_activations", "profile.out_of_memory"),
            ("oom", "out_of_memory", "bootstrap_kv", "kv.out_of_memory"),
            ("oom", "out_of_memory", "capture_throwaway", "capture.out_of_memory"),
            ("oom", "out_of_memory", "warmup", "device.out_of_memory"),
        ],
    )
    def test_code(self, category, reason, state, code):
        """Every category and reason has its code."""
        log = Log()
        log.process().state(state).fails(category, reason, message="as printed")
        verdict = log.verdict()

        assert codes(verdict) == [code]
        assert verdict.findings[0].finding.severity == "error"

    @pytest.mark.parametrize("reason", ["no_kernel_image", "illegal_access", "not_capturable"])
    def test_no_memory_setting_helps(self, reason):
        """A failure that is not about memory never moves a memory setting."""
        log = Log()
        log.process().state("capture_graphs").fails("capture", reason, message="as printed")

        said = {setting for setting, _ in changes(log.verdict())}
        assert said <= {"none", "engine_version", "enforce_eager"}
