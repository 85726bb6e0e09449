"""Starts out of the messages of a text log: whose, in which order, and how each process ended."""

from __future__ import annotations

import io
import itertools
import json

import attrs
import pytest

from startup_fsm.importers.textlog import read_log
from startup_fsm.memory import GIB, MIB
from startup_fsm.reading import read_starts
from startup_fsm.verbs.importing import import_log
from tests.logs.verdicts_of import (
    FAULTS,
    STARTED,
    codes,
    document,
    first_code,
    lines_of,
    main_of,
    moves,
    without_place,
)

E = "(EngineCore pid=300) "
TP0, TP1 = "(Worker_TP0 pid=301) ", "(Worker_TP1 pid=302) "
SENTENCE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB of"
    " which 1.02 GiB is free. Including non-PyTorch memory, this process has 78.15 GiB memory in use. Of the allocated"
    " memory 76.30 GiB is allocated by PyTorch, and 0.41 GiB is reserved by PyTorch but unallocated."
)
STALL = "No available shared memory broadcast block found in 60 seconds."
ECHO = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"


def vllm(*messages):
    """Lines of vLLM, one a second: ``who`` and message, or who, level and message; plain text where there is no who."""
    lines = []
    for second, each in enumerate(messages):
        if isinstance(each, str):
            lines.append(each)
            continue
        who, *level, text = each
        clock = f"05-20 00:{second // 60:02d}:{second % 60:02d}"
        lines.append(f"{who}{level[0] if level else 'INFO'} {clock} [worker.py:1] {text}")
    return "\n".join(lines) + "\n"


def trace(who, *frames, error):
    """A traceback that an engine logs, a line each."""
    lines = ["Traceback (most recent call last):"]
    for file, function in frames:
        lines += [f'  File "/x/vllm/{file}", line 7, in {function}', "    call()"]
    return [(who, "ERROR", line) for line in [*lines, error]]


BANNER = (E, "Initializing a V1 LLM engine (v0.25.1) with config: model='/models/a', ")
V2 = (E, "Using V2 Model Runner")
LOADED = (E, "Model loading took 15.0 GiB and 4.2 seconds")
AVAILABLE = (E, "Available KV cache memory: 53.5 GiB")
CAPTURING = E + "Capturing CUDA graphs (FULL):  10%|#         | 5/51 [00:00<00:02, 18.20it/s]"
CAPTURED = (E, "Graph capturing finished in 5 secs, took 0.60 GiB")
READY = (E, "init engine (profile, create kv cache, warmup model) took 41.12 s (compilation: 17.20 s)")


def records(text, process=None):
    """The journal of the only start's only process, or of the one by this name."""
    (start,) = read_log(io.BytesIO(text.encode())).starts
    found = {each.name: each.records for each in start.processes}
    return found[process] if process is not None else next(iter(found.values()))


def course(found):
    """States and ends of a journal, in order."""
    told = []
    for record in found:
        event = record.event
        if record.kind == "state_entered":
            told.append(f"> {event.state}")
        elif record.kind == "part_entered":
            told.append(f"| {event.part}")
        elif record.kind == "state_failed":
            told.append(f"! {event.state} {event.category} {event.reason}")
        elif record.kind == "run_finished":
            told.append(f". {event.end}")
    return told


def told(tmp_path, text):
    """The document of a log."""
    path = tmp_path / "start.log"
    path.write_text(text, encoding="utf-8")
    return document(path)


def verdict(tmp_path, text):
    """The verdict that matters of a log."""
    return main_of(told(tmp_path, text))


class TestCourse:
    def test_states_in_the_order_of_their_lines(self):
        """Each line takes its process to the state that it proves, and the closing line ends the run."""
        found = records(vllm(BANNER, V2, LOADED, AVAILABLE, CAPTURING, CAPTURED, READY))
        assert course(found) == [
            "> init_device",
            "> load_weights",
            "> size_kv",
            "> capture_graphs",
            "| full",
            ". ready",
        ]
        assert found[0].kind == "run_started"
        assert [record.seq for record in found] == list(range(len(found)))

    def test_what_a_line_only_shows_is_inferred(self):
        """A state that no line begins is entered as inferred; one that a line ends is left as printed."""
        found = records(vllm(BANNER, V2, LOADED))
        by_kind = {
            (record.kind, record.event.state): record.origin.inferred
            for record in found[1:]
            if hasattr(record.event, "state")
        }
        assert by_kind["state_entered", "load_weights"] is True
        assert by_kind["state_left", "load_weights"] is False

    def test_nothing_goes_back(self):
        """A line of an earlier state that is printed late moves nothing."""
        late = (E, "Loading weights took 3.20 seconds")
        assert course(records(vllm(V2, LOADED, AVAILABLE, late, CAPTURED))) == [
            "> init_device",
            "> load_weights",
            "> size_kv",
            "> capture_graphs",
        ]

    def test_first_of_two_captures_is_thrown_away(self):
        """The V2 runner prints the same line twice: before the KV cache is sized it is the throwaway capture."""
        loaded = (E, "Model loading took 15.0 GiB memory and 4.2 seconds")
        found = records(vllm(V2, loaded, CAPTURED, AVAILABLE, (E, "Graph capturing finished in 5 secs, took 0.75 GiB")))
        assert course(found) == [
            "> init_device",
            "> load_weights",
            "> capture_throwaway",
            "> size_kv",
            "> capture_graphs",
        ]
        figures = {record.event.figure: record.event.value for record in found if record.kind == "figure_read"}
        assert figures["graph_estimate_bytes"] == round(0.6 * GIB)
        assert figures["graph_actual_bytes"] == round(0.75 * GIB)

    def test_draft_model_is_a_part(self):
        """The draft model is loaded in the same state, as a part with a name."""
        found = records(vllm((E, "Starting to load model /models/a..."), (E, "Loading drafter model...")))
        assert course(found) == ["> load_weights", "| draft_worker_init"]

    def test_times_are_seconds_since_the_first_line(self):
        """Clocks of one second, without a year, are differences in nanoseconds, and never fall."""
        found = records(vllm(BANNER, V2, LOADED, AVAILABLE))
        assert [record.t for record in found][-1] == 3_000_000_000
        assert all(before.t <= after.t for before, after in itertools.pairwise(found))

    def test_times_behind_a_pasted_command(self):
        """What was typed has no clock: the first line that has one is where the start begins."""
        found = records(vllm("$ vllm serve a/model --port 8000", BANNER, V2, LOADED, AVAILABLE))
        assert [record.t for record in found][-1] == 3_000_000_000

    def test_year_that_ends(self):
        """A start over New Year does not run backwards."""
        lines = ["(EngineCore pid=300) INFO 12-31 23:59:50 [w.py:1] Using V2 Model Runner"]
        lines += ["(EngineCore pid=300) INFO 01-01 00:00:10 [w.py:1] Model loading took 15.0 GiB and 4.2 seconds"]
        found = records("\n".join(lines) + "\n")
        assert all(before.t <= after.t for before, after in itertools.pairwise(found))

    def test_figure_that_is_repeated_is_told_once(self):
        """The same figure with the same value is no news; another value is."""
        again = (E, "Available KV cache memory: 40.25 GiB")
        found = records(vllm(V2, LOADED, AVAILABLE, AVAILABLE, again))
        values = [
            record.event.value
            for record in found
            if record.kind == "figure_read" and record.event.figure == "kv_available_bytes"
        ]
        assert values == [round(53.5 * GIB), round(40.25 * GIB)]

    def test_sign_that_is_repeated_is_counted(self):
        """What is noticed many times is one decision with its count."""
        line = "2026-05-20 05:01:56,100 - WARNING - autotuner.py:488 - flashinfer.jit: [Autotuner]: OOM detected, falling back to default tactic"
        found = records(vllm(V2, LOADED, AVAILABLE) + f"{line}\n" * 64)
        (start,) = read_log(io.BytesIO((vllm(V2, LOADED, AVAILABLE) + f"{line}\n" * 64).encode())).starts
        decisions = [
            record.event
            for process in start.processes
            for record in process.records
            if record.kind == "decision_made" and record.event.decision == "autotuner_fell_back"
        ]
        assert [decision.inputs["count"] for decision in decisions] == [64]
        assert found[0].kind == "run_started"

    def test_events_are_bounded(self):
        """A log that says something new for ever keeps so many events of it, and how it ended."""
        lines = [(E, f"Available KV cache memory: {n / 100:.2f} GiB") for n in range(1, 9_000)]
        found = records(vllm(V2, LOADED, *lines, READY))
        assert len(found) < 4_200
        assert course(found)[-1] == ". ready"


class TestAttribution:
    def test_ranks_keep_their_own(self, tmp_path):
        """What a rank says is its own, however the lines are mixed."""
        found = verdict(
            tmp_path,
            vllm(
                (TP0, "Model loading took 8.92 GiB and 4.2 seconds"),
                (TP1, "Model loading took 9.02 GiB and 4.2 seconds"),
                (TP0, "Available KV cache memory: 20.0 GiB"),
            ),
        )
        ranks = found["figures_by_rank"]
        assert ranks["TP0"] == {"weights_bytes": round(8.92 * GIB), "kv_available_bytes": 20 * GIB}
        assert ranks["TP1"] == {"weights_bytes": round(9.02 * GIB)}
        assert found["ranks"] == 2

    def test_a_line_without_a_rank_is_nobodys(self, tmp_path):
        """A figure that no process signs is the start's, and of no rank."""
        found = verdict(
            tmp_path,
            vllm(
                (TP0, "Model loading took 8.92 GiB and 4.2 seconds"),
                (TP1, "Model loading took 8.92 GiB and 4.2 seconds"),
                ("", "Available KV cache memory: 20.0 GiB"),
            ),
        )
        assert found["figures"]["kv_available_bytes"] == 20 * GIB
        assert all("kv_available_bytes" not in figures for figures in found["figures_by_rank"].values())

    def test_an_engine_process_is_no_rank(self, tmp_path):
        """API server and engine are no ranks; a start with them alone has one."""
        found = verdict(
            tmp_path, vllm(("(APIServer pid=1) ", "vLLM API server version 0.25.1"), BANNER, V2, LOADED, AVAILABLE)
        )
        assert found["ranks"] == 1
        assert found["figures_by_rank"] == {}

    def test_failed_rank(self, tmp_path):
        """The rank whose exception is the cause is named; figures are its own first."""
        text = vllm(
            (TP0, "Using V2 Model Runner"),
            (TP0, "Model loading took 8.92 GiB and 4.2 seconds"),
            (TP1, "Model loading took 9.02 GiB and 4.2 seconds"),
            (TP0, "Available KV cache memory: 20.0 GiB"),
            *trace(
                TP1,
                ("v1/worker/gpu_worker.py", "compile_or_warm_up_model"),
                ("v1/worker/gpu/model_runner.py", "capture_model"),
                error=SENTENCE,
            ),
        )
        found = verdict(tmp_path, text)
        assert (found["failed_rank"], found["failed_state"]) == ("TP1", "capture_graphs")
        assert found["figures"]["weights_bytes"] == round(9.02 * GIB)
        assert "oom_tried_bytes" not in found["figures_by_rank"]["TP0"]

    def test_traceback_without_a_name(self, tmp_path):
        """What Python prints itself goes with the error of the process that announced it, and with no other rank."""
        text = vllm(
            (TP0, "Model loading took 8.92 GiB and 4.2 seconds"),
            (TP1, "Model loading took 8.92 GiB and 4.2 seconds"),
            (TP1, "ERROR", "WorkerProc hit an exception."),
            "Traceback (most recent call last):",
            '  File "/x/vllm/v1/worker/gpu_worker.py", line 7, in determine_available_memory',
            "    self.model_runner.profile_run()",
            SENTENCE,
        )
        found = verdict(tmp_path, text)
        assert (found["outcome"], found["failed_state"]) == ("oom", "profile_activations")
        assert "oom_tried_bytes" not in found["figures_by_rank"]["TP0"]


class TestSurvived:
    def test_warning_with_a_traceback(self, tmp_path):
        """An exception that is printed as a warning was dealt with."""
        lines = [
            (E, "WARNING", each[2])
            for each in trace(E, ("utils/import_utils.py", "_has_module"), error="ImportError: cannot import name '_C'")
        ]
        found = verdict(tmp_path, vllm(BANNER, V2, LOADED, *lines, AVAILABLE, CAPTURED, READY))
        assert found["outcome"] == "ready"
        assert all(each["severity"] != "error" for each in found["findings"])

    def test_error_that_the_process_came_over(self):
        """After an error the process goes on: the failure becomes a note, and the run ends as it does."""
        lines = trace(E, ("utils/flashinfer.py", "warm"), error="KeyError: 'sm_120'")
        found = records(vllm(BANNER, V2, *lines, LOADED, AVAILABLE, CAPTURED, READY))
        assert course(found)[-1] == ". ready"
        notes = [record.event.note for record in found if record.kind == "note_added"]
        assert notes == [{"survived": "KeyError: 'sm_120'"}]

    def test_error_that_the_process_did_not_come_over(self):
        """Without progress after it the same error is the end."""
        lines = trace(E, ("utils/flashinfer.py", "warm"), error="KeyError: 'sm_120'")
        assert course(records(vllm(BANNER, V2, LOADED, *lines)))[-1] == ". failed"

    def test_progress_of_another_rank_survives_nothing(self, tmp_path):
        """A rank that goes on does not heal one that failed."""
        text = vllm(
            (TP1, "Using V2 Model Runner"),
            (TP0, "Using V2 Model Runner"),
            *trace(TP1, ("v1/worker/gpu_worker.py", "load_model"), error=SENTENCE),
            (TP0, "Model loading took 8.92 GiB and 4.2 seconds"),
        )
        found = verdict(tmp_path, text)
        assert (found["outcome"], found["failed_state"], found["failed_rank"]) == ("oom", "load_weights", "TP1")


class TestStalls:
    def test_up_to_the_end(self, tmp_path):
        """Notices of waiting up to the last line are a hang in the state that was entered last."""
        found = verdict(tmp_path, vllm(BANNER, V2, LOADED, AVAILABLE, CAPTURING, *[(E, STALL)] * 3))
        assert (found["outcome"], found["failed_state"], found["part"]) == ("hang", "capture_graphs", "full")
        assert first_code(found) in ("capture.stalled", "state.stalled")

    def test_progress_after_a_notice(self, tmp_path):
        """A notice that progress follows is none; without an end the log is incomplete."""
        found = verdict(tmp_path, vllm(BANNER, V2, LOADED, (E, STALL), AVAILABLE))
        assert (found["outcome"], found["failed_state"]) == ("incomplete", "size_kv")
        assert "state.stalled" not in codes(found)

    def test_ready_after_a_notice(self, tmp_path):
        """A slow start that comes to ready is ready."""
        found = verdict(tmp_path, vllm(BANNER, V2, LOADED, (E, STALL), AVAILABLE, CAPTURED, READY))
        assert found["outcome"] == "ready"

    def test_notices_while_serving(self, tmp_path):
        """An idle server prints them too: its start was ready."""
        found = verdict(tmp_path, vllm(BANNER, V2, LOADED, AVAILABLE, CAPTURED, READY, *[(E, STALL)] * 3))
        assert found["outcome"] == "ready"

    def test_time_out_after_notices(self, tmp_path):
        """A time-out that follows is the same hang, said by an exception."""
        error = trace(
            "(APIServer pid=1) ",
            ("v1/engine/core_client.py", "wait"),
            error="TimeoutError: Timed out waiting for engine core processes to start.",
        )
        found = verdict(tmp_path, vllm(BANNER, V2, LOADED, AVAILABLE, CAPTURING, (E, STALL), *error))
        assert (found["outcome"], found["failed_state"]) == ("hang", "capture_graphs")


class TestEchoes:
    def test_the_cause_comes_after_its_echo(self, tmp_path):
        """Streams may be merged the wrong way round: the report of a failure is never its cause."""
        cause = trace(E, ("v1/worker/gpu_worker.py", "load_model"), error=SENTENCE)
        found = verdict(tmp_path, vllm(BANNER, V2, f"(APIServer pid=1) {ECHO}", *cause))
        assert (found["outcome"], found["failed_state"]) == ("oom", "load_weights")
        assert first_code(found) == "weights.exceed_device"

    def test_an_echo_alone(self, tmp_path):
        """Where nothing but the echo is there, nobody knows why; the state is the last that was shown."""
        found = verdict(tmp_path, vllm(BANNER, V2, LOADED, AVAILABLE, f"(APIServer pid=1) {ECHO}"))
        assert (found["outcome"], found["failed_state"]) == ("error", "size_kv")
        assert first_code(found) in ("run.ended_without_trace", "state.raised", "ranks.peer_failed")
        assert set(moves(found)) == {"none investigate"}

    def test_a_peer_that_lost_its_connection_first(self, tmp_path):
        """A rank that reports a lost connection before the other's cause is printed is not the cause."""
        text = vllm(
            (TP0, "Using V2 Model Runner"),
            (TP1, "Using V2 Model Runner"),
            *trace(
                TP0,
                ("v1/worker/gpu_worker.py", "load_model"),
                error="RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:40001",
            ),
            *trace(TP1, ("v1/worker/gpu_worker.py", "load_model"), error=SENTENCE),
        )
        found = verdict(tmp_path, text)
        assert (found["outcome"], found["failed_rank"]) == ("oom", "TP1")

    def test_worker_failed_with_the_words_of_the_cause(self, tmp_path):
        """An engine that quotes its worker's error adds nothing to it."""
        quoted = trace(
            E,
            ("v1/executor/multiproc_executor.py", "get_response"),
            error="RuntimeError: Worker failed with error 'CUDA out of memory. Tried to allocate 2.00 GiB', please check the stack trace above for the root cause",
        )
        text = vllm(
            BANNER,
            (TP0, "Using V2 Model Runner"),
            *trace(TP0, ("v1/worker/gpu_worker.py", "load_model"), error=SENTENCE),
            *quoted,
        )
        found = verdict(tmp_path, text)
        assert (found["outcome"], found["failed_state"]) == ("oom", "load_weights")
        assert codes(found).count("weights.exceed_device") == 1


class TestKilled:
    def test_after_a_known_failure(self, tmp_path):
        """What is left of a start that failed is killed by those who clean up: that is no fault of the host's memory."""
        cause = trace(E, ("v1/worker/gpu_worker.py", "load_model"), error=SENTENCE)
        found = verdict(tmp_path, vllm(BANNER, V2, *cause, "Killed"))
        assert (found["outcome"], found["failed_state"]) == ("oom", "load_weights")
        assert "host.out_of_memory" not in codes(found)

    @pytest.mark.parametrize(
        "line",
        [
            "Killed",
            "./serve.sh: line 12:   214 Killed                  vllm serve /models/a",
            "vllm-1 exited with code 137",
        ],
    )
    def test_alone(self, tmp_path, line):
        """A kill without any other word is the host's, in the state that was shown last."""
        found = verdict(tmp_path, vllm(BANNER, V2, LOADED, AVAILABLE, line))
        assert (found["outcome"], found["failed_state"]) == ("oom", "size_kv")
        assert first_code(found) == "host.out_of_memory"
        assert "gpu_memory_utilization raise" not in moves(found)

    def test_a_worker_that_is_killed(self, tmp_path):
        """An executor that tells of a worker killed by signal 9 tells of the host's memory, and its own end is an echo."""
        text = vllm(
            BANNER,
            (TP0, "Using V2 Model Runner"),
            (TP1, "Using V2 Model Runner"),
            (E, "ERROR", "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor."),
            f"(APIServer pid=1) {ECHO}",
        )
        found = verdict(tmp_path, text)
        assert (found["outcome"], first_code(found)) == ("oom", "host.out_of_memory")

    def test_terminated_server(self, tmp_path):
        """A ready server that is told to stop has had its start."""
        found = verdict(
            tmp_path,
            vllm(
                BANNER,
                V2,
                LOADED,
                AVAILABLE,
                CAPTURED,
                READY,
                (E, "[shutdown] EngineCore: trigger received signal=SIGTERM"),
            ),
        )
        assert found["outcome"] == "ready"

    def test_terminated_start(self, tmp_path):
        """A start that a signal ends before it is ready was interrupted."""
        found = verdict(tmp_path, vllm(BANNER, V2, LOADED, AVAILABLE, "Terminated"))
        assert (found["outcome"], first_code(found)) == ("interrupted", "run.ended_by_signal")


class TestEvidence:
    def test_line_and_text(self):
        """Every event has the line that it was read from, and the message without its prefix."""
        text = vllm(
            BANNER,
            V2,
            LOADED,
            AVAILABLE,
            *trace(E, ("v1/worker/gpu_worker.py", "initialize_from_config"), error=SENTENCE),
        )
        lines = text.split("\n")
        for record in records(text)[1:]:
            assert record.origin.source == "vllm"
            assert record.origin.text[:300] in lines[record.origin.line - 1]

    def test_resolution(self):
        """A figure knows half the last digit that was printed, whatever zeros were dropped."""
        found = {
            record.event.figure: record.origin.resolution
            for record in records(vllm(BANNER, V2, LOADED, AVAILABLE, (E, "GPU KV cache size: 438,272 tokens")))
            if record.kind == "figure_read"
        }
        assert found["kv_available_bytes"] == round(GIB / 100 / 2)
        assert found["weights_bytes"] == round(GIB / 100 / 2)
        assert not found["kv_tokens"]

    def test_resolution_of_the_sentence(self):
        """The figures of an out-of-memory sentence are rounded as well, and say so."""
        text = vllm(
            BANNER,
            V2,
            LOADED,
            *trace(
                E,
                ("v1/worker/gpu_worker.py", "load_model"),
                error=SENTENCE.replace("1.02 GiB is free", "118.00 MiB is free"),
            ),
        )
        found = {
            record.event.figure: record.origin.resolution for record in records(text) if record.kind == "figure_read"
        }
        assert found["total_bytes"] == round(GIB / 100 / 2)
        assert found["oom_free_bytes"] == round(MIB / 100 / 2)

    def test_findings_show_their_lines(self, tmp_path):
        """Evidence of a verdict stands in the file where it says."""
        text = vllm(
            BANNER,
            V2,
            LOADED,
            AVAILABLE,
            *trace(E, ("v1/worker/gpu_worker.py", "initialize_from_config"), error=SENTENCE),
        )
        found = verdict(tmp_path, text)
        lines = text.split("\n")
        shown = [each for finding in found["findings"] for each in finding["evidence"]]
        assert any("Tried to allocate" in each["text"] for each in shown)
        assert all(each["text"][:100] in lines[each["line"] - 1] for each in shown)


class TestReading:
    @pytest.mark.parametrize("size", [1, 7, 100, 4_096])
    def test_blocks_of_any_size(self, size):
        """What comes out does not depend on how the bytes come in."""

        @attrs.define
        class Slow:
            file: io.BytesIO

            def read(self, _: int, /) -> bytes:
                return self.file.read(size)

        log = (FAULTS / "F13.log").read_bytes()
        slow, whole = read_log(Slow(io.BytesIO(log))).starts, read_log(io.BytesIO(log)).starts
        assert [attrs.evolve(start, run="", processes=()) for start in slow] == [
            attrs.evolve(start, run="", processes=()) for start in whole
        ]
        for mine, other in zip(slow, whole, strict=True):
            assert [[record.event for record in each.records] for each in mine.processes] == [
                [record.event for record in each.records] for each in other.processes
            ]

    def test_same_log_same_ids(self):
        """The ids of runs come from the bytes of the log."""
        log = (FAULTS / "F71.log").read_bytes()
        once, again = ([start.run for start in read_log(io.BytesIO(log)).starts] for _ in range(2))
        assert once == again
        assert len(set(once)) == 3

    @pytest.mark.parametrize("shift", [8, 40, 80])
    def test_line_at_the_end_of_a_block(self, tmp_path, shift):
        """Wherever the line that tells of a crash lies among the serving lines before it, it is read whole."""
        log = (FAULTS / "F55.log").read_bytes()
        at = log.index(b"(EngineCore pid=300) ERROR")
        request = b'(APIServer pid=900) INFO:     10.0.0.9:40010 - "POST /v1/completions HTTP/1.1" 200 OK\n'
        count, rest = divmod((64 << 10) - at - shift, len(request))
        path = tmp_path / "served.log"
        path.write_bytes(log[:at] + request * count + b"." * (rest - 1) + b"\n" + log[at:])
        assert without_place(document(path)) == without_place(document(FAULTS / "F55.log"))

    def test_long_serving_before_a_crash(self, tmp_path):
        """A crash after many megabytes of serving lines is found, with its line number."""
        log = (FAULTS / "F18.log").read_bytes()
        at = log.index(b"(EngineCore pid=300) ERROR")
        request = b'(APIServer pid=900) INFO:     10.0.0.9:40010 - "POST /v1/completions HTTP/1.1" 200 OK\n'
        path = tmp_path / "served.log"
        path.write_bytes(log[:at] + request * 60_000 + log[at:])
        found = document(path)
        assert without_place(found) == without_place(document(FAULTS / "F18.log"))
        lines = lines_of(path)
        shown = [each for finding in main_of(found)["findings"] for each in finding["evidence"]]
        assert all(each["text"][:100] in lines[each["line"] - 1] for each in shown)


ROUND_TRIPS = ["F01", "F09", "F12", "F20", "F24", "F32", "F36", "F41", "F46", "F53", "F58", "F70", "F71"]
LONG = ["ready", "ready_server", "sampler_at_0996_v1", "sigkill_in_capture", "neighbour_takes_in_capture"]


class TestImport:
    @pytest.mark.parametrize(
        "path",
        [FAULTS / f"{name}.log" for name in ROUND_TRIPS] + [STARTED / f"{name}.log" for name in LONG],
        ids=lambda path: path.stem,
    )
    def test_verdict_of_the_journals(self, path, tmp_path, capsys):
        """An imported log has the verdict of the log, start by start, but for where it was read."""
        of_log = document(path)
        assert import_log(path, output=str(tmp_path / "runs"), json=True) == 0
        written = json.loads(capsys.readouterr().out)["starts"]
        assert [each["run"] for each in written] == [run["run"] for run in of_log["runs"]]
        for run, each in zip(of_log["runs"], written, strict=True):
            (of_journals,) = document(tmp_path / "runs" / each["run"])["runs"]
            assert of_journals["origin"] != run["origin"]
            assert {**of_journals, "origin": None} == {**run, "origin": None}

    def test_directory_of_runs_is_its_newest(self, tmp_path, capsys):
        """A directory that holds the starts of a crash loop is read as the last of them."""
        import_log(FAULTS / "F71.log", output=str(tmp_path / "runs"), json=True)
        last = json.loads(capsys.readouterr().out)["starts"][-1]["run"]
        (start,) = read_starts(tmp_path / "runs")
        assert start.run == last
