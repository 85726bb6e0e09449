"""
The rim: what a journal says becomes text that is safe for a terminal, 80 columns wide, and readable without colour.

A journal is data from a process that may have been hostile or broken. Everything of it that is shown passes
:func:`clean`, and nothing of it is ever taken for rich markup.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Final

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from startup_fsm.memory import format_bytes

#: Longest single text in characters; what is cut is counted.
TEXT_LIMIT: Final = 2_000

#: Widest page in columns, whatever the terminal has: longer lines are hard to read.
WIDEST: Final = 100

#: Columns where nobody tells how wide the terminal is.
WIDTH: Final = 80

_STYLES: Final = {"error": "red", "warning": "yellow", "note": "cyan"}


def clean(value: object, limit: int = TEXT_LIMIT) -> str:
    r"""
    One line of printable text: control characters, bidirectional overrides and what cannot be seen become visible.

    Line breaks and tabs become spaces; anything else that is not printable is written as its escape, such as
    ``\x1b``. Texts longer than ``limit`` characters are cut, and how much was cut is said.
    """
    text = str(value)
    cut = len(text) - limit
    if cut > 0:
        text = text[:limit]
    if not text.isprintable():
        text = "".join(each if each.isprintable() else _visible(each) for each in text)
    return f"{text}... ({cut} more characters)" if cut > 0 else text


def _visible(character: str) -> str:
    # U+2028 and U+2029 break lines in some terminals and count as spaces in Python; so do U+001C to U+001F.
    if character.isspace() and character not in "\x1c\x1d\x1e\x1f\x85\u2028\u2029":
        return " "
    return character.encode("unicode_escape").decode("ascii")


def plain(value: object, style: str = "") -> Text:
    """Clean text as rich shows it: no markup, no highlighting, no emoji codes."""
    return Text(clean(value), style=style)


def severity(name: str) -> Text:
    """A severity in its colour; the word says the same without one."""
    return plain(name, _STYLES.get(name, ""))


def heading(text: str) -> Text:
    """The title of a section, after an empty line."""
    return Text(f"\n{text}", style="bold")


def indented(value: RenderableType, by: int = 2) -> Padding:
    """Moved to the right by so many columns, all its lines."""
    return Padding(value, (0, 0, 0, by))


def columns(*names: str, numbers: Iterable[str] = ()) -> Table:
    """A table without lines: names of columns above, those in ``numbers`` aligned to the right."""
    right = frozenset(numbers)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        is_number = name in right
        table.add_column(
            name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold", min_width=len(name)
        )
    return table


def pairs(rows: Iterable[tuple[str, object]]) -> Table:
    """Names and values, one pair a line."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(plain(name), value if isinstance(value, Text) else plain(value))
    return table


def points(texts: Iterable[object]) -> Table:
    """One point a line, with a dash."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for text in texts:
        table.add_row("-", text if isinstance(text, Text) else plain(text))
    return table


def page(content: Iterable[RenderableType], *, width: int | None = None, file: IO[str] | None = None) -> str:
    """
    The content as text for ``file`` (stdout), no wider than ``width`` columns, without blanks at the ends of lines.

    Colour only where rich finds a terminal that wants it: never in a pipe, never with ``NO_COLOR``.
    """
    console = Console(file=file, width=width, highlight=False, markup=False, emoji=False)
    if width is None:
        console.width = min(console.width if console.is_terminal else WIDTH, WIDEST)
    with console.capture() as captured:
        for each in content:
            console.print(each)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().strip("\n").splitlines())


def duration(ns: int | None) -> str:
    """Nanoseconds for people: three digits and a unit."""
    if ns is None:
        return "unknown"
    for unit, name in ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")):
        if abs(ns) >= unit:
            size = ns / unit
            return f"{size:,.{max(0, 3 - len(str(abs(int(size)))))}f} {name}"
    return f"{ns} ns"


def share(part: int, whole: int) -> str:
    """A share in percent; a dash where there is no whole."""
    return f"{100 * part / whole:.1f}%" if whole > 0 else "-"


def signed(size: int) -> str:
    """Bytes with their sign, for changes."""
    return f"+{format_bytes(size)}" if size > 0 else format_bytes(size)


def quantity(name: str, value: object) -> str:
    """A value by the name of its figure: bytes with a unit, anything else as it is."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return format_bytes(int(str(value))) if is_integer and name.endswith("_bytes") else clean(value)


def say(kind: str, text: str, file: IO[str]) -> None:
    """One line of talk, such as ``error: ...``: cleaned, never wrapped, in colour where there is a terminal."""
    line = Text.assemble((f"{kind}:", _STYLES.get(kind, "cyan")), " ", clean(text))
    Console(file=file, highlight=False, markup=False, emoji=False, soft_wrap=True).print(line)
