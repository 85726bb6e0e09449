"""One side of a comparison: a start with its verdict, and what of it can be held against another. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from startup_fsm.findings import SETTINGS
from startup_fsm.memory import format_bytes
from startup_fsm.sources import Source
from startup_fsm.verdict import RankedFinding, Verdict
from startup_fsm.verdicts import sizing
from startup_fsm.what_if import Sizing

#: Settings that a figure tells as they were given. What was requested follows from others, and is compared as a figure.
GIVEN: Final = tuple(name for name in SETTINGS if name != "requested_bytes")


@attrs.frozen(kw_only=True)
class Side:
    """
    A start that is held against another.

    Attributes:
        name: ``A`` or ``B``.
        sources: All its processes.
        verdict: The judgement on it.
        chosen: The process whose states and bytes are compared.
        settings: As they were given, by our names.
        sizing: How its KV cache was sized; None where nothing tells.
    """

    name: str
    sources: Sequence[Source]
    verdict: Verdict
    chosen: Source
    settings: Mapping[str, Any]
    sizing: Sizing | None

    @property
    def is_logged(self) -> bool:
        """Whether it is known by the words of a log alone."""
        return any(each.is_imported for each in self.sources)

    @property
    def is_ready(self) -> bool:
        """Whether it came to ready."""
        return self.verdict.outcome == "ready"

    @property
    def serious(self) -> tuple[RankedFinding, ...]:
        """Findings that are more than a note, highest ranked first."""
        return tuple(each for each in self.verdict.findings if each.finding.severity != "note")

    def size(self, *names: str) -> int | None:
        """The first of these figures that is known, in whole bytes or a count; None where none is."""
        found = (self.verdict.figures.get(name) for name in names)
        return next((round(each) for each in found if each is not None and math.isfinite(each)), None)

    def resolution(self, name: str) -> int:
        """Half a unit of the last printed digit of a figure, in bytes; 0 where it is exact."""
        reads = [
            (each.origins.get(each.run.figures[name][0]), each) for each in self.sources if name in each.run.figures
        ]
        return max((origin.resolution or 0 for origin, _ in reads if origin is not None), default=0)

    @property
    def share_name(self) -> str:
        """Our name of the share that it was sized by."""
        return "mem_fraction_static" if "mem_fraction_static" in self.settings else "gpu_memory_utilization"

    @property
    def share(self) -> float | None:
        """The share as it was given; None where nobody said."""
        value = self.settings.get(self.share_name)
        return float(value) if isinstance(value, int | float) and 0 < value <= 1 else None

    @property
    def base(self) -> int | None:
        """Bytes that the share is a share of; None where nobody said."""
        if self.sizing is not None and self.sizing.base_bytes is not None:
            return self.sizing.base_bytes
        return self.size("total_bytes") if self.share_name == "gpu_memory_utilization" else None

    @property
    def reserved(self) -> int | None:
        """Bytes that were taken off for graphs before sizing; None where nothing tells."""
        if self.sizing is None:
            return None
        taken = [-term.bytes for term in self.sizing.terms if term.term == "graphs"]
        if taken:
            return sum(taken)
        is_said = any(each.finding.code == "graphs.not_reserved" for each in self.verdict.findings)
        return 0 if is_said or not self.is_logged else None

    @property
    def measured(self) -> int | None:
        """Bytes of graphs that were measured before sizing; None where nothing tells."""
        for _, decision in reversed(self.chosen.run.decisions):
            if isinstance(told := decision.inputs.get("measured_bytes"), int):
                return told
        return None

    @property
    def terms(self) -> dict[str, int]:
        """The budget of the KV cache, signed bytes by term; empty where none was computed or printed."""
        for source in (self.chosen, *self.sources):
            if source.run.budgets:
                return {term.term: term.bytes for term in source.run.budgets[-1][1].terms}
        if self.sizing is None:
            return {}
        asked = self.size("requested_bytes")
        first = {} if asked is None else {"requested": asked}
        return first | {term.term: term.bytes for term in self.sizing.terms}

    @property
    def others(self) -> tuple[int, int] | None:
        """Bytes of other processes at the first and at the last reading; None where nothing tells them apart."""
        shots = [pair for visit in self.chosen.run.visits for pair in visit.snapshots.values()]
        if not shots:
            return None
        first, last = min(shots, key=lambda pair: pair[0])[1], max(shots, key=lambda pair: pair[0])[1]
        return first.other_bytes, last.other_bytes

    @property
    def profiled(self) -> frozenset[str]:
        """Parts that were profiled."""
        return frozenset(part for visit in self.chosen.run.visits_of("profile_activations") for _, part in visit.parts)


def pair(a: Sequence[Source], a_verdict: Verdict, b: Sequence[Source], b_verdict: Verdict) -> tuple[Side, Side]:
    """Both sides; where one of them failed on a rank, that rank is looked at in both."""
    label = b_verdict.failed_rank or a_verdict.failed_rank
    return _side("A", a, a_verdict, label), _side("B", b, b_verdict, label)


def _side(name: str, sources: Sequence[Source], verdict: Verdict, label: str | None) -> Side:
    return Side(
        name=name,
        sources=sources,
        verdict=verdict,
        chosen=_chosen(sources, label),
        settings=_settings(sources, verdict),
        sizing=sizing(sources),
    )


def _chosen(sources: Sequence[Source], label: str | None) -> Source:
    """The process of that label, else rank 0 or one that is no rank; of those the one that shows most states."""

    def key(source: Source) -> tuple[bool, bool, bool, int]:
        run = source.run
        return source.label != label, not run.visits, run.rank not in (0, None), -len(run.visits)

    return min(sources, key=key)


def _settings(sources: Sequence[Source], verdict: Verdict) -> dict[str, Any]:
    found: dict[str, Any] = {name: verdict.figures[name] for name in GIVEN if name in verdict.figures}
    for source in reversed(sources):
        if source.run.started is not None:
            found.update(source.run.started.knobs)
    return found


def shown(name: str, value: Any) -> str:
    """A value for people: bytes with a unit where the name says so, long lists by their length and largest."""
    if value is None:
        return "not given"
    if isinstance(value, list | tuple):
        numbers = [each for each in value if isinstance(each, int | float)]
        if len(value) > 4 and len(numbers) == len(value):
            return f"{len(value)} up to {max(numbers)}"
        return ",".join(map(str, value)) or "none"
    if isinstance(value, int) and not isinstance(value, bool) and (name.endswith("_bytes") or name == "graph_estimate"):
        return format_bytes(value)
    return str(value)
