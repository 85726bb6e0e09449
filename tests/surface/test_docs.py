"""The documentation says what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from startup_fsm.findings import CODES, SETTINGS
from startup_fsm.states import VOCABULARY

DOCS = Path(__file__).parents[2] / "docs"


def text(name: str) -> str:
    """One page."""
    return (DOCS / name).read_text(encoding="utf-8")


def test_events_page_is_current():
    """docs/events.md is what the event classes say today (`make events` writes it)."""
    spec = importlib.util.spec_from_file_location("generate_events", DOCS / "generate_events.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)

    assert text("events.md") == generator.page()


def test_every_code_has_a_section():
    """how-it-fails.md has one section for each code, in the order of the registry, and no other."""
    sections = re.findall(r"^\((\S+)\)=\n### `(\S+)`$", text("how-it-fails.md"), flags=re.MULTILINE)

    assert [(code, code) for code in CODES] == sections


@pytest.mark.parametrize("code", CODES)
def test_sections_answer_three_questions(code: str):
    """Each section says what happened, how it is known, and what to do."""
    section = text("how-it-fails.md").partition(f"### `{code}`\n")[2].partition("\n(")[0]

    assert re.findall(r"^\*\*(.+?)\.\*\*", section, flags=re.MULTILINE) == [
        "What happened",
        "How we know",
        "What to do",
    ]


def test_findings_page_is_current():
    """The reference has every code with its words."""
    rows = re.findall(r"^\| \{ref\}`(\S+) <\1>` \| (.+) \|$", text("reference/findings.md"), flags=re.MULTILINE)

    assert dict(rows) == CODES


def test_settings_page_is_current():
    """The reference has every setting that advice may name."""
    rows = re.findall(r"^\| `(\w+)` \|", text("reference/settings.md"), flags=re.MULTILINE)

    assert rows == list(SETTINGS)


def test_states_page_is_current():
    """The concept page has the vocabulary, in its order."""
    page = text("concepts/states-and-plans.md").partition("## Plans")[0]

    assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", page, flags=re.MULTILINE)) == VOCABULARY
