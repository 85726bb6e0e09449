"""``what-if`` and ``import``: the budget again with other settings, and a text log as journals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from startup_fsm.cli import main
from startup_fsm.reading import read_starts
from startup_fsm.testing import counting_start
from startup_fsm.verdicts import judge

#: A whole V0 start whose request is too small: 8.00 x 0.70 - 5.20 - 0.03 - 1.42 = -1.05 GiB.
NEGATIVE = """\
INFO 01-15 10:00:01 model_runner.py:1115] Loading model weights took 5.2000 GB
INFO 01-15 10:00:04 worker.py:267] the current vLLM instance can use total_gpu_memory (8.00GiB) x \
gpu_memory_utilization (0.70) = 5.60GiB
INFO 01-15 10:00:04 worker.py:267] model weights take 5.20GiB; non_torch_memory takes 0.03GiB; PyTorch activation \
peak memory takes 1.42GiB; the rest of the memory reserved for KV Cache is -1.05GiB.
INFO 01-15 10:00:04 executor_base.py:111] # cuda blocks: 0, # CPU blocks: 4681
[rank0]: Traceback (most recent call last):
[rank0]:   File "/x/vllm/worker/worker.py", line 560, in raise_if_cache_size_invalid
[rank0]: ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A text log of a start that failed."""
    path = tmp_path / "server.log"
    path.write_text(NEGATIVE, encoding="utf-8")
    return path


def test_what_if_on_a_log(log, capsys):
    """A larger share brings what it is larger by: 0.20 x 8.00 GiB on top of -1.05."""
    assert main(["what-if", str(log), "--utilization", "0.9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["changes"] == {"gpu_memory_utilization": 0.9}
    assert found["before"]["available_bytes"] == pytest.approx(-1.05 * 2**30, abs=6e6)
    assert found["after"]["available_bytes"] == pytest.approx(0.55 * 2**30, abs=6e6)
    assert found["interval"][0] == pytest.approx(0.833, abs=0.002)


def test_what_if_that_does_not_fit(log, capsys):
    """A share that leaves nothing is no success, and the page says which ones would do."""
    assert main(["what-if", str(log), "--utilization", "0.75"]) == 3
    page = capsys.readouterr().out
    assert "it does not fit; shares from 0.833" in page
    assert all(len(line) <= 80 for line in page.splitlines())


def test_what_if_on_a_journal(tmp_path, capsys):
    """A journal of our own is asked in the same way, exactly: the change of the request is the change of the rest."""
    boot, engine = counting_start(journal=tmp_path)
    boot.run(engine)
    assert main(["what-if", str(tmp_path), "--utilization", "0.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    before, after = found["before"], found["after"]
    taken = before["requested_bytes"] - after["requested_bytes"]
    assert taken > 0
    assert before["available_bytes"] - after["available_bytes"] == taken


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "what-if needs a setting"),
        (["--utilization", "1.5"], "is not above 0 and at most 1"),
        (["--mem-fraction-static", "0.8"], "a budget does not tell what it changes"),
        (["--max-num-batched-tokens", "512"], "nothing tells what it was"),
    ],
)
def test_what_if_that_cannot_be(log, capsys, arguments, says):
    """A question that the numbers cannot answer is one sentence, not a number."""
    assert main(["what-if", str(log), *arguments]) == 1
    assert says in capsys.readouterr().err


def test_what_if_without_a_budget(tmp_path, capsys):
    """A log that stops before sizing has no budget to compute again."""
    path = tmp_path / "short.log"
    path.write_text("INFO 01-15 10:00:01 model_runner.py:1115] Loading model weights took 5.2000 GB\n")
    assert main(["what-if", str(path), "--utilization", "0.9"]) == 4
    assert "nothing here tells how the KV cache was sized" in capsys.readouterr().err


def test_import(log, tmp_path, capsys):
    """A log becomes a run directory, whose verdict is that of the log but for what was read."""
    assert main(["import", str(log), "-o", str(tmp_path / "runs"), "--json"]) == 0
    (start,) = json.loads(capsys.readouterr().out)["starts"]
    (imported,) = read_starts(tmp_path / "runs" / start["run"])
    (text,) = read_starts(log)
    one, other = (judge(each.sources, source=each.source, origin=None).as_json() for each in (imported, text))
    assert one == other
    assert one["source"] == "vllm"


def test_import_twice(log, tmp_path, capsys):
    """Nothing is written over."""
    assert main(["import", str(log), "-o", str(tmp_path / "runs")]) == 0
    assert main(["import", str(log), "-o", str(tmp_path / "runs")]) == 4
    assert "was imported already" in capsys.readouterr().err


def test_import_stays_inside(tmp_path):
    """A journal that calls its run a path is written below the directory that was named."""
    boot, engine = counting_start(journal=tmp_path / "runs")
    boot.run(engine)
    (path,) = (tmp_path / "runs").glob("*/*.jsonl")
    run = path.parent.name
    hostile = path.read_text(encoding="utf-8").replace(f'"{run}"', '"../../outside"')
    other = tmp_path / "hostile.jsonl"
    other.write_text(hostile, encoding="utf-8")
    assert main(["import", str(other), "-o", str(tmp_path / "a" / "b")]) == 0
    assert [each.parent.parent for each in tmp_path.rglob("*.jsonl") if "outside" in str(each)] == [
        tmp_path / "a" / "b"
    ]


def test_markdown(log, capsys):
    """The page for an issue has the same answer, and nothing of the log is markup in it."""
    log.write_text(NEGATIVE.replace("Try increasing", "<img src=x> @somebody **bold** | x Try increasing"))
    assert main(["doctor", str(log), "--markdown"]) == 3
    page = capsys.readouterr().out
    assert page.startswith("### Failed in size_kv")
    assert "`budget.negative`" in page
    assert "<img src=x> @somebody **bold**" in page
    outside = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", page)
    assert not any(each in outside for each in ("<img", "@somebody", "**bold**"))
