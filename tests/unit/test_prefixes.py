"""Lines to messages with a speaker: every engine's prefix and many loggers', through every wrapper around them."""

from __future__ import annotations

import itertools
import json
import time

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from startup_fsm.importers.facts import NOBODY, Said, Speaker
from startup_fsm.importers.physical import Line, Physical
from startup_fsm.importers.prefixes import said

#: 15 January, 10:00:05, on a clock that knows no year.
T = (14 * 24 + 10) * 3_600 + 5.0
#: The same moment of 2026 in seconds since 1970.
EPOCH = 1_768_471_205.0
DEDUP = (
    " (Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0 to disable log deduplication, or see "
    "https://docs.ray.io/en/master/ray-observability/user-guides/configure-logging.html#log-deduplication for more "
    "options.)"
)


def of(text, number=3):
    """All messages of one line."""
    return said(Line(number, text, 0))


def one(text):
    """The only message of a line."""
    (message,) = of(text)
    return message


SPEAKERS = {
    "(VllmWorkerProcess pid=201)": Speaker("VllmWorkerProcess", "pid 201", None, 201),
    "(RayWorkerVllm pid=1001)": Speaker("RayWorkerVllm", "pid 1001", None, 1001),
    "(RayWorkerWrapper pid=1001)": Speaker("RayWorkerWrapper", "pid 1001", None, 1001),
    "(RayWorkerWrapper pid=2001, ip=10.0.0.2)": Speaker("RayWorkerWrapper", "pid 2001 10.0.0.2", None, 2001),
    "(RayWorkerProc pid=2001, ip=fe80::1)": Speaker("RayWorkerProc", "pid 2001 fe80::1", None, 2001),
    "(RayWorkerProc rank=3 pid=2001)": Speaker("RayWorkerProc", "rank 3", 3, 2001),
    "(Worker pid=2001, ip=10.0.0.2)": Speaker("Worker", "pid 2001 10.0.0.2", None, 2001),
    "(VllmWorker rank=5 pid=105)": Speaker("VllmWorker", "rank 5", 5, 105),
    "(VllmWorker TP1 pid=105)": Speaker("VllmWorker", "TP1", 1, 105),
    "(VllmWorker PP1 TP3 pid=105)": Speaker("VllmWorker", "PP1 TP3", None, 105),
    "(VllmWorker-2 pid=105)": Speaker("VllmWorker", "rank 2", 2, 105),
    "(Worker pid=105)": Speaker("Worker", None, None, 105),
    "(Worker_TP1 pid=105)": Speaker("Worker", "TP1", 1, 105),
    "(Worker_TP3_EP3 pid=105)": Speaker("Worker", "TP3 EP3", 3, 105),
    "(Worker_PP1_TP3 pid=105)": Speaker("Worker", "PP1 TP3", None, 105),
    "(Worker_PP6 pid=105)": Speaker("Worker", "PP6", None, 105),
    "(Worker_DP1_TP1_EP3 pid=105)": Speaker("Worker", "DP1 TP1 EP3", None, 105),
    "(Worker_DP1_PP0_PCP1_TP3_DCP1_EP7 pid=105)": Speaker("Worker", "DP1 PP0 PCP1 TP3 DCP1 EP7", None, 105),
    "(EngineCore_0 pid=270)": Speaker("EngineCore_0", None, None, 270),
    "(EngineCore_DP0 pid=270)": Speaker("EngineCore_DP0", None, None, 270),
    "(EngineCore pid=270)": Speaker("EngineCore", None, None, 270),
    "(EngineCoreActor pid=270, ip=10.0.0.2)": Speaker("EngineCoreActor", None, None, 270),
    "(APIServer pid=1)": Speaker("APIServer", None, None, 1),
    "(APIServer_1 pid=1)": Speaker("APIServer_1", None, None, 1),
    "(DPCoordinator pid=1)": Speaker("DPCoordinator", None, None, 1),
    "(DPSupervisor pid=1)": Speaker("DPSupervisor", None, None, 1),
    "(MainProcess pid=1)": Speaker("MainProcess", None, None, 1),
    "(SpawnProcess-1 pid=1)": Speaker("SpawnProcess-1", None, None, 1),
    "(MapWorker(MapBatches(Stage)) pid=7, ip=10.0.0.2)": Speaker("MapWorker(MapBatches(Stage))", None, None, 7),
    "(ServeReplica:default:LLM pid=7)": Speaker("ServeReplica:default:LLM", None, None, 7),
    "(raylet)": Speaker("raylet"),
    "(raylet, ip=10.0.0.2)": Speaker("raylet"),
    "(autoscaler +1m2s)": Speaker("autoscaler"),
    "(pid=33)": Speaker(pid=33),
    "(pid=33, ip=10.0.0.2)": Speaker(pid=33),
    "(head, rank=0, pid=4242)": NOBODY,
    "(task, pid=4242)": NOBODY,
    "(EngineCore_DP0 pid=270) (RayWorkerWrapper pid=9, ip=10.0.0.2)": Speaker(
        "RayWorkerWrapper", "pid 9 10.0.0.2", None, 9
    ),
    "(Worker_TP0 pid=1) (Worker_TP1 pid=2)": Speaker("Worker", "TP1", 1, 2),
    "(task, pid=4242) (RayWorkerProc pid=9, ip=10.0.0.2) (Worker_TP1 pid=2)": Speaker("Worker", "TP1", 1, 2),
    "(RayWorkerWrapper pid=9) [rank3]:": Speaker("RayWorkerWrapper", "pid 9", None, 9),
    "(EngineCore pid=9) [rank0]:": Speaker("EngineCore", None, None, 9),
    "[rank11]:": Speaker("", "rank 11", 11),
}


class TestProcesses:
    @pytest.mark.parametrize(("prefix", "speaker"), SPEAKERS.items(), ids=SPEAKERS)
    def test_alone(self, prefix, speaker):
        """Tracebacks and bars carry the process prefix alone; one space belongs to it."""
        assert one(f'{prefix}   File "x.py", line 1, in f') == Said(3, '  File "x.py", line 1, in f', speaker)
        assert one(f"{prefix} Killed") == Said(3, "Killed", speaker)

    @pytest.mark.parametrize(("prefix", "speaker"), SPEAKERS.items(), ids=SPEAKERS)
    def test_with_level(self, prefix, speaker):
        """Level, date and file stand behind it."""
        message = one(f"{prefix} INFO 01-15 10:00:05 [v1/worker/gpu_worker.py:508] Sleeping")
        assert message == Said(3, "Sleeping", speaker, "vllm", "INFO", T, "gpu_worker.py")

    def test_local_rank(self):
        """What torchrun's own prefix names is the rank of its node, which proves no number."""
        assert one('[default3]:  File "x"') == Said(3, '  File "x"', Speaker("", "rank 3"))

    @pytest.mark.parametrize("text", ["(some words) and more", "(pid=) x", "(A)", "(", "()", "(Worker pid=x) y"])
    def test_brackets(self, text):
        """Brackets without a process are words."""
        assert one(text) == Said(3, text)

    def test_prefix_without_message(self):
        """A line that ends with its prefix is an empty message."""
        assert one("(Worker_TP1 pid=105)") == Said(3, "", Speaker("Worker", "TP1", 1, 105))


class TestVllm:
    @pytest.mark.parametrize("level", ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"])
    @pytest.mark.parametrize("file", ["gpu_worker.py:12] ", "[gpu_worker.py:12] ", "[v1/.../gpu_worker.py:12] "])
    @pytest.mark.parametrize(
        ("clock", "t"),
        [
            ("01-15 10:00:05", T),
            ("01-15 10:00:05.250", T + 0.25),
            ("01-15 10:00:05,250", T + 0.25),
            ("2026-01-15 10:00:05,250", T + 0.25),
            ("02-29 00:00:00", 59 * 86_400.0),
            ("12-31 23:59:59", 366 * 86_400 - 1.0),
            ("13-01 00:00:00", None),
        ],
    )
    def test_prefix(self, level, file, clock, t):
        """Every level, date and file that vLLM has printed; of a clock that cannot be, nothing is told."""
        assert one(f"{level} {clock} {file}hello") == Said(3, "hello", NOBODY, "vllm", level, t, "gpu_worker.py")

    @pytest.mark.parametrize(
        ("printed", "file"),
        [
            ("[vllm.v1.worker.gpu_worker]", "gpu_worker.py"),
            ("[__init__.py:44]", "__init__.py"),
            ("[model_executor/.../quantization/awq.py:12]", "awq.py"),
            ("[root]", None),
        ],
    )
    def test_file(self, printed, file):
        """The file's own name, out of a path or the name of a module."""
        assert one(f"INFO 01-15 10:00:05 {printed} x").file == file

    @pytest.mark.parametrize("spaces", [0, 2, 4, 11])
    def test_indentation(self, spaces):
        """One space behind the bracket is the prefix's, all others are the message's."""
        text = " " * spaces + "raise ValueError("
        assert one(f"(Worker_TP0 pid=1) ERROR 01-15 10:00:00 [f.py:1] {text}").text == text
        assert one(f"ERROR 01-15 10:00:00 engine.py:389] {text}").text == text

    def test_empty(self):
        """An empty line of a traceback keeps its speaker."""
        assert one("(VllmWorker rank=0 pid=200) ERROR 01-15 10:00:05 [a.py:375]") == Said(
            3, "", Speaker("VllmWorker", "rank 0", 0, 200), "vllm", "ERROR", T, "a.py"
        )

    def test_own_prefix(self):
        """Words of VLLM_LOGGING_PREFIX stand between the process and the level, which still is the process's."""
        speaker = Speaker("EngineCore", None, None, 3)
        assert of("(EngineCore pid=3) blue INFO 01-15 10:00:05 [a.py:3] hi") == (
            Said(3, "blue", speaker),
            Said(3, "hi", speaker, "vllm", "INFO", T, "a.py"),
        )

    @pytest.mark.parametrize("suffix", ["", DEDUP])
    @pytest.mark.parametrize("level", ["", "INFO 01-15 10:00:05 [worker.py:267] "])
    def test_repeated(self, suffix, level):
        """Ray says once what many said, and how many; with an explanation the first time."""
        message = one(f"(RayWorkerWrapper pid=9) {level}took 4.26 seconds [repeated 30x across cluster]{suffix}")
        assert (message.text, message.repeated) == ("took 4.26 seconds", 30)

    def test_not_repeated(self):
        """Brackets at the end of other messages stay."""
        assert one("(RayWorkerWrapper pid=9) sizes [1, 2]").text == "sizes [1, 2]"


class TestSglang:
    @pytest.mark.parametrize(
        ("ranks", "speaker"),
        [
            ("", NOBODY),
            (" TP3", Speaker("", "TP3", 3)),
            (" TP3 EP3", Speaker("", "TP3 EP3", 3)),
            (" PP1 TP2", Speaker("", "PP1 TP2")),
            (" DP0 TP3", Speaker("", "DP0 TP3")),
            (" DP0 TP3 EP3", Speaker("", "DP0 TP3 EP3")),
            (" DP7", Speaker("", "DP7")),
            (" ATTN_CP1 TP2", Speaker("", "ATTN_CP1 TP2")),
            (" Detokenizer", NOBODY),
        ],
    )
    @pytest.mark.parametrize(("fraction", "more"), [("", 0.0), (".250", 0.25), (",250", 0.25)])
    def test_ranks(self, ranks, speaker, fraction, more):
        """The parts of the rank as printed; tensor parallel alone is the rank's number."""
        message = one(f"[2026-01-15 10:00:05{fraction}{ranks}] Load weight begin. avail mem=21.73 GB")
        assert message == Said(
            3, "Load weight begin. avail mem=21.73 GB", speaker, "sglang", None, pytest.approx(EPOCH + more)
        )

    @pytest.mark.parametrize(
        ("text", "level", "file", "message"),
        [
            ("INFO server.py:12: up", "INFO", "server.py", "up"),
            ("WARNING srt/model_config.py:12: up", "WARNING", "model_config.py", "up"),
            ("INFO:     Started server process [1]", "INFO", None, "Started server process [1]"),
            ("INFO of the day", None, None, "INFO of the day"),
            (" indented", None, None, " indented"),
        ],
    )
    def test_levels(self, text, level, file, message):
        """Its main process prints level and file too."""
        assert one(f"[2026-01-15 10:00:05] {text}") == Said(3, message, NOBODY, "sglang", level, EPOCH, file)

    def test_impossible_date(self):
        """A date that cannot be tells no time."""
        assert one("[2026-02-30 10:00:05 TP0] x") == Said(3, "x", Speaker("", "TP0", 0), "sglang")


class TestOthers:
    @pytest.mark.parametrize(
        ("text", "level", "file", "message"),
        [
            (
                "2026-01-15 10:00:05,000 - INFO - autotuner.py:262 - flashinfer.jit: [Autotuner]: done",
                *("INFO", "autotuner.py", "[Autotuner]: done"),
            ),
            ("2026-01-15 10:00:05 - ContinuousBatchingLogger - WARNING - low", "WARNING", None, "low"),
            ("2026-01-15 10:00:05,000 - ERROR - oops", "ERROR", None, "oops"),
            ("[2026-01-15 10:00:05,000] LMCache INFO: storing (a.py:1:x)", "INFO", None, "storing (a.py:1:x)"),
            ("2026-01-15 10:00:05,000\tINFO worker.py:1841 -- Started", "INFO", "worker.py", "Started"),
            ("2026-01-15 10:00:05,000 [ERROR] oops", "ERROR", None, "oops"),
            ("2026-01-15T10:00:05.000000Z  WARN router: slow", "WARNING", None, "router: slow"),
            ("2026-01-15 10:00:05.000 | INFO     | pkg.mod:f:12 - hi", "INFO", "mod.py", "hi"),
            ("[2026-01-15 10:00:05] node7:1:2 [0] a.cc:1 NCCL WARN x", "WARNING", None, "NCCL WARN x"),
        ],
    )
    def test_dated(self, text, level, file, message):
        """Loggers with a full date of their own."""
        assert one(text) == Said(3, message, NOBODY, "other", level, EPOCH, file)
        speaker = Speaker("EngineCore", None, None, 9)
        assert one(f"(EngineCore pid=9) {text}") == Said(3, message, speaker, "other", level, EPOCH, file)

    @pytest.mark.parametrize(
        ("text", "level", "file", "message"),
        [
            ("[W115 10:00:05.5 socket.cpp:207] [c10d] x", None, None, None),
            ("[W0115 10:00:05.500 socket.cpp:207] [c10d] x", "WARNING", "socket.cpp", "[c10d] x"),
            ("E0115 10:00:05.500000 12345 torch/distributed/run.py:792] x", "ERROR", "run.py", "x"),
            ("I0115 10:00:05.500000 140 a.cc:9] x", "INFO", "a.cc", "x"),
        ],
    )
    def test_torch(self, text, level, file, message):
        """The form of torch's C++ and of its launcher."""
        want = Said(3, text) if level is None else Said(3, message, NOBODY, "other", level, T + 0.5, file)
        assert one(text) == want

    def test_torch_of_a_rank(self):
        """Behind a rank, with no space between."""
        assert one("[rank2]:[W0115 10:00:05.5 ProcessGroupNCCL.cpp:1575] Warning: x") == Said(
            3, "Warning: x", Speaker("", "rank 2", 2), "other", "WARNING", T + 0.5, "ProcessGroupNCCL.cpp"
        )

    def test_nccl(self):
        """Host, process and thread go; what it is stays."""
        assert one("node7:42:43 [0] NCCL INFO comm 0x1") == Said(3, "NCCL INFO comm 0x1", NOBODY, "other", "INFO")

    @pytest.mark.parametrize(
        "text", ["INFO:     Application startup complete.", "INFO:root:Application startup complete."]
    )
    def test_undated(self, text):
        """A web server's lines and Python's logging without configuration."""
        assert one(text) == Said(3, "Application startup complete.", NOBODY, "other", "INFO")

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "Killed",
            '  File "x.py", line 1, in f',
            "\ttab",
            "2026-01-15 was a day",
            "2026-01-15 10:00:05 was a moment",
            "[2026-01-15] x",
            "[0, 1]",
            "Error: INFO is no level here",
            "torch.OutOfMemoryError: CUDA out of memory. (Worker pid=105)",
            "RuntimeError: DEBUG INFO 01-15",
        ],
    )  # fmt: skip
    def test_plain(self, text):
        """Without a prefix nothing is taken off."""
        assert one(text) == Said(3, text)


TP0, TP1 = Speaker("Worker", "TP0", 0, 1), Speaker("Worker", "TP1", 1, 2)


class TestTwoInOne:
    def test_two_writers(self):
        """A prefix in the middle begins another's message."""
        assert of(
            "(Worker_TP0 pid=1) INFO 01-15 10:00:05 [f.py:1] took 1.0 GiB(Worker_TP1 pid=2) ERROR 01-15 10:00:05 [g.py:2]   x"
        ) == (
            Said(3, "took 1.0 GiB", TP0, "vllm", "INFO", T, "f.py"),
            Said(3, "  x", TP1, "vllm", "ERROR", T, "g.py"),
        )

    def test_bar_of_a_process(self):
        """Behind a bar the same process goes on, for a bar has no line end."""
        assert of("(Worker_TP0 pid=1) Capturing:   0%|  | 0/51 [00:00<?, ?it/s]DEBUG 01-15 10:00:05 [f.py:1] x") == (
            Said(3, "Capturing:   0%|  | 0/51 [00:00<?, ?it/s]", TP0),
            Said(3, "x", TP0, "vllm", "DEBUG", T, "f.py"),
        )

    def test_message_of_a_process(self):
        """Behind a message with a prefix somebody else goes on, for that had its line end."""
        _, second = of("(Worker_TP0 pid=1) INFO 01-15 10:00:05 [f.py:1] oneINFO 01-15 10:00:05 [g.py:1] two")
        assert second == Said(3, "two", NOBODY, "vllm", "INFO", T, "g.py")

    def test_bars_of_two(self):
        """Process prefixes alone."""
        assert of("(Worker_TP0 pid=1) one(Worker_TP1 pid=2)   two") == (Said(3, "one", TP0), Said(3, "  two", TP1))

    def test_sglang(self):
        """SGLang's brackets, cut into each other, and behind a bar."""
        first, second, third = of(
            "Capturing 9%[2026-01-15 10:00:05 TP0] Load wei[2026-01-15 10:00:05 TP1] Memory pool end."
        )
        assert (first.text, first.speaker) == ("Capturing 9%", NOBODY)
        assert (second.text, second.speaker.label) == ("Load wei", "TP0")
        assert (third.text, third.speaker.label, third.t) == ("Memory pool end.", "TP1", EPOCH)

    def test_stamped_by_a_shell(self):
        """A date in brackets before an engine's line."""
        assert one("[2026-01-15 10:00:05] INFO 01-15 10:00:05 [f.py:1] x") == Said(
            3, "x", NOBODY, "vllm", "INFO", T, "f.py"
        )

    def test_rank_behind_a_bar(self):
        """The traceback of a rank."""
        assert of("100%|##| 51/51[rank0]:   File") == (
            Said(3, "100%|##| 51/51", NOBODY),
            Said(3, "  File", Speaker("", "rank 0", 0)),
        )

    def test_lost_line_ends(self):
        """A log that was pasted as one line."""
        log = " ".join(f"(Worker_TP{n} pid={n}) INFO 01-15 10:00:05 [f.py:1] took {n} GiB" for n in range(200))
        assert [(each.text, each.speaker.rank) for each in of(log)] == [(f"took {n} GiB", n) for n in range(200)]

    def test_broken_begin(self):
        """Bytes that are no text before a prefix."""
        assert of("\ufffd\ufffdINFO 01-15 10:00:05 [f.py:1] x")[-1] == Said(3, "x", NOBODY, "vllm", "INFO", T, "f.py")

    @pytest.mark.parametrize("text", ["INFO at 10:00", "a [20] b", "the worker (pid=3) died", "ERROR 7", "[rank0]: x"])
    def test_words(self, text):
        """What only resembles a prefix belongs to the message."""
        assert one(f"INFO 01-15 10:00:05 [f.py:1] {text}").text == text


CLEAN = [
    "(EngineCore_DP0 pid=270) INFO 01-15 10:00:05 [gpu_worker.py:508] Available KV cache memory: 37.99 GiB",
    "(RayWorkerWrapper pid=9, ip=10.0.0.2) INFO 01-15 10:00:01 [worker.py:267] took 4.26 s [repeated 30x across cluster]",
    '(Worker_TP0 pid=1) ERROR 01-15 10:00:00 [f.py:1]   File "x.py", line 1, in f',
    "(Worker_TP0 pid=1)     raise ValueError(",
    "INFO 01-15 10:00:01 model_runner.py:1115] Loading model weights took 5.2032 GB",
    "[2026-01-15 10:00:05 DP0 TP3] Load weight end. type=X, dtype=torch.bfloat16, avail mem=21.73 GB",
    "[2026-01-15 10:00:05] INFO server.py:12: up",
    '  File "x.py", line 1, in f',
    "    raise ValueError(",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.74 GiB.",
    "Traceback (most recent call last):",
    "[rank0]: ValueError: No available memory for the cache blocks.",
    "[rank0]:[W0115 10:00:05.5 ProcessGroupNCCL.cpp:1575] Warning: x",
    "2026-01-15 10:00:05,000 - INFO - autotuner.py:262 - flashinfer.jit: [Autotuner]: done",
    "[2026-01-15 10:00:05,000] LMCache INFO: storing",
    "Capturing CUDA graphs (FULL):   4%|▍  | 2/51 [00:00<00:02, 16.88it/s]INFO 01-15 10:00:05 [f.py:1] x",
    "INFO:     Application startup complete.",
    "Killed",
]
WRAPPERS = {
    "colours": lambda line: f"\x1b[36m{line[:12]}\x1b[0;0m{line[12:]}",
    "colours without escape": lambda line: f"[36m{line}[0m",
    "line ends": lambda line: f"{line}\r",
    "compose": lambda line: f"vllm-1  | {line}",
    "coloured compose": lambda line: f"\x1b[33mvllm-1  | \x1b[0m{line}",
    "runtime interface": lambda line: f"2026-01-15T10:00:00.123456789Z stdout F {line}",
    "docker": lambda line: f"2026-01-15T10:00:00.123456789Z {line}",
    "shipper": lambda line: f"2026-01-15 10:00:00.123  {line}",
    "syslog": lambda line: f"Jan 15 10:00:02 node7 python3[4242]: {line}",
    "RFC 5424": lambda line: f"<134>1 2026-01-15T10:00:00.123Z node7 vllm 4242 - - {line}",
    "kubectl": lambda line: f"[pod/vllm-0/vllm] {line}",
    "stage": lambda line: f"[Stage-1] {line}",
    "systemd": lambda line: f"python3[4242]: {line}",
    "box": lambda line: f"│ {line}   │",
    "object": lambda line: json.dumps({"log": line + "\n", "stream": "stderr"}),
    "message": lambda line: json.dumps({"jsonPayload": {"message": line}}, ensure_ascii=False),
}


def heard(wrapped, encoding="utf-8"):
    """What is said in some lines, without the time."""
    physical = Physical()
    got = [*physical.feed("\n".join(wrapped).encode(encoding)), *physical.close()]
    return [attrs.evolve(message, t=None) for line in got for message in said(line)]


class TestThroughWrappers:
    @pytest.mark.parametrize("name", WRAPPERS)
    def test_each(self, name):
        """No wrapper changes what is said, or who says it."""
        assert heard(map(WRAPPERS[name], CLEAN)) == heard(CLEAN)

    @pytest.mark.parametrize(("outer", "inner"), [*itertools.permutations(WRAPPERS, 2)])
    def test_two(self, outer, inner):
        """Nor do any two around each other."""
        assert heard(WRAPPERS[outer](WRAPPERS[inner](line)) for line in CLEAN) == heard(CLEAN)

    @settings(max_examples=60, deadline=None)
    @given(
        wrapped=st.lists(st.tuples(st.sampled_from(CLEAN), st.sampled_from(sorted(WRAPPERS))), max_size=12),
        encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
    )
    def test_mixed(self, wrapped, encoding):
        """Every line may have a wrapper of its own."""
        clean = [line for line, _ in wrapped]
        assert heard((WRAPPERS[name](line) for line, name in wrapped), encoding) == heard(clean)

    def test_json_mode(self):
        """A line of vLLM's JSON mode says what that of its text mode says."""
        fields = {"asctime": "01-15 10:00:05", "levelname": "INFO", "name": "vllm.v1.worker.gpu_worker"}
        fields |= {"processName": "VllmWorker-1", "process": 77, "message": "Available KV cache memory: 37.99 GiB"}
        (line,) = Physical().feed(json.dumps(fields).ljust(300).encode() + b"\n")
        assert said(line) == (
            Said(
                *(1, "Available KV cache memory: 37.99 GiB", Speaker("VllmWorker", "rank 1", 1, 77)),
                *("vllm", "INFO", T, "gpu_worker.py"),
            ),
        )


PIECES = st.sampled_from(
    [
        *SPEAKERS,
        *CLEAN,
        *("INFO ", "01-15 10:00:05 ", "99-99 99:99:99 ", "[f.py:1] ", "[2026-99-99 99:99:99] ", "[rank", "]: ", "(", ")"),
        *(" pid=", "[20", "NCCL INFO ", "a:1:2 [0] ", " [repeated 9x across cluster]", "\ufffd", " ", "٣", "W1399 00:00:00 a:1] "),
    ]
)  # fmt: skip


class TestAnything:
    @settings(max_examples=300, deadline=None)
    @given(text=st.one_of(st.text(max_size=200), st.lists(PIECES, max_size=12).map("".join)))
    def test_any_text(self, text):
        """Any text gives messages of its line, and none of them is longer than it."""
        messages = of(text, 7)
        assert messages
        assert {message.line for message in messages} == {7}
        assert sum(len(message.text) for message in messages) <= len(text)

    @pytest.mark.parametrize(
        "piece",
        ["(Worker_TP0 pid=1) ", "(Worker", "INFO 01-15 10:00:05 [f.py:1] ", "INFO ", "[2026-01-15 10:00:05", "[rank0]:", "a:1:"],
    )  # fmt: skip
    def test_hostile(self, piece):
        """No line takes longer than its length warrants."""
        began = time.perf_counter()
        of((piece * 60_000)[:60_000])
        of("x" + (piece * 60_000)[:60_000])
        assert time.perf_counter() - began < 2.0
