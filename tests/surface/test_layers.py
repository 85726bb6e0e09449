"""The layers of the package, as import-linter sees them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
}

#: How many layers at the end of the list only read: record, judgement, vocabulary.
READING_LAYERS = 3
#: Modules above them that only read.
READING_ABOVE = {"reports"}


def listed(layer: str) -> set[str]:
    """The modules of one layer."""
    return set(re.findall(r"\w+", layer))


def test_contracts_hold(tmp_path: Path):
    """No import breaks a contract, and every module stands in a layer."""
    command = "from importlinter.cli import lint_imports_command as c; c()"
    ran = subprocess.run(
        [sys.executable, "-c", command, "--no-logo", "--cache-dir", str(tmp_path), "pyproject.toml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_reading_module_is_held_to_light_imports():
    """The contract of reading lists every module that exists in the layers below the effects, and the reports."""
    layers = CONTRACTS["layers"]["layers"][-READING_LAYERS:]
    reading = set().union(READING_ABOVE, *(listed(layer) for layer in layers))
    package = ROOT / "startup_fsm"
    existing = {name for name in reading if (package / f"{name}.py").exists() or any((package / name).glob("*.py"))}
    held = {name.removeprefix("startup_fsm.") for name in CONTRACTS["reading"]["source_modules"]}

    assert existing - held == set()
