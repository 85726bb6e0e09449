"""How a logged start ended: which of several failures is the cause, and what a log without one proves."""

from __future__ import annotations

from startup_fsm.events import OomObserved, PartEntered, SnapshotTaken, StateLeft
from startup_fsm.logged.outcome import STATELESS
from startup_fsm.memory import GIB, Snapshot
from tests.unit.logged_starts import Log, codes, gib, mib


def ended(log: Log) -> tuple[str, str | None]:
    """Outcome and state."""
    verdict = log.verdict()
    return verdict.outcome, verdict.failed_state


def echo(process):
    """The words of a process without a state, on another one's failure."""
    process.sign(STATELESS, category="peer", type="RuntimeError", said="peer")
    return process.fails("peer", "peer", message="Engine core initialization failed.")


def oom(process, **figures):
    """An out-of-memory with its figures."""
    return process.fails("oom", "out_of_memory", oom_tried_bytes=GIB, oom_free_bytes=0, **figures)


class TestCause:
    def test_earliest(self):
        """Of two causes the earlier line is the one."""
        log = Log()
        log.process("TP0", 0).state("load_weights").fails("raised", message="first")
        log.process("TP1", 1).state("size_kv").fails("raised", message="second")

        assert ended(log) == ("error", "load_weights")

    def test_echo_is_none(self):
        """Whoever reports the failure of somebody else did not cause it, though it said so first."""
        log = Log()
        log.process("TP0", 0).state("load_weights").fails("peer", "peer", message="Engine core initialization failed.")
        oom(log.process("TP1", 1).state("capture_graphs"))
        verdict = log.verdict()

        assert (verdict.outcome, verdict.failed_state, verdict.failed_rank) == ("oom", "capture_graphs", "TP1")

    def test_figures_first(self):
        """An out-of-memory with its figures comes before failures without any."""
        log = Log()
        log.process("TP0", 0).state("warmup").fails("raised", message="NCCL error")
        oom(log.process("TP1", 1).state("capture_graphs"))

        assert ended(log) == ("oom", "capture_graphs")

    def test_what_follows(self):
        """A time-out of one rank follows from what another raised."""
        log = Log()
        log.process("TP0", 0).state("capture_graphs").fails("raised", "timeout", message="timed out")
        log.process("TP1", 1).state("capture_graphs").fails("capture", "not_capturable", message="not permitted")

        assert ended(log) == ("error", "capture_graphs")
        assert codes(log.verdict())[0] == "capture.failed"

    def test_timeout_alone_hangs(self):
        """A time-out that nothing explains is a hang."""
        log = Log()
        log.process().state("capture_graphs").fails("raised", "timeout", message="RPC call timed out.")

        assert ended(log) == ("hang", "capture_graphs")
        assert codes(log.verdict()) == ["capture.stalled"]

    def test_state_of_another(self):
        """A process without a state failed in the one that was entered last before its line."""
        log = Log()
        log.process("TP0", 0).state("load_weights").state("profile_activations")
        log.process().fails("raised", message="ValueError: no")

        assert ended(log) == ("error", "profile_activations")

    def test_part_of_another(self):
        """With its state it has the part that was open then, and none of a state that was over or came on later."""
        for steps, part in (("", "compile"), ("over", None), ("later", None)):
            log = Log()
            other = log.process("TP0", 0).state("profile_activations", None if steps == "later" else "compile")
            if steps == "over":
                other._add(StateLeft(state="profile_activations"))
            log.process().fails("", message="Killed")
            if steps == "later":
                other._add(PartEntered(state="profile_activations", part="sampler"))
            verdict = log.verdict()

            assert (verdict.failed_state, verdict.part) == ("profile_activations", part)

    def test_no_state_is_proven(self):
        """An out-of-memory sentence alone proves no state; what a shell says of a killed process neither."""
        alone, killed = Log(), Log()
        oom(alone.process())
        killed.process().fails("", message="Killed")

        assert ended(alone) == ("oom", None)
        assert ended(killed) == ("oom", None)
        assert codes(killed.verdict()) == ["host.out_of_memory"]

    def test_only_one_rank_is_named(self):
        """The failed rank is told where there are several; a start of one has none."""
        one, two = Log(), Log()
        oom(one.process("TP0", 0).state("load_weights"))
        two.process("TP0", 0).state("load_weights")
        oom(two.process("TP1", 1).state("load_weights"))

        assert one.verdict().failed_rank is None
        assert two.verdict().failed_rank == "TP1"

    def test_an_echo_that_quotes(self):
        """Where nothing else is left, the failure that an echo quotes is judged; a plain echo before it is not."""
        for reason, outcome, code in (
            ("out_of_memory", "oom", "capture.out_of_memory"),
            ("no_blocks", "error", "budget.negative"),
            ("not_capturable", "error", "capture.failed"),
            ("", "error", "state.raised"),
        ):
            log = Log(version="0.9.2", enforce_eager=True)
            echo(log.process())
            core = log.process().state("size_kv" if reason == "no_blocks" else "capture_graphs")
            core.fails("peer", reason, message="Worker failed with error 'what it said'")
            verdict = log.verdict()

            assert verdict.outcome == outcome
            assert codes(verdict)[0] == code

    def test_quoted_figures(self):
        """What the quoted sentence says of memory is known of the failure."""
        log = Log(version="0.9.2", enforce_eager=True)
        core = log.process().state("verify").figures(oom_tried_bytes=GIB, oom_free_bytes=mib(24))
        core._add(OomObserved(state="verify", tried_bytes=GIB, free_bytes=mib(24)))
        core.fails("peer", "out_of_memory", message="Worker failed with error 'CUDA out of memory.'")
        verdict = log.verdict()

        assert "1.00 GiB were asked for, 24.00 MiB were free" in verdict.findings[0].finding.message
        assert verdict.missing_bytes == GIB - mib(24)

    def test_where_an_echo_is_of(self):
        """Who reports the failure of a worker is in a state of its own; what it reports is of the worker's."""
        for category, reason in (("peer", "peer"), ("peer", "out_of_memory"), ("oom", "out_of_memory")):
            log = Log()
            core, worker = log.process().state("size_kv"), log.process("TP0", 0).state("size_kv")
            worker.state("capture_graphs", "full")
            core.fails(category, reason, message="Worker failed with error 'CUDA out of memory.'")
            verdict = log.verdict()

            assert (verdict.failed_state, verdict.part) == ("capture_graphs", "full")

    def test_an_echo_beside_its_cause(self):
        """The failure itself is nearer than a report that quotes it."""
        log = Log()
        core, worker = log.process(), log.process("TP0", 0)
        core.state("capture_graphs").fails("peer", "out_of_memory", message="Worker failed with error 'no'")
        worker.state("capture_graphs").fails("capture", "not_capturable", message="operation not permitted")

        assert codes(log.verdict())[0] == "capture.failed"

    def test_only_an_echo(self):
        """A log that only repeats a failure does not hold its cause: that is said, and no setting is."""
        log = Log()
        log.process().state("capture_graphs")
        echo(log.process())
        verdict = log.verdict()

        assert codes(verdict) == ["run.ended_without_trace"]
        assert "died in capture_graphs without a word" in verdict.findings[0].finding.message
        assert verdict.advice[0].changes[0].setting == "none"


class TestEnd:
    def test_ready(self):
        """A closing line of any process is ready."""
        log = Log()
        log.process("TP0", 0).state("capture_graphs")
        log.process().ready()

        assert ended(log) == ("ready", None)

    def test_failure_after_ready(self):
        """What dies while serving died, though the start was ready."""
        log = Log()
        only = log.process().state("verify").ready()
        only.open = None
        oom(only.state("serving"))

        assert ended(log) == ("oom", "serving")

    def test_survived(self):
        """A failure before the closing line was come over: a warning."""
        log = Log()
        oom(log.process("TP0", 0).state("warmup"))
        log.process("TP1", 1).state("verify").ready()
        verdict = log.verdict()

        assert verdict.outcome == "ready"
        assert [each.finding.severity for each in verdict.findings] == ["warning"]

    def test_incomplete(self):
        """Without an end and a failure the state is the one that any process entered last."""
        log = Log()
        log.process("TP0", 0).state("load_weights").state("capture_graphs")
        log.process("TP1", 1).state("load_weights")

        assert ended(log) == ("incomplete", "load_weights")

    def test_hang(self):
        """Notices of waiting up to the end are a hang."""
        log = Log()
        log.process().state("load_weights").state("capture_graphs").stalls()

        assert ended(log) == ("hang", "capture_graphs")

    def test_interrupted(self):
        """A signal ends a start from outside."""
        log = Log()
        log.process().state("load_weights").signal()

        assert ended(log) == ("interrupted", "load_weights")
        assert codes(log.verdict()) == ["run.ended_by_signal"]

    def test_nothing_at_all(self):
        """A log that says nothing is incomplete, and no state is named."""
        log = Log()
        log.process()

        assert ended(log) == ("incomplete", None)


class TestFigures:
    def test_priority(self):
        """The failed rank's figures, else the engine's, else rank 0's, else whoever prints one."""
        log = Log()
        log.process("TP1", 1).state("load_weights").figures(weights_bytes=gib(1), kv_tokens=1, gpu_blocks=1)
        log.process("TP0", 0).state("load_weights").figures(weights_bytes=gib(2), kv_tokens=2)
        log.process().figures(weights_bytes=gib(3))
        oom(log.process("TP2", 2).state("load_weights").figures(total_bytes=gib(9)))
        figures = log.verdict().figures

        assert figures["total_bytes"] == gib(9)
        assert figures["weights_bytes"] == gib(3)
        assert figures["kv_tokens"] == 2
        assert figures["gpu_blocks"] == 1

    def test_by_rank(self):
        """Every rank's own, by its printed name; an engine process is no rank."""
        log = Log()
        log.process().figures(kv_tokens=7)
        log.process("DP0 TP3", 3).figures(weights_bytes=gib(2))

        assert log.verdict().figures_by_rank == {"DP0 TP3": {"weights_bytes": gib(2)}}

    def test_inferred(self):
        """What follows from printed figures is there, and named as inferred."""
        log = Log()
        log.process().figures(total_bytes=gib(80), gpu_memory_utilization=0.9, k_bytes=gib(1), v_bytes=gib(2))
        verdict = log.verdict()

        assert verdict.figures["requested_bytes"] == gib(72)
        assert verdict.figures["kv_cache_bytes"] == gib(3)
        assert verdict.inferred == ("requested_bytes", "kv_cache_bytes")

    def test_knobs(self):
        """A knob is a figure where nothing prints it otherwise."""
        log = Log(gpu_memory_utilization=0.8, max_model_len="auto")
        log.process().figures(total_bytes=gib(10))

        assert log.verdict().figures["gpu_memory_utilization"] == 0.8
        assert "max_model_len" not in log.verdict().figures

    def test_durations(self):
        """A log without clocks has no durations."""
        log = Log()
        log.process().state("load_weights")

        assert log.verdict().durations_ns == {}


class TestLedger:
    def test_by_the_sentence(self):
        """At an out-of-memory the accounts add up to the device."""
        log = Log()
        log.process().state("load_weights").fails(
            "oom",
            "out_of_memory",
            oom_tried_bytes=mib(84),
            oom_free_bytes=mib(93),
            total_bytes=gib(31.35),
            process_bytes=gib(30.33),
            torch_allocated_bytes=gib(29.39),
            torch_reserved_unallocated_bytes=mib(309),
        )
        verdict = log.verdict()
        accounts = {each.account: each.bytes for each in verdict.ledger}

        assert sum(accounts.values()) == gib(31.35)
        assert verdict.unexplained_bytes == 0
        assert accounts["other processes"] == gib(31.35) - gib(30.33) - mib(93)

    def test_by_the_terms(self):
        """Without one the engine's own terms stand, and nothing is said of what nobody printed."""
        log = Log()
        only = log.process().state("size_kv").figures(weights_bytes=gib(15), kv_available_bytes=gib(100))
        only.ready()
        verdict = log.verdict()

        assert {each.account: each.bytes for each in verdict.ledger} == {"weights": gib(15), "KV cache": gib(100)}
        assert verdict.unexplained_bytes is None

    def test_no_remainder_of_a_part(self):
        """What is left over of a device whose weights were not printed explains nothing."""
        log = Log()
        log.process().state("size_kv").fails("oom", oom_tried_bytes=1, oom_free_bytes=1, total_bytes=gib(80))

        assert log.verdict().unexplained_bytes is None


class TestSnapshots:
    def test_last(self):
        """A journal that read memory has the accounts of its last reading, and says that nothing is hidden between."""
        log = Log(version="0.25.1")
        only = log.process().state("verify").figures(free_at_start_bytes=gib(79), requested_bytes=gib(72))
        for free, reserved in ((60, 15), (10, 60)):
            shot = Snapshot(
                total_bytes=gib(80),
                free_bytes=gib(free),
                process_bytes=gib(70),
                reserved_bytes=gib(reserved),
                sources={"process": "NVML", "tenants": "NVML"},
            )
            only._add(SnapshotTaken(state="verify", label=f"at {free}", snapshot=shot))
        only.ready()
        verdict = log.verdict()

        assert {each.account: each.bytes for each in verdict.ledger} == {
            "torch, no pool": gib(60),
            "outside torch": gib(10),
            "other processes": 0,
            "unexplained": 0,
        }
        assert verdict.unexplained_bytes == 0
        unseen = "\n".join(verdict.unseen)
        assert "no snapshot" not in unseen
        assert "free memory at ready" not in unseen
        assert "who else was on the device" not in unseen


class TestUnseen:
    def test_ranks_without_figures(self):
        """Ranks that print nothing are named."""
        log = Log(version="0.12.0", tensor_parallel_size=4)
        log.process("TP0", 0).state("size_kv").figures(kv_available_bytes=gib(9))
        log.process("TP1", 1).state("size_kv")
        unseen = "\n".join(log.verdict().unseen)

        assert "figures of TP1" in unseen
        assert "2 of 4 ranks" in unseen
        assert "0.11.1 to 0.25 print that one only" in unseen

    def test_level(self):
        """Versions that hide the terms of the budget at level INFO say so; those that do not, do not."""
        hidden, shown = Log(version="0.20.2"), Log(version="0.27.1")
        for log in (hidden, shown):
            log.process().state("size_kv").figures(kv_available_bytes=gib(9))

        assert any("level DEBUG" in text for text in hidden.verdict().unseen)
        assert not any("level DEBUG" in text for text in shown.verdict().unseen)
