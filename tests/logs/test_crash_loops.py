"""Several starts in one file: how many they are, which one matters, and what of one must not be said of another."""

from __future__ import annotations

import itertools
import time

import pytest

from startup_fsm.memory import GIB
from startup_fsm.reading import read_starts
from tests.logs.verdicts_of import FAULTS, codes, document, main_of, span_of

ARGUMENTS = "non-default args: {'model': '/models/a', 'max_model_len': 8192, 'gpu_memory_utilization': %s}"
CONFIG = "Initializing a V1 LLM engine (v0.20.2) with config: model='/models/a', tensor_parallel_size=1, "
LOAD = "Starting to load model /models/a..."
LOADED = "Model loading took 15.0 GiB memory and 4.204410 seconds"
AVAILABLE = "Available KV cache memory: %s GiB"
CAPTURED = "Graph capturing finished in 5 secs, took 0.60 GiB"
READY = "init engine (profile, create kv cache, warmup model) took 41.12 s (compilation: 17.20 s)"
SENTENCE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB of"
    " which 1.02 GiB is free. Including non-PyTorch memory, this process has 78.15 GiB memory in use. Of the allocated"
    " memory 76.30 GiB is allocated by PyTorch, and 0.41 GiB is reserved by PyTorch but unallocated."
)


class Written:
    """A log that is written line by line."""

    def __init__(self):
        self.lines = []
        self.seconds = 0

    def say(self, who, message, *, level="INFO", file="core.py:1", after=1):
        """One message of a process; without a name where ``who`` is empty."""
        self.seconds += after
        clock = f"{self.seconds // 3600:02d}:{self.seconds // 60 % 60:02d}:{self.seconds % 60:02d}"
        self.lines.append(f"{f'({who}) ' if who else ''}{level} 05-20 {clock} [{file}] {message}")
        return self

    def print(self, text):
        """Something that no logger wrote."""
        self.lines.append(text)
        return self

    def raised(self, who, *frames, error):
        """An exception that an engine logs."""
        self.say(who, "Traceback (most recent call last):", level="ERROR", after=0)
        for file, function in frames:
            self.say(who, f'  File "/x/vllm/{file}", line 7, in {function}', level="ERROR", after=0)
        return self.say(who, error, level="ERROR", after=0)

    def banner(self, pid, *, utilization=0.9, api=None):
        """An API server and its engine begin; only the engine where ``api`` is None."""
        if api is not None:
            self.say(f"APIServer pid={api}", "vLLM API server version 0.20.2")
            self.say(f"APIServer pid={api}", ARGUMENTS % utilization)
        return self.say(f"EngineCore pid={pid}", CONFIG, after=5)

    def loaded(self, who):
        """The weights are there."""
        return self.say(who, LOAD, after=3).say(who, LOADED, after=5)

    def sized(self, who, *, kv_gib=53.5):
        """The KV cache is planned."""
        return self.say(who, AVAILABLE % kv_gib, after=30)

    def ready(self, who):
        """Graphs are captured, and it is ready."""
        return self.say(who, CAPTURED, after=5).say(who, READY)

    def dies_loading(self, who):
        """Out of memory, with its weights half loaded."""
        self.say(who, LOAD, after=3)
        self.say(who, "EngineCore failed to start.", level="ERROR")
        return self.raised(who, ("v1/worker/gpu_worker.py", "load_model"), error=SENTENCE)

    def dies_serving(self, who):
        """Out of memory in a request."""
        self.say(who, "EngineCore encountered a fatal error.", level="ERROR", after=60)
        return self.raised(
            who, ("v1/engine/core.py", "run_busy_loop"), ("v1/worker/gpu_worker.py", "execute_model"), error=SENTENCE
        )

    def told(self, tmp_path):
        """What the doctor says of it."""
        path = tmp_path / "starts.log"
        path.write_text("\n".join(self.lines) + "\n", encoding="utf-8")
        return document(path)


def outcomes(told):
    """Of all starts, oldest first."""
    return [run["outcome"] for run in told["runs"]]


def started(log, pid, *, api=None, **more):
    """A start that comes to ready."""
    who = f"EngineCore pid={pid}"
    log.banner(pid, api=api, **more)
    return log.loaded(who).sized(who).ready(who)


def failed(log, pid, *, api=None, **more):
    """A start that dies while it loads."""
    log.banner(pid, api=api, **more)
    return log.dies_loading(f"EngineCore pid={pid}")


def test_banners_of_server_and_engine_are_one_start(tmp_path):
    """The API server's version, its arguments and the engine's configuration begin one start."""
    told = started(Written(), 300, api=290).told(tmp_path)
    assert outcomes(told) == ["ready"]
    assert main_of(told)["figures"]["gpu_memory_utilization"] == 0.9


@pytest.mark.parametrize("api", [None, 290])
def test_other_pid(tmp_path, api):
    """A banner of another process after a failure begins another start; the last failed one matters."""
    log = failed(Written(), 300, api=api)
    told = failed(log, 400, api=None if api is None else 390).told(tmp_path)
    assert outcomes(told) == ["oom", "oom"]
    assert told["main"] == 1


@pytest.mark.parametrize("api", [None, 1])
def test_same_pid(tmp_path, api):
    """Containers give the same pid each time: the banner again is another start."""
    log = failed(Written(), 77, api=api)
    told = failed(failed(log, 77, api=api), 77, api=api).told(tmp_path)
    assert outcomes(told) == ["oom", "oom", "oom"]
    assert told["main"] == 2


@pytest.mark.parametrize("pids", [(300, 400), (77, 77)])
def test_no_banner(tmp_path, pids):
    """Where the banners are cut off, a process that begins to load again after a failure is another start."""
    log = Written()
    for pid in pids:
        log.dies_loading(f"EngineCore pid={pid}")
    told = log.told(tmp_path)
    assert outcomes(told) == ["oom", "oom"]
    assert told["main"] == 1


def test_no_banner_and_no_names(tmp_path):
    """The same for an engine without names: V0, or one that runs inside a script."""
    log = Written()
    for _ in range(2):
        log.dies_loading("")
    assert outcomes(log.told(tmp_path)) == ["oom", "oom"]


def test_loading_a_draft_model_is_no_other_start(tmp_path):
    """A second model that is loaded before anything has failed belongs to the same start."""
    who = "EngineCore pid=300"
    log = Written().banner(300).loaded(who)
    told = log.say(who, "Loading drafter model...").loaded(who).sized(who).ready(who).told(tmp_path)
    assert outcomes(told) == ["ready"]


def test_engines_of_data_parallelism_are_one_start(tmp_path):
    """Engines that print the same banner at once are ranks of one start, in whatever order they print it."""
    log = Written().say("APIServer pid=1", ARGUMENTS % 0.9)
    who = [f"EngineCore_DP{n} pid={300 + n}" for n in (2, 0, 3, 1)]
    for each in who:
        log.say(each, CONFIG)
    for each in who:
        log.loaded(each)
    for each in who:
        log.sized(each)
    for each in who:
        log.ready(each)
    assert outcomes(log.told(tmp_path)) == ["ready"]


def test_an_engine_that_prints_its_banner_late(tmp_path):
    """An engine of data parallelism may begin when another one has loaded already."""
    log = Written()
    first, late = "EngineCore_DP0 pid=300", "EngineCore_DP1 pid=301"
    log.say(first, CONFIG).loaded(first).say(late, CONFIG).loaded(late)
    for each in (first, late):
        log.sized(each).ready(each)
    assert outcomes(log.told(tmp_path)) == ["ready"]


def test_one_engine_of_several_fails(tmp_path):
    """Where one engine of data parallelism dies, its start has failed, and it is one start."""
    log = Written()
    first, other = "EngineCore_DP0 pid=300", "EngineCore_DP1 pid=301"
    log.say(first, CONFIG).say(other, CONFIG).loaded(first).dies_loading(other)
    told = log.say("APIServer pid=1", "Engine core initialization failed.", level="ERROR").told(tmp_path)
    assert outcomes(told) == ["oom"]
    assert main_of(told)["failed_state"] == "load_weights"


def test_restart_of_engines_of_data_parallelism(tmp_path):
    """All of them again, under other pids, are the second start."""
    log = Written()
    for base in (300, 400):
        who = [f"EngineCore_DP{n} pid={base + n}" for n in range(2)]
        for each in who:
            log.say(each, CONFIG)
        log.loaded(who[0])
        log.dies_loading(who[1])
    assert outcomes(log.told(tmp_path)) == ["oom", "oom"]


def test_failed_then_ready(tmp_path):
    """A failed start matters more than the ready one that follows it."""
    told = started(failed(Written(), 300, api=290), 400, api=390).told(tmp_path)
    assert outcomes(told) == ["oom", "ready"]
    assert told["main"] == 0


def test_ready_twice(tmp_path):
    """Where none failed the last one matters."""
    log = started(Written(), 300, api=290)
    log.print("(APIServer pid=290) INFO:     Shutting down")
    told = started(log, 400, api=390).told(tmp_path)
    assert outcomes(told) == ["ready", "ready"]
    assert told["main"] == 1


def test_crash_while_serving(tmp_path):
    """A ready start that dies of a request is one start, and it failed while serving."""
    told = started(Written(), 300, api=290).dies_serving("EngineCore pid=300").told(tmp_path)
    assert outcomes(told) == ["oom"]
    assert main_of(told)["failed_state"] == "serving"


def test_crash_while_serving_and_a_restart(tmp_path):
    """What follows the crash is another start."""
    log = started(Written(), 300, api=290).dies_serving("EngineCore pid=300")
    told = started(log, 400, api=390).told(tmp_path)
    assert outcomes(told) == ["oom", "ready"]
    assert told["main"] == 0


def test_error_of_a_request_is_no_crash(tmp_path):
    """A ready start whose server answers a request with an error is ready."""
    log = started(Written(), 300, api=290)
    log.raised(
        "APIServer pid=290",
        ("entrypoints/openai/serving_chat.py", "create_chat_completion"),
        error="ValueError: no such template",
    )
    assert outcomes(log.told(tmp_path)) == ["ready"]


def test_cut_in_the_middle(tmp_path):
    """A last start whose log stops has no end, and it is the one that matters."""
    told = started(Written(), 300).banner(400).loaded("EngineCore pid=400").told(tmp_path)
    assert outcomes(told) == ["ready", "incomplete"]
    assert told["main"] == 1


def test_killed_between(tmp_path):
    """A container that is killed for memory and started again: the kill belongs to the first start."""
    log = Written().banner(300).loaded("EngineCore pid=300").print("vllm-1 exited with code 137")
    told = started(log, 300).told(tmp_path)
    assert outcomes(told) == ["oom", "ready"]
    assert codes(told["runs"][0])[0] == "host.out_of_memory"
    assert codes(told["runs"][1]) == []


def test_figures_and_settings_stay_with_their_start(tmp_path):
    """What one start printed or was given is not said of the next."""
    log = failed(Written(), 300, api=290, utilization=0.95)
    log.banner(400)
    told = (
        log.loaded("EngineCore pid=400")
        .sized("EngineCore pid=400", kv_gib=40.25)
        .ready("EngineCore pid=400")
        .told(tmp_path)
    )
    first, second = told["runs"]
    assert first["figures"]["total_bytes"] == round(79.18 * GIB)
    assert first["figures"]["gpu_memory_utilization"] == 0.95
    assert "kv_available_bytes" not in first["figures"]
    assert second["figures"]["kv_available_bytes"] == round(40.25 * GIB)
    assert not {"total_bytes", "gpu_memory_utilization", "oom_tried_bytes"} & set(second["figures"])


def test_spans(tmp_path):
    """Starts have their lines one after the other, and ids of their own."""
    told = started(failed(failed(Written(), 300), 300), 300).told(tmp_path)
    spans = [span_of(run) for run in told["runs"]]
    assert [first for first, _ in spans] == sorted(first for first, _ in spans)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))
    assert len({run["run"] for run in told["runs"]}) == 3


def test_three_hundred_restarts(tmp_path):
    """A crash loop of 300 starts keeps the last ones, says how many it left out, and is read at once."""
    log = Written()
    for number in range(300):
        failed(log, 300 + 10 * number, api=299 + 10 * number)
    began = time.process_time()
    told = log.told(tmp_path)
    assert time.process_time() - began < 10
    assert set(outcomes(told)) == {"oom"}
    assert 2 <= len(told["runs"]) <= 200
    assert told["main"] == len(told["runs"]) - 1
    assert span_of(told["runs"][-1])[1] == len(log.lines)
    left_out = 300 - len(told["runs"])
    unseen = read_starts(tmp_path / "starts.log")[0].unseen
    assert any(f"{left_out} earlier starts" in text for text in unseen)


def test_crash_loop_of_a_known_fault():
    """The three starts of a log in the table of faults have the same verdict, each."""
    told = document(FAULTS / "F71.log")
    assert outcomes(told) == ["error", "error", "error"]
    assert [codes(run) for run in told["runs"]] == [["state.raised"]] * 3


def test_two_pastes_of_one_start(tmp_path):
    """A server and a client log of the same failure that are pasted behind each other are not counted as ready."""
    log = failed(Written(), 300, api=290)
    told = log.print("").print("RuntimeError: Engine core initialization failed. See root cause above.").told(tmp_path)
    assert outcomes(told) == ["oom"]
