"""A short run of the fuzzer: what must hold for every log holds for some hundred hostile ones."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.logs import fuzz, fuzz_words
from tests.logs.fuzz_heavy import LIMIT_MB, LIMIT_S, weigh, write
from tests.logs.fuzz_logs import make

#: Logs of one part; its first one is held against the schema, and imported.
PART = fuzz.THOROUGH


@pytest.mark.parametrize("part", range(6))
def test_what_holds_for_every_log(part: int) -> None:
    """No exception but one error, an end in time, and a verdict that can be shown, encoded and imported."""
    tally = fuzz.fuzz(range(part * PART, part * PART + PART))
    assert tally.logs == PART
    assert not tally.failures, "\n".join(f"seed {each.seed}: {each.text}" for each in tally.failures)


def test_the_logs_say_something() -> None:
    """Hostile logs that no grammar knows would prove nothing: most come to an outcome, and not all to the same."""
    tally = fuzz.fuzz(range(10_000, 10_040))
    assert tally.outcomes["nothing"] < 20
    assert {"incomplete", "error", "oom", "ready"} <= set(tally.outcomes)


def test_a_seed_is_a_log() -> None:
    """Whatever breaks something can be made again."""
    assert make(7) == make(7)
    assert make(7) != make(8)


def test_rows_match_what_is_made_of_them() -> None:
    """Of each row there are lines: its pattern finds itself in most of the texts that it makes."""
    draw = random.Random(0)
    made = {row.pattern: [fuzz_words.matching(row.pattern, draw) for _ in range(40)] for row in fuzz_words.ROWS}
    deaf = [row.name for row in fuzz_words.ROWS if not any(row.search(text) for text in made[row.pattern])]
    assert len(deaf) <= 2, deaf


@pytest.mark.parametrize(("name", "size"), [("figures_of_ranks", 20), ("frames_of_ranks", 10), ("banners", 4)])
def test_memory_and_time_are_bounded(name: str, size: int, tmp_path: Path) -> None:
    """However much there is to keep in twenty megabytes, a process stays below 150, and its time is linear."""
    write(name, tmp_path / "heavy.log", size * 1_000_000)
    weighed = weigh(tmp_path / "heavy.log")
    assert weighed.peak_mb < LIMIT_MB
    assert weighed.seconds < LIMIT_S * size


def test_a_failure_is_shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of a log that breaks something is what breaks it."""

    def check(path: Path, *, is_thorough: bool) -> None:
        assert b"ab" not in path.read_bytes()

    monkeypatch.setattr(fuzz, "check", check)
    data, path = b"one\ntwo abc\nthree\n" * 9, tmp_path / "x.log"
    failure = fuzz.failure_of(data, 1, path)
    assert failure is not None
    assert failure.place.startswith("AssertionError at test_fuzz.py:")
    assert fuzz.shrunk(data, 1, path, failure.place) == b"ab"
