"""What broke, or could have: logs that name, count, chain and repeat as no engine does."""

from __future__ import annotations

import io
import json
import time

import orjson
import pytest

from startup_fsm.codec import CODEC
from startup_fsm.fold import fold
from startup_fsm.importers import assembly
from startup_fsm.importers.course import ALL_EVENTS
from startup_fsm.importers.textlog import read_log
from startup_fsm.importers.tracebacks import CHAIN
from startup_fsm.reading import read_starts
from startup_fsm.verdict import report
from startup_fsm.verdicts import judge

CLOCK = "INFO 01-02 03:04:05 [a.py:1]"
KV = "Available KV cache memory: {} GiB"


def read(*lines):
    return read_log(io.BytesIO("\n".join((*lines, "")).encode()))


def only(*lines):
    (start,) = read(*lines).starts
    return start


def worker(name, text, pid=7, head=CLOCK):
    return f"({name} pid={pid}) {head} {text}"


def verdict_of(tmp_path, text):
    path = tmp_path / "x.log"
    path.write_text(text, encoding="utf-8")
    (start,) = read_starts(path)
    return judge(start.sources, source=start.source, origin=start.origin)


class TestNames:
    def test_names_of_processes_are_steps_of_a_path(self):
        """Whatever a log calls a process, its journal has a plain name."""
        start = only(worker("Worker_<b>/..(x)", KV.format(1)), worker("EngineCore", KV.format(2)))
        assert [each.name for each in start.processes] == ["Worker__b__.._x_", "EngineCore"]

    def test_names_that_become_alike(self, tmp_path):
        """Two processes whose names differ in signs that no file name has stay two, of one start."""
        lines = (worker("rank-5", KV.format(1)), f"[rank5]: {KV.format(2)}", worker("rank:5", KV.format(3)))
        start = only(*lines)
        assert [each.name for each in start.processes] == ["rank-5", "rank-5-2", "rank_5"]
        path = tmp_path / "x.log"
        path.write_text("\n".join(lines), encoding="utf-8")
        (grouped,) = read_starts(path)
        assert len(grouped.processes) == 3
        assert grouped.processes[1].label == "rank 5"

    def test_more_processes_than_a_start_has(self):
        """What comes after the last one that is kept is nobody's, and bears nobody's rank."""
        count = assembly.PROCESSES + 9
        start = only(*(worker(f"Worker_TP{at}", KV.format(at), pid=at) for at in range(1, count)))
        assert len(start.processes) == assembly.PROCESSES + 1
        last = start.processes[-1].records
        assert last[0].process == "unnamed"
        assert last[0].rank is None
        assert last[0].event.label is None


class TestAmounts:
    def test_events_of_a_start(self):
        """Figures of a thousand ranks that never end are cut; every process keeps its first ones, and how it failed."""
        lines = [worker(f"Worker_TP{at % 1_000}", KV.format(at)) for at in range(ALL_EVENTS + 30_000)]
        lines.append(
            worker("Worker_TP7", "torch.OutOfMemoryError: CUDA out of memory", head="ERROR 01-02 03:04:05 [a.py:1]")
        )
        start = only(*lines)
        assert sum(len(each.records) for each in start.processes) < ALL_EVENTS + 3_000
        assert all(each.unlisted > 0 for each in start.processes)
        failed = next(each for each in start.processes if each.name == "TP7")
        assert failed.records[-1].event.end == "failed"
        assert all(fold(each.records).violations == [] for each in start.processes)

    def test_events_of_all_starts(self, monkeypatch):
        """Of a crash loop the last starts are kept, as many as are not too much together."""
        monkeypatch.setattr(assembly, "RECORDS", 50)
        banner = "vLLM API server version 0.11.0"
        lines = [
            line
            for pid in range(40)
            for line in (worker("APIServer", banner, pid=pid), worker("EngineCore", KV.format(pid), pid=pid))
        ]
        log = read(*lines)
        assert sum(len(each.records) for start in log.starts for each in start.processes) <= 50
        assert log.left_out + len(log.starts) == 40
        assert log.starts[-1].last_line == 80

    def test_many_names_of_one_banner(self):
        """A banner costs the same, however many have printed one."""
        lines = [worker(f"APIServer_{at}", "vLLM API server version 0.11.0", pid=at) for at in range(30_000)]
        began = time.process_time()
        read(*lines, worker("EngineCore", KV.format(1)))
        assert time.process_time() - began < 10

    def test_the_same_banner_again(self):
        """Another process of the same name begins another start; the same one does once it has come to a state."""
        banner = "vLLM API server version 0.11.0"
        one = worker("EngineCore", KV.format(1))
        assert len(read(worker("APIServer", banner, pid=1), worker("APIServer", banner, pid=2), one).starts) == 1
        again = (worker("APIServer", banner, pid=1), one, worker("APIServer", banner, pid=1), one)
        assert len(read(*again).starts) == 2


class TestChains:
    CHAINED = "\nThe above exception was the direct cause of the following exception:\n"

    def chain(self, count):
        deep = "\n".join(f'  File "/x/vllm/f{at}.py", line 1, in g{at}' for at in range(390))
        rest = f'Traceback (most recent call last):\n  File "/x/vllm/a.py", line 1, in b\nValueError: %\n{self.CHAINED}'
        return [
            f"Traceback (most recent call last):\n{deep}\nRuntimeError: the first\n{self.CHAINED}",
            *(rest.replace("%", str(at)) for at in range(count)),
        ]

    def test_the_first_of_a_long_chain(self):
        """What all others were raised from is what the process failed of, however many there are."""
        start = only(worker("EngineCore", KV.format(1)), *self.chain(3 * CHAIN))
        events = [record.event for each in start.processes for record in each.records]
        (failed,) = [each for each in events if each.kind in ("state_failed", "decision_made")]
        assert (
            "the first" in orjson.dumps([failed.message if failed.kind == "state_failed" else failed.reason]).decode()
        )

    def test_a_long_chain_takes_its_own_time(self):
        """Of a thousand chained exceptions each is judged once."""
        began = time.process_time()
        only(worker("EngineCore", KV.format(1)), *self.chain(1_000))
        assert time.process_time() - began < 3


def test_words_in_paths():
    """What a frame is called says nothing: a path may hold any word."""
    frame = '  File "/srv/OOMKilled/python -m sglang.launch_server/run.py", line 1, in f'
    start = only(worker("EngineCore", KV.format(1)), "Traceback (most recent call last):", frame, "ValueError: no")
    events = [record.event for each in start.processes for record in each.records]
    assert start.source == "vllm"
    assert [each.inputs["category"] for each in events if each.kind == "decision_made"] == ["raised"]


def test_empty_lines_in_json():
    """Thirty thousand empty lines in one object are no message each."""
    fields = {"levelname": "ERROR", "message": "one" + "\n" * 30_000 + KV.format(1), "name": "vllm." + "a" * 120}
    text = json.dumps({**fields, "asctime": "2026-01-02 03:04:05", "processName": "EngineCore", "process": 7})
    began = time.process_time()
    start = only(*[text] * 20)
    assert time.process_time() - began < 1
    assert start.processes[0].records[-1].event.value == 1 << 30


@pytest.mark.parametrize(
    "text",
    [
        "No available shared memory broadcast block found in 999999999999999 seconds",
        "No available shared memory broadcast block found in -999999999999999 seconds",
        "Applying persisted startup plan /x: kv_cache_memory_bytes=99999999999999999999",
        "Sleep mode freed 999999999999999 GiB memory, 999999999999999 GiB memory is still in use.",
    ],
)
def test_numbers_beyond_64_bits(text):
    """Every event can be journaled and read again, whatever number a log holds."""
    start = only(worker("EngineCore", "Starting to load model x"), worker("EngineCore", text))
    records = [record for each in start.processes for record in each.records]
    assert len(records) > 2
    assert [CODEC.decode(CODEC.encode(record)).event for record in records[1:]] == [each.event for each in records[1:]]


def test_clocks_of_two_kinds():
    """A line of a logger that prints the year does not move the clock of one that does not by half a century."""
    later = "2727-01-02 03:04:06,123 - INFO - run.py:7 - Starting to load model x"
    start = only(
        worker("EngineCore", "Starting to load model x"),
        later.replace("2727", "2026"),
        later,
        worker("EngineCore", KV.format(1), head=CLOCK.replace(":05", ":15")),
    )
    assert {each.name: [record.t for record in each.records] for each in start.processes} == {
        "EngineCore": [0, 0, 10_000_000_000, 10_000_000_000, 10_000_000_000],
        "unnamed": [0, 0],
    }


ABSURD_SHARE = """vllm serve m --gpu-memory-utilization 9G
CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB is free.
"""
ABSURD_LENGTH = """Auto-fit max_model_len: reduced from 2 to 3 to fit in available GPU memory (553 GiB
max seq len (99256563) is larger than the maximum number of tokens that can be stored in KV cache (1)
current vLLM instance can use 5 MiB
current --gpu-memory-utilization=0.8 is equivalent to --gpu-memory-utilization=0.2 without
"""


@pytest.mark.parametrize("text", [ABSURD_SHARE, ABSURD_LENGTH])
def test_numbers_that_nothing_has(text, tmp_path):
    """What follows from absurd numbers is left out: every number of the answer fits into 64 bits."""
    verdict = verdict_of(tmp_path, text)
    orjson.dumps(report([verdict]))
    assert all(abs(value) < 1 << 60 for value in verdict.figures.values())
    assert verdict.missing_bytes is None or verdict.missing_bytes < 1 << 60
