"""
What an engine calls our settings, how it computes its budget, and which faults its versions are known for. Data only.

All figures are by the shared list; bytes are ints in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs

from startup_fsm.dialects.versions import ANY, Span
from startup_fsm.findings import Direction

#: Whether graphs are taken off before the KV cache is sized: always, never, or where somebody asked for it.
Reserving = Literal["yes", "no", "opt_in"]


@attrs.frozen(kw_only=True)
class Flag:
    """
    One setting in the engine's own words.

    Attributes:
        spelling: With ``{}`` for the value, ready to paste; without one where it takes none.
        unit: Of the value, such as ``bytes`` or ``GiB``.
        decimals: Of a share; None for whole numbers and words.
        least, most: Smallest and largest value that the engine takes.
        span: Versions that have it.
    """

    spelling: str
    unit: str | None = None
    decimals: int | None = None
    least: float | None = None
    most: float | None = None
    span: Span = ANY

    def write(self, value: Any = None) -> str | None:
        """Ready to paste; None where it needs a value that is missing, or one that the engine refuses."""
        if "{}" not in self.spelling:
            return self.spelling
        if value is None or isinstance(value, bool) or not self.takes(value):
            return None
        if self.decimals is not None and isinstance(value, int | float):
            return self.spelling.format(f"{value:.{self.decimals}f}")
        return self.spelling.format(value)

    def takes(self, value: Any) -> bool:
        """Whether a value lies within the bounds; words always do."""
        if not isinstance(value, int | float):
            return True
        if not math.isfinite(value):
            return False
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


@attrs.frozen(kw_only=True)
class Reservation:
    """Whether a runner takes its graphs off before sizing, in some versions."""

    runner: str
    how: Reserving
    span: Span = ANY


@attrs.frozen(kw_only=True)
class DefaultRunner:
    """The runner that versions use where nobody asked for another."""

    runner: str
    span: Span


@attrs.frozen(kw_only=True)
class Charged:
    """
    What versions take off the request before the rest becomes the KV cache.

    Attributes:
        figures: Names of figures, each taken off once.
        span: Versions that do it so.
    """

    figures: tuple[str, ...]
    span: Span = ANY


@attrs.frozen(kw_only=True)
class Wording:
    """
    A sentence that only some versions print.

    Attributes:
        pattern: Searched in a message; linear.
        span: Versions that print it.
        runner: The runner that prints it, where only one does.
    """

    pattern: str
    span: Span
    runner: str | None = None


@attrs.frozen(kw_only=True)
class Cure:
    """One change that cures a known fault, by our name of the setting."""

    setting: str
    direction: Direction
    flag: str | None = None
    to: str | None = None


@attrs.frozen(kw_only=True)
class KnownFault:
    """
    A fault that somebody found before.

    Attributes:
        reference: Its row in the table of known faults, empty where it has none.
        issue: Where it was reported or cured.
        what: One clause.
        cure: What helps, one clause; empty where nothing is known.
        cures: The same as changes.
        codes: Findings that it explains; it is named with the first of them.
        words: Any of these in what the failure said, its frames included, in lower case; empty for no condition.
        states: Where it shows; empty for anywhere.
        reason: As the failure's reason, or the finding's; empty for no condition.
        sign: A sign that must be there; empty for no condition.
        runner: Only with this runner; empty for any.
        several: Only with several ranks.
        died: Only where the start ran out of device memory.
        setting: A setting that must be in use; empty for no condition.
        span: Versions that have it.
        by_version: It is named only where the version is known to be one of these.
    """

    reference: str = ""
    issue: str
    what: str
    cure: str = ""
    cures: tuple[Cure, ...] = ()
    codes: frozenset[str]
    words: tuple[str, ...] = ()
    states: frozenset[str] = frozenset()
    reason: str = ""
    sign: str = ""
    runner: str = ""
    several: bool = False
    died: bool = False
    setting: str = ""
    span: Span = ANY
    by_version: bool = False

    @property
    def sentence(self) -> str:
        """For people: what, where, and what helps."""
        where = f"{self.reference}, {self.issue}" if self.reference else self.issue
        return f"known fault ({where}): {self.what}" + (f"; {self.cure}" if self.cure else "")


@attrs.frozen(kw_only=True)
class Dialect:
    """
    One engine in one version, or in the versions that a log allows.

    Attributes:
        engine: ``vllm``, ``vllm-ascend``, ``sglang``, or ``unknown``.
        versions: Those that it may be.
        share: Our name of the setting that sizes: a share of the device, or of what was free before loading.
        share_of: The figure that it is a share of; empty where that is *free before loading*, which nobody prints.
        flags: By our name of the setting, oldest spelling first.
        charged, runners, reservations, wordings: As their classes say.
        known: Faults of any of its versions.
        margin_bytes: Bytes that its own suggestion keeps back; 0 where it suggests nothing.
    """

    engine: str
    versions: Span = ANY
    share: str = "gpu_memory_utilization"
    share_of: str = "total_bytes"
    flags: Mapping[str, tuple[Flag, ...]] = attrs.field(factory=dict)
    charged: tuple[Charged, ...] = ()
    runners: tuple[DefaultRunner, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    wordings: tuple[Wording, ...] = ()
    known: tuple[KnownFault, ...] = ()
    margin_bytes: int = 0

    def narrowed(self, versions: Span) -> Dialect:
        """The same engine with more known of its version."""
        return attrs.evolve(self, versions=self.versions.and_also(versions))

    def flag(self, setting: str) -> Flag | None:
        """The newest spelling that the versions allow; None where they have no such setting."""
        fitting = [flag for flag in self.flags.get(setting, ()) if self.versions.touches(flag.span)]
        return fitting[-1] if fitting else None

    def write(self, setting: str, value: Any = None) -> str | None:
        """A setting ready to paste; None where the engine has none, or refuses the value."""
        flag = self.flag(setting)
        return None if flag is None else flag.write(value)

    @property
    def default_runner(self) -> str | None:
        """The runner that all of the versions use by default; None where they differ."""
        return next((each.runner for each in self.runners if self.versions.is_within(each.span)), None)

    def reserves(self, runner: str | None) -> Reserving | None:
        """Whether the runner takes its graphs off before sizing; None where the versions differ in it."""
        for each in self.reservations:
            if each.runner == (runner or self.default_runner) and self.versions.is_within(each.span):
                return each.how
        return None

    @property
    def charges(self) -> tuple[str, ...]:
        """Figures that are taken off the request; the newest rule that the versions allow."""
        fitting = [each for each in self.charged if self.versions.touches(each.span)]
        return fitting[-1].figures if fitting else ()

    def faults(self, codes: Iterable[str]) -> tuple[KnownFault, ...]:
        """Known faults of these versions that explain any of the codes."""
        wanted = frozenset(codes)
        return tuple(
            each
            for each in self.known
            if wanted & each.codes
            and (self.versions.is_within(each.span) if each.by_version else self.versions.touches(each.span))
        )
