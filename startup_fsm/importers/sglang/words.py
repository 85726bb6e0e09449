"""
What the rows of SGLang share: numbers behind names, names of rows that others ask for, and whose pass it is.

The engine's ``GB`` is 2^30. A draft model goes through the same states after the target, in the same process and with
the same words: what has been heard before tells the passes apart, and the figures are those of the target.
"""

from __future__ import annotations

import re
from typing import Final

from startup_fsm.importers.facts import Figure, Heard, bytes_figure, count_figure

#: A number of a memory figure, and a whole number.
NUMBER: Final = r"(-?\d{1,9}(?:\.\d{1,15})?)"
COUNT: Final = r"(-?\d{1,15})"

#: How far behind its first words a message is read: what follows may be another rank's line, cut into this one.
_REACH: Final = 9_000

#: Rows whose being heard means something to other rows.
WEIGHTS_END: Final = "sgl.weights_end"
POOL_END: Final = "sgl.pool_end"
DECODE_BEGIN: Final = "sgl.decode_begin"
DECODE_END: Final = "sgl.decode_end"
DECODE_TICK: Final = "sgl.decode_tick"
PREFILL_BEGIN: Final = "sgl.prefill_begin"
PREFILL_END: Final = "sgl.prefill_end"
PREFILL_TICK: Final = "sgl.prefill_tick"
DRAFT_BEGIN: Final = "sgl.draft_begin"
DRAFT_END: Final = "sgl.draft_end"
COMMAND: Final = "sgl.command"

#: The part of a pass that is the draft model's.
DRAFT_PART: Final = "draft_worker_init"


def behind(found: re.Match[str]) -> str:
    """The message from the words that were found on."""
    return found.string[found.start() : found.start() + _REACH]


def memory(name: str, label: str, text: str) -> tuple[Figure, ...]:
    """The figure ``name`` out of ``label=1.23 GB`` or ``label: 1.23 GB``; nothing where it is missing or cut."""
    found = re.search(rf"\b{label}[=:] {{0,2}}{NUMBER} ?Gi?B\b", text)
    return () if found is None else bytes_figure(name, found[1], "GB")


def count(name: str, label: str, text: str) -> tuple[Figure, ...]:
    """The figure ``name`` out of ``label=12`` or ``label: 12``; nothing where it is missing."""
    found = re.search(rf"{label}[=:] {{0,2}}{COUNT}(?![\d.])", text)
    return () if found is None else (count_figure(name, found[1]),)


def heard_any(heard: Heard, *rows: str) -> bool:
    """Whether the process said a line of one of the rows."""
    return any(heard.has(row) for row in rows)
