"""
Which rows a message may be of, found without looking for each row's anchor in it.

A catalogue has hundreds of anchors, and most messages hold none of them. Anchors that share a few letters are looked
for only in messages that hold those.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

_T = TypeVar("_T")

#: Fewer letters stand in most messages; more are shared by few anchors.
_PIECE: Final = re.compile("[A-Za-z]{4}")


class Anchors(Generic[_T]):
    """Values by their anchors: texts that a message of theirs holds."""

    def __init__(self, values: Sequence[tuple[str, _T]]) -> None:
        """
        Group them, which takes a third of a millisecond for a catalogue.

        Args:
            values: Anchor and value, in the order in which values are given for a message; anchors may repeat.
        """
        pieces = [_PIECE.findall(anchor) or [anchor] for anchor, _ in values]
        shared = Counter(piece for each in pieces for piece in each)
        groups: dict[str, list[tuple[str, int]]] = {}
        for at, (anchor, _) in enumerate(values):
            groups.setdefault(max(pieces[at], key=shared.__getitem__), []).append((anchor, at))
        self._groups = tuple(groups.items())
        self._values = tuple(value for _, value in values)

    def held_by(self, text: str) -> list[_T]:
        """Values whose anchor stands in the text, in their order."""
        found = [at for piece, anchors in self._groups if piece in text for anchor, at in anchors if anchor in text]
        found.sort()
        return [self._values[at] for at in found]
