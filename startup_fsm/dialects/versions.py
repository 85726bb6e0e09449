"""
Versions as bounds: a log often tells which versions it can be of, and not which one it is.

Bounds are sampled: since is the first version that was looked at and has it, before the first that has it no more.
"""

from __future__ import annotations

import re
from typing import Final

import attrs

Version = tuple[int, ...]

_NUMBERS: Final = re.compile(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?")


def parse(text: str | None) -> Version | None:
    """
    The three numbers of a version; a development version counts as the one that it leads to.

    >>> parse("v0.9.1rc1.dev126+g1234")
    (0, 9, 1)
    """
    found = None if text is None else _NUMBERS.match(text.strip())
    return None if found is None else tuple(int(number or 0) for number in found.groups())


@attrs.frozen
class Span:
    """
    Versions from ``since`` on and before ``before``; None is an open end.

    Attributes:
        since: The smallest one.
        before: The first that is none of them.
    """

    since: Version | None = None
    before: Version | None = None

    @classmethod
    def of(cls, since: str | None, before: str | None) -> Span:
        """Bounds as they are written in the data."""
        return cls(parse(since), parse(before))

    @classmethod
    def exactly(cls, version: str | None) -> Span:
        """One version; all of them where it is not known."""
        known = parse(version)
        return cls() if known is None else cls(known, (*known, 0))

    @property
    def is_open(self) -> bool:
        """Whether nothing is known of the version."""
        return self.since is None and self.before is None

    def and_also(self, other: Span) -> Span:
        """Versions of both; this one where they exclude each other, since then one of the two is a wrong guess."""
        lows = [low for low in (self.since, other.since) if low is not None]
        highs = [high for high in (self.before, other.before) if high is not None]
        both = Span(max(lows, default=None), min(highs, default=None))
        return self if both.since is not None and both.before is not None and both.since >= both.before else both

    def is_within(self, other: Span) -> bool:
        """Whether all of these versions are among the others."""
        return (other.since is None or (self.since is not None and self.since >= other.since)) and (
            other.before is None or (self.before is not None and self.before <= other.before)
        )

    def touches(self, other: Span) -> bool:
        """Whether any of these versions may be among the others."""
        return (other.before is None or self.since is None or self.since < other.before) and (
            other.since is None or self.before is None or self.before > other.since
        )


#: All versions.
ANY: Final = Span()
