"""
Every fault, through the real command line: what happens, what the doctor says of it, and whether its advice cures it.

The table is a promise: outcome, failed state and the first finding of each fault, whatever the sizes are.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import attrs
import jsonschema
import pytest

from startup_fsm.cli import main

SEEDS = (0, 1, 2)
SCHEMA = json.loads((Path(__file__).parent.parent / "doctor.schema.json").read_text())
ENVIRONMENT = {**os.environ, "NO_COLOR": "1", "PYTHONWARNINGS": "error"}


@attrs.frozen
class Row:
    """One line of the table."""

    fault: str
    outcome: str
    failed_state: str | None
    finding: str
    exit: int = 3


TABLE = (
    Row("graphs-not-reserved", "oom", "capture_graphs", "graphs.not_reserved"),
    Row("estimate-short", "oom", "capture_graphs", "graphs.estimate_short"),
    Row("kv-held-by-view", "error", "teardown", "teardown.kv_alive"),
    Row("pool-reused", "error", "capture_graphs", "capture.pool_reused"),
    Row("metadata-missing", "error", "capture_throwaway", "state.raised"),
    Row("capture-fails", "error", "capture_throwaway", "capture.failed"),
    Row("neighbour-takes", "oom", "allocate_kv", "device.neighbour_grew"),
    Row("neighbour-frees", "ready", None, "device.neighbour_shrank", exit=0),
    Row("workspace-grows", "ready", None, "workspace.grew", exit=0),
    Row("weights-too-big", "oom", "load_weights", "weights.exceed_device"),
    Row("budget-too-small", "error", "size_kv", "budget.negative"),
    Row("request-too-long", "error", "size_kv", "budget.request_does_not_fit"),
    Row("sampler-not-profiled", "oom", "verify", "profile.incomplete"),
    Row("stall", "hang", "capture_graphs", "state.stalled", exit=-signal.SIGKILL),
    Row("killed", "incomplete", "allocate_kv", "run.ended_without_trace", exit=-signal.SIGKILL),
)


def run(*words, cwd):
    """One call of the command line."""
    command = [sys.executable, "-m", "startup_fsm", *words]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)


def start(directory, *words):
    """A start with the demo, and the verdict of the doctor on its journal."""
    done = run("demo", "--runs", "runs", *words, cwd=directory)
    report = run("doctor", "--json", "runs", cwd=directory)
    assert report.stdout, done.stderr + report.stderr
    answer = json.loads(report.stdout)
    jsonschema.validate(answer, SCHEMA)
    return done, answer["runs"][answer["main"]]


def flags(changes):
    """The changes of one advice as words of the command line; None where one has no value."""
    words = []
    for change in changes:
        if "to" not in change:
            return None
        if change["setting"] == "enforce_eager":
            words.append("--enforce-eager")
        else:
            words += [f"--{change['setting'].replace('_', '-')}", str(change["to"])]
    return words


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.fault)
def test_verdict(row, seed, tmp_path):
    """The doctor says what happened, and the journal never names the fault."""
    done, verdict = start(tmp_path, "--fault", row.fault, "--seed", str(seed))

    said = (verdict["outcome"], verdict["failed_state"], verdict["findings"][0]["code"])

    assert (row.outcome, row.failed_state, row.finding) == said, done.stderr
    assert row.exit == done.returncode
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()).lower()
    for name in (row.fault, row.fault.replace("-", "_"), row.fault.replace("-", "")):
        # The plain words "stall" and "killed" are part of events; as the name of what was asked for they stand quoted.
        needle = name if "-" in row.fault else f'"{name}"'
        assert needle.encode() not in written


#: Faults that a setting cures. The others want another device, another process, or another engine.
CURABLE = (
    "graphs-not-reserved",
    "estimate-short",
    "capture-fails",
    "neighbour-takes",
    "budget-too-small",
    "request-too-long",
    "sampler-not-profiled",
)


def start_here(directory, capsys, *words):
    """A start with the demo inside this process, which has torch loaded already; its verdict."""
    code = main(["demo", "--runs", str(directory), *words])
    capsys.readouterr()
    main(["doctor", "--json", str(directory)])
    answer = json.loads(capsys.readouterr().out)
    return code, answer["runs"][answer["main"]]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", CURABLE)
def test_advice(fault, seed, tmp_path, capsys):
    """Every advised value, applied to the same fault, makes the start ready."""
    _, verdict = start_here(tmp_path / "fault", capsys, "--fault", fault, "--seed", str(seed))
    advised = [words for advice in verdict["advice"] if (words := flags(advice["changes"])) is not None]

    outcomes = {}
    for at, words in enumerate(advised):
        code, cured = start_here(tmp_path / str(at), capsys, "--fault", fault, "--seed", str(seed), *words)
        outcomes[" ".join(words)] = (cured["outcome"], code)

    assert outcomes
    assert outcomes == dict.fromkeys(outcomes, ("ready", 0))


def test_nothing_is_advised_where_nothing_helps(tmp_path, capsys):
    """A fault that no setting cures gets no value to set."""
    for row in TABLE:
        if row.fault not in CURABLE and row.exit >= 0:
            _, verdict = start_here(tmp_path / row.fault, capsys, "--fault", row.fault)

            assert [flags(advice["changes"]) for advice in verdict["advice"]] == [None] * len(verdict["advice"])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", ["graphs-not-reserved", "estimate-short"])
def test_retries(fault, seed, tmp_path):
    """With retries allowed, the plan's own edges lead to ready with a smaller KV cache, and the journal says why."""
    _, verdict = start(tmp_path, "--fault", fault, "--seed", str(seed), "--retries", "3")
    journal = next(tmp_path.rglob("*.jsonl"))
    records = [json.loads(line) for line in journal.read_bytes().splitlines()]
    sizes = [each["payload"]["kv_bytes"] for each in records if each["kind"] == "budget_computed"]
    chosen = [each["payload"] for each in records if each["kind"] == "recovery_chosen"]

    assert verdict["outcome"] == "ready"
    assert len(sizes) == len(chosen) + 1 >= 2
    assert sizes == sorted(sizes, reverse=True)
    assert all(each["reason"].startswith("oom: ") and each["edge"] == "recover" for each in chosen)


@pytest.mark.parametrize("plan", ["throwaway", "single_capture", "eager"])
@pytest.mark.parametrize("words", [(), ("--shape", "0.5b", "--fake")], ids=["values", "fakes"])
def test_no_fault(plan, words, tmp_path):
    """Without a fault no plan gives a finding above a note."""
    done, verdict = start(tmp_path, "--plan", plan, *words)

    loud = [each for each in verdict["findings"] if each["severity"] != "note"]

    assert (verdict["outcome"], done.returncode, loud) == ("ready", 0, []), done.stderr


def test_the_holder_is_named(tmp_path):
    """A view that keeps the profiling KV alive is named with its module and attribute."""
    _, verdict = start(tmp_path, "--fault", "kv-held-by-view")

    message = verdict["findings"][0]["message"]

    assert "held by: startup_fsm.engines" in message
    assert "(attribute)" in message


def test_the_stuck_line_is_shown(tmp_path):
    """The stack of a stall ends at the line that waited."""
    _, verdict = start(tmp_path, "--fault", "stall")

    stack = [each["text"] for each in verdict["findings"][0]["evidence"] if "text" in each]

    assert "acquire" in stack[-1]
    assert any("startup_fsm/engines" in line for line in stack)


def test_a_step_that_does_not_fit(tmp_path, capsys):
    """Where the largest step does not fit, the advised number of tokens, applied, makes the start ready."""
    words = ("--shape", "8b", "--capture-sizes", "1,8")
    _, verdict = start_here(tmp_path / "fault", capsys, *words, "--max-num-batched-tokens", "600000")
    tokens = verdict["advice"][0]["changes"][0]

    code, cured = start_here(tmp_path / "cured", capsys, *words, "--max-num-batched-tokens", str(tokens["to"]))

    assert (verdict["outcome"], verdict["failed_state"]) == ("oom", "profile_activations")
    assert verdict["findings"][0]["code"] == "profile.out_of_memory"
    assert tokens["setting"] == "max_num_batched_tokens"
    assert (cured["outcome"], code) == ("ready", 0)
