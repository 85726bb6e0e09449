"""The examples run as they stand, print what they promise, and leave journals that say the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py"))
#: An engine that the examples embed; no example by itself.
ENGINE = "classic_engine/"


def gist(verdict):
    """Outcome, failed state, and what is worse than a note."""
    findings = [(each["code"], each["severity"]) for each in verdict["findings"] if each["severity"] != "note"]
    return verdict["outcome"], verdict["failed_state"], findings


def test_every_example_is_told_of():
    """The page of examples names each, and there is no other."""
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")

    named = re.findall(r"^\| `(\S+)`", page, re.MULTILINE)
    assert named == [
        "plain_script.py",
        "own_engine.py",
        "custom_state.py",
        "embedded_classic.py",
        "driven_classic.py",
        "classic_engine/",
        "transformers_cb.py",
        "hooks/metric.py",
        "hooks/lease.py",
        "hooks/rule.py",
    ]
    assert sorted(set(named) - {ENGINE}) == [name for name in SCRIPTS if not name.startswith(ENGINE)]


def test_plain_script(example):
    """A script of under 60 lines keeps control, comes to ready, and its replays equal the eager steps."""
    output, (verdict,) = example("plain_script.py")

    assert len((EXAMPLES / "plain_script.py").read_text(encoding="utf-8").splitlines()) < 60
    blocks = verdict["figures"]["gpu_blocks"]
    assert output.startswith(f"ready with {blocks} KV blocks")
    assert blocks > 1_000
    assert gist(verdict) == ("ready", None, [])
    assert verdict["figures"]["weights_bytes"] == 2 << 20
    assert verdict["figures"]["graph_actual_bytes"] == verdict["figures"]["graph_estimate_bytes"]


def test_own_engine(example):
    """An engine of nine methods is driven to ready, and the terms of its budget add up."""
    output, (verdict,) = example("own_engine.py")

    assert re.match(r"ready with \d+ KV blocks, [0-9.]+ MiB:\n  requested +1\.00 GiB\n", output)
    assert gist(verdict) == ("ready", None, [])
    assert (verdict["engine"], verdict["engine_version"]) == ("tiny", "1.0")


def test_own_engine_by_the_command(run, tmp_path):
    """The command starts the same engine by the name of the function that makes it."""
    command = ("-m", "startup_fsm", "run", "own_engine:make", "--runs", tmp_path / "runs")

    run(*command, cwd=EXAMPLES)

    (verdict,) = json.loads(run("-m", "startup_fsm", "doctor", "--json", "runs"))["runs"]
    assert gist(verdict) == ("ready", None, [])
    assert verdict["engine"] == "tiny"


def test_custom_state(example):
    """The state of its own is tried again by the edge of its own; that is a warning on a start that came to ready."""
    output, (verdict,) = example("custom_state.py")

    assert output.splitlines()[:3] == [
        "autotune, visit 1, entered by advance: fast but broken: failed",
        "autotune, visit 2, entered by again: portable: done",
        "recovered by again, 1 of 2: raised: the backend 'fast but broken' cannot build its kernels",
    ]
    assert gist(verdict) == ("ready", None, [("state.raised", "warning")])
    assert list(verdict["durations_ns"])[1:3] == ["load_weights", "autotune"]


def test_metric(example, tmp_path):
    """The file of the metric has seconds and bytes of all ten states and says that the start is ready."""
    output, (verdict,) = example("hooks/metric.py")

    assert output == (tmp_path / "startup.prom").read_text(encoding="utf-8")
    values = dict(line.rsplit(" ", 1) for line in output.splitlines())
    assert values.pop("startup_ready") == "1"
    names = ("startup_used_bytes", "startup_state_seconds")
    assert set(values) == {f'{name}{{state="{state}"}}' for name in names for state in verdict["durations_ns"]}
    assert len(values) == 20
    assert gist(verdict) == ("ready", None, [])


def test_lease(example):
    """One start holds its lease to the end; one is refused by another's; one leaves a server behind that hangs."""
    output, verdicts = example("hooks/lease.py")

    said = [line for line in output.splitlines() if "startup-fsm doctor" not in line]
    assert said == ["second: gpu-0 is leased to somebody else", "third: abandoned at its deadline of 2 s"]
    refused = ("error", "init_device", [("state.raised", "error")])
    assert list(map(gist, verdicts)) == [("ready", None, []), refused, refused]


def test_rule(example):
    """The start that asks for too much is refused in its first state, by the words of the rule; the other is ready."""
    output, verdicts = example("hooks/rule.py")

    refusal = "gpu_memory_utilization is 0.98; on shared devices at most 0.95 is allowed"
    assert f"refused: {refusal}" in output.splitlines()
    assert list(map(gist, verdicts)) == [("ready", None, []), ("error", "init_device", [("state.raised", "error")])]
    assert refusal in verdicts[1]["findings"][0]["message"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_is_left_out(name):
    """No example uses what the package does not show: no private name, no internal attribute of a start."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")

    assert (
        re.findall(
            r"\b(?:boot|step|budget)\._\w+|\.recorder|\.course|\.measurement|from startup_fsm\.\w+ import _", text
        )
        == []
    )
