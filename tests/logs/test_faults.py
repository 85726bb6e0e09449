"""
Every fault of the table of known start-up faults that a log can show, as a small log: what is said of it.

``faults.json`` has a case for each log in ``faults/``, and why the other rows have none. A case says the outcome, the
state, the codes of which one must come first, the known fault that must be named, settings of which one must be among
the first three items of the advice and others that must not be anywhere in it, and figures exactly as printed.
"""

from __future__ import annotations

import json

import pytest

from startup_fsm.findings import CODES, SETTINGS
from tests.logs.verdicts_of import (
    FAULTS,
    HERE,
    advised,
    amount,
    changes,
    codes,
    document_once,
    first_code,
    lines_of,
    main_of,
    moves,
    span_of,
)

TABLE = json.loads((HERE / "faults.json").read_bytes())
CASES = TABLE["cases"]
NAMES = sorted(CASES)

#: What the doctor does not get right yet, by the test that shows it.
WRONG: dict[tuple[str, str], str] = {}


def of(test, *, key=None):
    """A case for each fault that has something to say for a test, with its mark where the doctor is wrong."""
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=WRONG[test, name]))
            if (test, name) in WRONG
            else name
            for name in NAMES
            if key is None or key in CASES[name]
        ],
    )


def told(name):
    """What is said of a fault's log."""
    return document_once(FAULTS / f"{name}.log")


def verdict(name):
    """The verdict that matters."""
    return main_of(told(name))


def test_every_row_is_answered_for():
    """Each of the 72 rows has a log, or a reason why no log can show it; and there is no log that is nobody's."""
    rows = [*CASES, *TABLE["not_in_a_log"]]
    assert sorted(rows) == [f"F{number:02d}" for number in range(1, 73)]
    assert sorted(path.stem for path in FAULTS.glob("*.log")) == NAMES
    assert all(TABLE["not_in_a_log"].values())


@of("end")
def test_end(name):
    """Outcome, state, part and rank are those that the text proves."""
    case, found = CASES[name], verdict(name)
    assert (found["outcome"], found["failed_state"], found["part"]) == (
        case["outcome"],
        case["failed_state"],
        case["part"],
    )
    assert found["failed_rank"] == case.get("failed_rank", found["failed_rank"])
    assert found["ranks"] == case.get("ranks", 1)
    assert len(told(name)["runs"]) == case.get("runs", 1)


@of("first finding")
def test_first_finding(name):
    """The first finding that is more than a note is the earliest violated invariant; a ready start has no error."""
    found = verdict(name)
    assert first_code(found) in CASES[name]["first"]
    if CASES[name]["outcome"] == "ready":
        assert [each["code"] for each in found["findings"] if each["severity"] == "error"] == []


@of("other findings")
def test_other_findings(name):
    """What must be said beside the first finding is said, and what must not be is not."""
    found, case = verdict(name), CASES[name]
    assert set(case.get("also", [])) <= set(codes(found))
    assert not set(case.get("without", [])) & set(codes(found))
    spoken = "\n".join([each["message"] for each in found["findings"]] + [each["because"] for each in found["advice"]])
    assert [words for words in case.get("said", []) if words not in spoken] == []
    assert [words for words in case.get("unsaid", []) if words in spoken] == []


@of("known fault", key="known")
def test_known_fault(name):
    """The fault is named by its row, or by the issue that it was reported in."""
    messages = [each["message"] for each in verdict(name)["findings"]]
    assert any(CASES[name]["known"] in message for message in messages), messages


@of("cure")
def test_cure(name):
    """One of the first three items of advice is a cure; no item is what makes it worse or has nothing to do with it."""
    found, case = verdict(name), CASES[name]
    assert not set(moves(found)) & set(case["never"])
    if case["cure"]:
        assert set(moves(found, first=3)) & set(case["cure"]), moves(found)
    else:
        assert moves(found) == []


@of("values", key="at_most")
def test_values(name):
    """A value that is advised would have fitted by the figures of the log."""
    found = verdict(name)
    given = {setting: advised(found, setting) for setting in CASES[name]["at_most"]}
    assert any(value is not None for value in given.values()), changes(found)
    for setting, most in CASES[name]["at_most"].items():
        value = given[setting]
        assert value is None or 0 < value <= most


@of("figures")
def test_figures(name):
    """Figures are those that the log prints, to the byte of their print; what nobody printed is absent."""
    found, case = verdict(name), CASES[name]
    wanted = {figure: amount(printed) for figure, printed in case["figures"].items()}
    assert {figure: found["figures"].get(figure) for figure in wanted} == wanted
    assert not set(case.get("absent", [])) & set(found["figures"])
    for figure, printed in case.get("figures_of_first", {}).items():
        assert told(name)["runs"][0]["figures"][figure] == amount(printed)


@of("words")
def test_words(name):
    """Codes and settings are registered ones, and every change goes the way that it says."""
    for run in told(name)["runs"]:
        assert set(codes(run)) <= set(CODES)
        for change in changes(run):
            assert change["setting"] in SETTINGS
            before, to = change.get("from"), change.get("to")
            if to is not None:
                assert to != before
            if isinstance(before, int | float) and isinstance(to, int | float):
                assert (to > before) == (change["direction"] == "raise") or change["direction"] in ("set", "remove")
            if to is not None and "flag" in change and not isinstance(to, bool):
                assert str(to).rstrip("0").rstrip(".") in change["flag"]


@of("evidence")
def test_evidence(name):
    """Evidence is of this start, and its text is what its line holds."""
    lines = lines_of(FAULTS / f"{name}.log")
    for run in told(name)["runs"]:
        first, last = span_of(run)
        for finding in run["findings"]:
            for evidence in finding["evidence"]:
                assert first <= evidence["line"] <= last
                assert evidence["text"][:200] in lines[evidence["line"] - 1]
