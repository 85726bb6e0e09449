"""The documentation says what the code says."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from startup_fsm import events
from startup_fsm.budget import Knobs
from startup_fsm.checks import CHECKS, RANK_CHECKS
from startup_fsm.findings import CODES, SETTINGS
from startup_fsm.plan import eager, single_capture, throwaway
from startup_fsm.states import VOCABULARY
from startup_fsm.verbs import comparing, reading, starting, tracing, watching

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"

#: A block of Python that is run: its page names it so in a comment, which is not shown.
RUN = re.compile(r"^<!-- run -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (README, *DOCS.rglob("*.md"))
    if RUN.search(path.read_text(encoding="utf-8"))
)

VERBS = {
    "demo": starting.demo,
    "run MODULE:FACTORY": starting.run,
    "time PATH": reading.time,
    "blame PATH": reading.blame,
    "chain PATH": comparing.chain,
    "diff A B": comparing.diff,
    "doctor PATH...": reading.doctor,
    "verify PATH": reading.verify,
    "plan [NAME or PATH]": reading.plan,
    "watch PATH": watching.watch,
    "trace PATH": tracing.trace,
}


def text(name: str) -> str:
    """One page."""
    return (DOCS / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def generator():
    """What writes docs/events.md."""
    spec = importlib.util.spec_from_file_location("generate_events", DOCS / "generate_events.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_events_page_is_current(generator):
    """docs/events.md is what the event classes say today (`make events` writes it)."""
    assert text("events.md") == generator.page()


def test_every_field_is_explained(generator):
    """Each field of each event, and of what events hold, has a meaning in the docstring of its class, and no other."""
    left_out = {events.Record: {"event", "extra"}}
    for cls in (events.Record, *events.EVENT_TYPES.values(), *generator.PARTS):
        said = set(generator.meanings(cls)[1]) - left_out.get(cls, set())
        assert said == {field.name for field in attrs.fields(cls)} - left_out.get(cls, set()), cls.__name__

    assert "|  |" not in text("events.md")


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page: str, tmp_path):
    """The blocks of a page that are marked are one program, and it runs where there is no GPU."""
    program = "\n".join(RUN.findall((ROOT / page).read_text(encoding="utf-8")))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STARTUP_FSM_")}
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert ran.returncode == 0, ran.stderr


def test_main_pages_have_blocks_that_run():
    """The README and each guide that shows code is among the pages that are run."""
    assert set(PAGES) >= {
        "README.md",
        "docs/guide/embed-as-engine.md",
        "docs/guide/embed-with-states.md",
        "docs/guide/hooks.md",
    }


def test_links_of_the_readme_lead_somewhere():
    """What the README links to is in the repository."""
    targets = re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8"))

    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.parametrize("verb", VERBS)
def test_options_are_documented(verb: str):
    """The reference has every option of every verb, under its verb."""
    section = text("reference/cli.md").partition(f"## `startup-fsm {verb}`\n")[2].partition("\n## ")[0]
    assert section
    options = {
        f"--{name.replace('_', '-')}"
        for name, parameter in inspect.signature(VERBS[verb]).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }

    # --json is said once, for all verbs.
    shown = set(re.findall(r"^\| `(--[a-z-]+)", section, re.MULTILINE))
    assert shown | {"--json"} == options


def test_knobs_are_documented():
    """The page of the budget has every knob, in order."""
    table = text("concepts/budget.md").partition("## Knobs")[2].partition("\n## ")[0]

    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [field.name for field in attrs.fields(Knobs)]


def test_checks_are_documented():
    """The page of checks has each check, where it looks, and whether it fails a start, in the order they run."""
    rows = re.findall(
        r"^\| `(\w+)` \| (.+?) \| .+? \| (yes)? *\|$", text("concepts/checks-and-probes.md"), re.MULTILINE
    )

    assert [(name, set(re.findall(r"`(\w+)`", at)), fails == "yes") for name, at, fails in rows] == [
        (check.name, set(check.states), check.on_broken == "fail") for check in (*CHECKS, *RANK_CHECKS)
    ]


def test_recoveries_are_documented():
    """The page of plans has every edge that answers a failure or does less, with its causes."""
    rows = re.findall(
        r"^\| `(\w+)` \| `(\w+)` \| `(\w+)` \| `(\w+)` \| (\w+) \| (.+?) \| .+? \|$",
        text("concepts/states-and-plans.md"),
        re.MULTILINE,
    )

    assert [(*row[:5], tuple(re.findall(r"`(\w+)`", row[5]))) for row in rows] == [
        (plan.name, edge.source, edge.name, edge.target, edge.policy, edge.causes)
        for plan in (throwaway(), single_capture(), eager())
        for edge in plan.edges
        if edge.policy in ("recover", "degrade")
    ]


def test_plans_are_documented():
    """The page of plans has the way of each plan from its start to ready."""
    rows = dict(
        re.findall(
            r"^\| `(\w+)`(?: \(default\))? \| (`init_device`.+) \|$", text("concepts/states-and-plans.md"), re.MULTILINE
        )
    )

    for plan in (throwaway(), single_capture(), eager()):
        way, state = [], plan.start
        while state != "ready":
            way.append(state)
            state = plan.onward(state).target
        assert re.findall(r"`(\w+)`", rows[plan.name]) == way


def test_planned_codes_are_marked():
    """A code is marked as planned exactly where no code path gives it."""
    sources = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "startup_fsm").rglob("*.py")
        if path.name != "findings.py" and not path.name.startswith("advi") and "dialects" not in path.parts
    )
    page = text("how-it-fails.md")
    marked = {code for code in CODES if "*Planned" in page.partition(f"### `{code}`\n")[2].partition("\n(")[0]}

    assert marked == {code for code in CODES if f'"{code}"' not in sources}


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


def shown(command: str) -> list[str]:
    """What the README shows below a command, without what it leaves out."""
    below = README.read_text(encoding="utf-8").partition(f"$ {command}\n")[2]
    lines = re.split(r"^(?:```|\$ )", below, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    return [line.rstrip() for line in lines if line.strip() not in ("", "[...]")]


@pytest.mark.parametrize(
    "command",
    [
        ".venv/bin/startup-fsm demo --fault estimate-short",
        "startup-fsm doctor tests/logs/started/sampler_at_0996_v1.log",
    ],
)
def test_what_the_readme_shows_is_what_comes_out(command: str, tmp_path: Path):
    """Line by line, in its order; what is left out stands as [...]."""
    _, *arguments = command.split()
    paths = [str(ROOT / each) if (ROOT / each).exists() else each for each in arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STARTUP_FSM_")}
    ran = subprocess.run(
        [sys.executable, "-m", "startup_fsm", *paths],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    lines = iter(line.rstrip() for line in ran.stdout.splitlines())
    expected = shown(command)

    assert len(expected) > 5
    assert [line for line in expected if line not in lines] == []
