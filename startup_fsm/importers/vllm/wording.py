"""
Pieces of the patterns of vLLM's rows, and what a match says.

A group with a name is a figure of that name. ``amount`` reads bytes with their unit, ``gib`` a bare number of GiB (vLLM
prints ``(22.93/23.56 GiB)``), ``plain_bytes`` whole bytes, ``count`` and ``share`` what their names say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from startup_fsm.importers.facts import Fact, Figure, Heard, Row, bytes_figure, count_figure

#: What a row says of its match.
Facts = Callable[[re.Match[str], Heard], Iterable[Fact]]

NUMBER: Final = r"-?\d{1,15}(?:\.\d{1,12})?"

_UNIT: Final = "_unit"


def amount(figure: str) -> str:
    """Bytes with their unit; vLLM's ``GB`` and ``MB`` are powers of two."""
    return rf"(?P<{figure}>{NUMBER}) ?(?P<{figure}{_UNIT}>GiB|GB|MiB|MB|bytes)"


def gib(figure: str) -> str:
    """A number of GiB whose unit stands elsewhere, or nowhere."""
    return rf"(?P<{figure}>{NUMBER})"


def plain_bytes(figure: str) -> str:
    """Whole bytes, which older versions printed without a unit; a unit is read where there is one."""
    return rf"(?P<{figure}>{NUMBER})(?: ?(?P<{figure}{_UNIT}>GiB|GB|bytes))?"


def count(figure: str) -> str:
    """A count, with or without thousands separators."""
    return rf"(?P<{figure}>\d{{1,3}}(?:,\d{{3}}){{1,6}}(?!\d)|\d{{1,19}})"


def share(figure: str) -> str:
    """A share of the device, such as 0.9; what an engine computes of an absurd estimate may be negative."""
    return rf"(?P<{figure}>-?\d{{1,3}}(?:\.\d{{1,12}})?)"


def figures_of(found: re.Match[str]) -> Iterator[Figure]:
    """The figures that a match names, in the order of its pattern."""
    groups = found.groupdict()
    for name, number in groups.items():
        if number is None or name.endswith(_UNIT):
            continue
        if "utilization" in name:
            yield Figure(name, float(number))
        elif name.endswith("_bytes"):
            unit = groups.get(name + _UNIT, "GiB") or "bytes"
            yield from bytes_figure(name, number, unit)
        else:
            yield count_figure(name, number)


def say(*facts: Fact) -> Facts:
    """These facts, then the figures of the match."""

    def told(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
        yield from facts
        yield from figures_of(found)

    return told


def say_by(choose: Callable[[Heard], Iterable[Fact]]) -> Facts:
    """Facts that depend on what was said before, then the figures of the match."""

    def told(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
        yield from choose(heard)
        yield from figures_of(found)

    return told


def search_clauses(clauses: Iterable[str], text: str) -> Iterator[Figure]:
    """Figures of the clauses that a message holds, wherever they stand in it."""
    for clause in clauses:
        found = re.search(clause, text)
        if found is not None:
            yield from figures_of(found)


def phrase(name: str, anchor: str, facts: Facts) -> Row:
    """A row whose anchor is all there is to find."""
    return Row(name, anchor, re.escape(anchor), facts)
