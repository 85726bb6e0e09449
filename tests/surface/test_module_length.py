"""No module is longer than a reader can hold."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 400
MODULES = sorted((ROOT / "startup_fsm").rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_length(path: Path):
    """A module has at most 400 lines."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LIMIT
