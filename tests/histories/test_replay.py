"""Kept journals: what was true of a start yesterday is said of its journal today."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import jsonschema
import orjson
import pytest

from startup_fsm.codec import CODEC
from startup_fsm.fold import fold
from startup_fsm.journal import read_journal
from startup_fsm.replay import replay
from startup_fsm.verdict import report

HERE = Path(__file__).parent
NAMES = sorted(path.name.removesuffix(".jsonl") for path in HERE.glob("*.jsonl"))


def _make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("histories_make", HERE / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKE = _make()


def test_the_histories_are_there() -> None:
    """A start that became ready, one that ran out of memory while capturing, one that was killed."""
    assert NAMES == ["killed", "oom_in_capture", "ready"]


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_says_what_it_said(name: str) -> None:
    """Outcome, figures, ledger, findings with their evidence, and advice are those that were kept."""
    expected: dict[str, Any] = orjson.loads((HERE / f"{name}.expected.json").read_bytes())
    verdict = MAKE.replayed(HERE / f"{name}.jsonl")
    assert orjson.loads(orjson.dumps(MAKE.expected_of(verdict))) == expected
    schema = json.loads((HERE.parent / "doctor.schema.json").read_bytes())
    jsonschema.Draft202012Validator(schema).validate(orjson.loads(orjson.dumps(report([verdict]))))


@pytest.mark.parametrize(
    ("name", "outcome", "state", "first"),
    [
        ("ready", "ready", None, None),
        ("oom_in_capture", "oom", "capture_graphs", "graphs.not_reserved"),
        ("killed", "incomplete", "allocate_kv", "run.ended_without_trace"),
    ],
)
def test_each_history_is_what_its_name_says(name: str, outcome: str, state: str | None, first: str | None) -> None:
    """Said here too, so that making them again cannot change it unseen."""
    verdict = MAKE.replayed(HERE / f"{name}.jsonl")
    assert (verdict.outcome, verdict.failed_state) == (outcome, state)
    assert [each.finding.code for each in verdict.findings][:1] == ([first] if first else [])


@pytest.mark.parametrize("name", NAMES)
def test_a_history_follows_its_plan_and_is_judged_the_same(name: str) -> None:
    """No violation of the plan in the journal, and today's checks say what was said then."""
    journal = read_journal(HERE / f"{name}.jsonl")
    assert [each.kind for each in journal.problems] == (["torn"] if name == "killed" else [])
    again = replay(journal.records)
    assert again.divergence() is None
    assert list(again.differences) == []
    assert again.edges > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_history_written_again_is_the_same_bytes(name: str) -> None:
    """Nothing is dropped and nothing is made up between reading and writing."""
    lines = (HERE / f"{name}.jsonl").read_bytes().splitlines(keepends=True)
    for line in lines if name != "killed" else lines[:-1]:
        assert CODEC.encode(CODEC.decode(line)) == line


@pytest.mark.parametrize("name", NAMES)
def test_a_history_tells_nothing_of_who_made_it(name: str) -> None:
    """No host, no absolute path."""
    text = (HERE / f"{name}.jsonl").read_text()
    assert '"host":"host"' in text
    assert "/home/" not in text
    for record in read_journal(HERE / f"{name}.jsonl").records:
        assert not any(frame.startswith("/") for frame in getattr(record.event, "where", ()))
    assert attrs.asdict(fold(read_journal(HERE / f"{name}.jsonl").records).started)["pid"] == 4711  # type: ignore[arg-type]
