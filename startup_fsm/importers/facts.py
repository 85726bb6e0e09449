"""
What a line of a log can say, and who said it: the small vocabulary between grammars and the course of a start.

A grammar turns one message into facts and judges nothing. Units: every number of bytes is an int in bytes with the half
width of its last printed digit beside it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, Protocol

import attrs

#: ``GB`` in vLLM and SGLang is 2^30 (reference: unit rules); a line that means 1e9 says so in its row.
UNITS: Final = {
    "bytes": 1,
    "B": 1,
    "KiB": 1 << 10,
    "KB": 1 << 10,
    "MiB": 1 << 20,
    "MB": 1 << 20,
    "GiB": 1 << 30,
    "GB": 1 << 30,
    "TiB": 1 << 40,
}

#: Beyond this a number is a driver that does not know, such as 2^64 - 1.
UNKNOWN_BYTES: Final = 1 << 60


@attrs.frozen(slots=True)
class Speaker:
    """
    Whose line it is, as printed.

    Attributes:
        name: ``Worker``, ``EngineCore``, ``APIServer``, ``RayWorkerWrapper``, or the process's own word.
        label: The rank as printed: ``TP1``, ``PP1 TP3``, ``DP0 TP3``, ``rank 5``, ``pid 2001 10.0.0.2`` where a worker
            has no number; None where the line names no rank. An engine process is no rank.
        rank: The rank's number where the label alone gives it.
        pid: As printed.
    """

    name: str = ""
    label: str | None = None
    rank: int | None = None
    pid: int | None = None


#: Whoever printed a line without a name: nobody's, never everybody's.
NOBODY: Final = Speaker()


@attrs.frozen(slots=True)
class Said:
    r"""
    One message.

    Attributes:
        line: Line number in the file, from 1; parts of one line that ``\r`` separates share it.
        text: The message without any prefix; for a traceback the indentation is kept.
        speaker: Whose it is.
        form: ``vllm`` (level, date, file), ``sglang`` (``[date rank]``), ``other`` (a foreign logger), ``plain``.
        level: ``INFO``, ``WARNING``, ``ERROR``, ..., or None.
        t: Seconds on a clock of its own kind (only differences mean something); None where none is printed.
        file: Source file that printed it, such as ``gpu_worker.py``.
        repeated: How often a cluster said so (``[repeated 30x across cluster]``).
    """

    line: int
    text: str
    speaker: Speaker = NOBODY
    form: Literal["vllm", "sglang", "other", "plain"] = "plain"
    level: str | None = None
    t: float | None = None
    file: str | None = None
    repeated: int = 1


@attrs.frozen(slots=True)
class Begin:
    """A start begins: ``kind`` tells the banners of one start apart (``api``, ``arguments``, ``engine``)."""

    kind: str


@attrs.frozen(slots=True)
class Version:
    """What is being started, as far as the line tells."""

    engine: str | None = None
    version: str | None = None


@attrs.frozen(slots=True)
class Setting:
    """A knob by our name for it, as given."""

    name: str
    value: Any


@attrs.frozen(slots=True)
class Step:
    """
    The line proves that its speaker is in a state.

    Attributes:
        state, part: By the shared vocabulary.
        moment: ``begins`` (the state starts with this line, a second pass too), ``inside``, or ``ends`` with it.
    """

    state: str
    part: str | None = None
    moment: Literal["begins", "inside", "ends"] = "inside"


@attrs.frozen(slots=True)
class Figure:
    """A figure of the shared list."""

    name: str
    value: int | float
    unit: str | None = None
    resolution: int | None = None


@attrs.frozen(slots=True)
class Sign:
    """Something that was chosen, left out or noticed; journaled as a decision, once a name and process, counted."""

    name: str
    inputs: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(slots=True)
class Ready:
    """A closing line: the start came to its end."""


@attrs.frozen(slots=True)
class Stall:
    """Something waits; the seconds it has waited, where printed."""

    seconds: float | None = None


@attrs.frozen(slots=True)
class Death:
    """
    A failure as its text tells it.

    Attributes:
        category: As in ``state_failed``.
        reason: One word, such as ``no_blocks``; empty where the text is no known one.
        state, part: Where it happened, as far as text and frames prove; None leaves it to the course.
        is_echo: It reports the failure of somebody else (``Engine core initialization failed``): never the cause.
        is_final: Nothing is printed by this process after it (``Killed``), whatever else was survived.
    """

    category: str = "raised"
    reason: str = ""
    state: str | None = None
    part: str | None = None
    is_echo: bool = False
    is_final: bool = False


Fact = Begin | Version | Setting | Step | Figure | Sign | Ready | Stall | Death


@attrs.frozen(slots=True)
class Frame:
    """
    One frame of a traceback.

    Attributes:
        file: With forward slashes.
        function: That the frame is of.
        calls: The function that its source line calls: the next frame's, unless lines were left out.
    """

    file: str
    function: str
    calls: str = ""


@attrs.frozen(slots=True)
class Raised:
    """
    An exception as printed.

    Attributes:
        line: Of its last line.
        type: Its name as printed, such as ``torch.OutOfMemoryError``.
        message: Its text.
        frames: Outermost first; empty where none were printed.
        cause: What it was raised from, where the text says so.
    """

    line: int
    type: str
    message: str
    frames: tuple[Frame, ...] = ()
    cause: Raised | None = None


class Heard(Protocol):
    """What a process said so far; the same words mean another state before and after sizing."""

    @property
    def state(self) -> str | None:
        """The state that it is in, or was in last."""

    def has(self, row: str) -> bool:
        """Whether this process said a line of the row ``row`` in this start."""


@attrs.frozen(slots=True)
class Row:
    """
    One template of a catalogue.

    Attributes:
        name: Its id in the catalogue, such as ``L56``.
        anchor: Literal text that every such line holds; looked for before ``pattern`` is tried.
        pattern: Searched in the message; linear, no nested repetition. A text, compiled when its anchor is first met:
            compiling a whole catalogue would take longer than reading a log.
        facts: What it says.
        form: Only of lines in this form; None for any.
    """

    name: str
    anchor: str
    pattern: str
    facts: Callable[[re.Match[str], Heard], Iterable[Fact]]
    form: str | None = None

    def search(self, text: str) -> re.Match[str] | None:
        """The match in a message that holds the anchor."""
        return _compiled(self.pattern).search(text)


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


class Grammar(Protocol):
    """One source: rows for its lines, and what its exceptions mean."""

    @property
    def source(self) -> str:
        """As a verdict names it: ``vllm``, ``vllm-ascend``, ``sglang``, ``torch``."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """The catalogue."""

    def death(self, raised: Raised, heard: Heard) -> Death:
        """What an exception means, by its text and its frames."""


def size(number: str, unit: str, *, least: int = 2) -> tuple[int, int]:
    """
    Printed bytes and the half width of the last digit.

    Args:
        number: As printed, thousands separators allowed.
        unit: A key of :data:`UNITS`.
        least: Decimals that the print had before trailing zeros were dropped (``0.3`` may be ``0.30``).
    """
    plain = number.replace(",", "")
    factor = UNITS[unit]
    decimals = max(least, len(plain.partition(".")[2]))
    return round(float(plain) * factor), round(factor / 10**decimals / 2)


def bytes_figure(name: str, number: str, unit: str, *, least: int = 2) -> tuple[Figure, ...]:
    """A figure in bytes; nothing where the driver did not know."""
    value, resolution = size(number, unit, least=least)
    if abs(value) >= UNKNOWN_BYTES:
        return ()
    return (Figure(name, value, unit, 0 if unit in ("B", "bytes") and "." not in number else resolution),)


def count_figure(name: str, number: str) -> Figure:
    """A count, thousands separators allowed."""
    return Figure(name, int(number.replace(",", "")))
