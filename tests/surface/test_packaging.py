"""What an installer and an index see."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]


def distribution(requirement: str) -> str:
    """The name in a requirement."""
    return re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0]


def test_installed_metadata():
    """What is installed says the same as pyproject.toml."""
    installed = metadata.metadata("startup-fsm")

    assert installed["Name"] == "startup-fsm"
    assert installed["Version"] == PROJECT["version"]
    assert installed["Requires-Python"] == ">=3.11"
    assert installed["License-Expression"] == "Apache-2.0"


def test_command():
    """The command is the package's own."""
    scripts = {entry.name: entry.value for entry in metadata.entry_points(group="console_scripts")}

    assert scripts["startup-fsm"] == "startup_fsm.cli:main"


def test_no_own_hooks():
    """The entry point group of hooks is for others."""
    own = [
        entry
        for entry in metadata.entry_points(group="startup_fsm.hooks")
        if entry.dist and entry.dist.name == "startup-fsm"
    ]

    assert own == []


def test_light_by_default():
    """Reading a journal installs no torch, and never the deprecated distribution of the name pynvml."""
    required = {distribution(each) for each in PROJECT["dependencies"]}

    assert required == {"attrs", "cattrs", "cyclopts", "nvidia-ml-py", "orjson", "rich", "structlog", "transitions"}


@pytest.mark.parametrize("requirement", PROJECT["dependencies"])
def test_lower_bounds(requirement: str):
    """Each dependency has a lower bound and no upper one."""
    assert re.fullmatch(r"[a-z-]+>=[0-9.]+", requirement)


def test_dependencies_have_reasons():
    """The page of dependencies names every one, extras included."""
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    extras = PROJECT["optional-dependencies"].values()
    named = {distribution(each) for each in (*PROJECT["dependencies"], *(each for extra in extras for each in extra))}

    assert [each for each in sorted(named - {"startup-fsm"}) if each not in page] == []


def test_constraints_name_no_place():
    """Constraints are names and versions: no index, no file, no machine."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]

    assert "torch==2.13.0" in pins
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==[0-9.]+", pin)] == []


def test_changelog_knows_the_version():
    """The changelog has a section for what is being made, or for the version that is."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    assert "## [Unreleased]" in text or f"## [{PROJECT['version']}]" in text


def test_typed():
    """The package says that it has types."""
    assert (ROOT / "startup_fsm" / "py.typed").is_file()
