"""
Memory at every edge as bars: one letter an account, so that no colour is needed, the request and the device marked.

    load_weights  ooDDDDD..................................|....x]  1.38 GiB

What this process holds grows from the left; what is not ours stands at the right end of the device. Left of ``|`` is
the request: letters of ours beyond it are an overrun.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.text import Text

from startup_fsm.memory import Account, format_bytes
from startup_fsm.reports.costs import MemoryEdge
from startup_fsm.reports.terminal import columns, heading, indented, plain

#: Account to its letter and its colour, in the order in which they are stacked.
_LETTERS: Final = {
    "outside torch": ("o", "magenta"),
    "torch pool default": ("D", "blue"),
    "torch, no pool": ("n", "blue"),
    "torch pool profiling_kv": ("P", "yellow"),
    "torch pool kv": ("K", "green"),
    "arena mapped": ("A", "green"),
    "torch pool throwaway_graphs": ("T", "yellow"),
    "torch pool graphs": ("G", "cyan"),
}
#: Accounts that are not ours; they stand at the other end.
_FOREIGN: Final = {"other processes": ("x", "red"), "unexplained": ("?", "red")}
#: Letters of pools that nobody here knows.
_MORE: Final = "abcdefghijklm"
_FREE: Final = "."
_PEAK: Final = "~"

_NARROWEST: Final = 12
_WIDEST: Final = 60


@attrs.frozen(kw_only=True)
class Piece:
    """Bytes that stand next to each other on a bar."""

    letter: str
    style: str
    bytes: int


@attrs.frozen(kw_only=True)
class Bar:
    """
    Memory at one edge, as wide as there is room.

    Attributes:
        own, foreign: From the left end, and up to the right one.
        total_bytes, requested_bytes: Where the bar ends, and where its mark stands; None for no mark.
    """

    own: tuple[Piece, ...]
    foreign: tuple[Piece, ...]
    total_bytes: int
    requested_bytes: int | None

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(_NARROWEST, options.max_width), min(_WIDEST, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self.text(min(options.max_width, _WIDEST))

    def text(self, width: int) -> Text:
        """The bar in exactly ``width`` columns, both marks included; at least three."""
        cells = max(1, width - 2 + (self.requested_bytes is None))
        drawn = [(_FREE, "dim")] * cells
        for first, last, piece in _placed(self.own, self.total_bytes, cells):
            drawn[first:last] = [(piece.letter, piece.style)] * (last - first)
        for first, last, piece in _placed(self.foreign, self.total_bytes, cells):
            drawn[cells - last : cells - first] = [(piece.letter, piece.style)] * (last - first)
        if self.requested_bytes is not None:
            mark = min(cells, max(0, round(self.requested_bytes * cells / max(1, self.total_bytes))))
            drawn.insert(mark, ("|", "bold"))
        return Text.assemble(*drawn, ("]", "bold"), no_wrap=True)


def _placed(pieces: Sequence[Piece], total: int, cells: int) -> Iterator[tuple[int, int, Piece]]:
    """First cell and the one behind the last of each piece: ends are rounded, so that no bytes are drawn twice."""
    end = 0
    for piece in pieces:
        begin, end = end, end + max(0, piece.bytes)
        first, last = (min(cells, round(at * cells / max(1, total))) for at in (begin, end))
        yield first, last, piece


def bars(edges: Sequence[MemoryEdge]) -> Iterator[RenderableType]:
    """A bar for every edge, and what its letters mean; nothing where no reading was taken."""
    if not edges:
        return
    yield heading("Memory at every edge")
    signs = _signs(edges)
    table = columns("at the end of", "", "used", numbers=("used",))
    table.columns[0].no_wrap = True
    table.columns[0].overflow = "ellipsis"
    table.columns[0].max_width = 28
    for edge in edges:
        table.add_row(_name(edge), _bar(edge, signs), plain(format_bytes(edge.used_bytes)))
    yield indented(table)
    yield indented(_legend(edges, signs))


def _name(edge: MemoryEdge) -> Text:
    if edge.state is None:
        return plain("(before anything)", "dim")
    text = plain(edge.state if edge.visit == 1 else f"{edge.state} ({edge.visit})")
    if edge.ended == "failed":
        text.append_text(plain(" failed", "red"))
    return text


def _signs(edges: Sequence[MemoryEdge]) -> dict[str, tuple[str, str]]:
    """Letter and colour of every account that holds anything at any edge, in the order of stacking."""
    held = dict.fromkeys(each.account for edge in edges for each in edge.accounts if each.bytes > 0)
    known = {**_LETTERS, **_FOREIGN}
    others = [name for name in held if name not in known]
    found = {name: sign for name, sign in _LETTERS.items() if name in held}
    found |= {name: (_MORE[min(at, len(_MORE) - 1)], "white") for at, name in enumerate(others)}
    return found | {name: sign for name, sign in _FOREIGN.items() if name in held}


def _bar(edge: MemoryEdge, signs: Mapping[str, tuple[str, str]]) -> Bar:
    held = {each.account: each for each in edge.accounts}
    own = [_piece(held[name], sign) for name, sign in signs.items() if name in held and name not in _FOREIGN]
    if edge.peak_bytes:
        own.append(Piece(letter=_PEAK, style="dim", bytes=edge.peak_bytes))
    return Bar(
        own=tuple(own),
        foreign=tuple(_piece(held[name], sign) for name, sign in signs.items() if name in held and name in _FOREIGN),
        total_bytes=edge.total_bytes,
        requested_bytes=edge.requested_bytes,
    )


def _piece(account: Account, sign: tuple[str, str]) -> Piece:
    return Piece(letter=sign[0], style=sign[1], bytes=account.bytes)


def _legend(edges: Sequence[MemoryEdge], signs: Mapping[str, tuple[str, str]]) -> RenderableType:
    last = edges[-1]
    said = [(letter, style, name) for name, (letter, style) in signs.items()]
    if any(edge.peak_bytes for edge in edges):
        said.append((_PEAK, "dim", "came and went"))
    said.append((_FREE, "dim", "free"))
    if last.requested_bytes is not None:
        said.append(("|", "bold", f"request {format_bytes(last.requested_bytes)}"))
    said.append(("]", "bold", f"device {format_bytes(last.total_bytes)}"))
    texts = [Text.assemble((letter, style), " ", plain(name)) for letter, style, name in said]
    return Columns(texts, padding=(0, 3, 0, 0))
