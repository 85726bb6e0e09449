"""Sphinx configuration: MyST sources, the furo theme, nothing fetched from a network."""

from __future__ import annotations

import tomllib
from pathlib import Path

_project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "startup-fsm"
author = "The startup-fsm authors"
project_copyright = author
version = release = _project["version"]

extensions = ["myst_parser"]
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"{project} {release}"
html_show_sourcelink = False
html_show_copyright = False

exclude_patterns = ["_build"]
nitpicky = True
