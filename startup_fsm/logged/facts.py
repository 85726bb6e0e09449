"""
What all processes of a logged start said together: figures, settings, signs, each with the line that says so.

Figures are the failed rank's, else the engine process's, else rank 0's, else whoever printed one first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from startup_fsm.dialects import Dialect, Span, dialect
from startup_fsm.events import Origin
from startup_fsm.memory import Snapshot
from startup_fsm.sources import Source

#: No device has as much: what comes to that follows from figures that belong to different things.
ABSURD_BYTES: Final = 1 << 60

_SHARES: Final = ("gpu_memory_utilization", "mem_fraction_static")
#: Settings that are figures too where nothing prints them otherwise.
_KNOBS: Final = (*_SHARES, "max_model_len", "max_num_seqs")

#: Sentences that are looked at for the version; thousands of ranks say the same ones.
_TEXTS: Final = 20_000
_RANK: Final = re.compile(r"\d{1,6}")


@attrs.frozen
class Seen:
    """
    One event of one process, and where its log says so.

    Attributes:
        process: Index into the processes.
        seq: Of the event.
    """

    process: int
    seq: int


@attrs.frozen
class Read:
    """A figure as it was read."""

    value: int | float
    seen: Seen | None
    resolution: int = 0


@attrs.frozen
class Noticed:
    """A sign: what was chosen or left out, with its inputs."""

    inputs: Mapping[str, Any]
    seen: Seen


@attrs.define(kw_only=True)
class Facts:
    """
    A start as its processes told it.

    Attributes:
        processes: At least one.
        order: Indices of processes, whose figures come first.
        dialect: How the engine speaks, as far as its version is known or can be told from its wording.
        figures: Merged, by name.
        inferred: Names of figures that nobody printed.
        runner: ``V0``, ``V1``, ``V2``, or None where nothing tells.
    """

    processes: Sequence[Source]
    order: tuple[int, ...]
    dialect: Dialect
    figures: dict[str, Read] = attrs.field(factory=dict)
    inferred: list[str] = attrs.field(factory=list)
    runner: str | None = None

    def get(self, name: str) -> int | float | None:
        """A figure; None where nobody said it."""
        read = self.figures.get(name)
        return None if read is None else read.value

    def size(self, name: str) -> int | None:
        """A figure in whole bytes or a count; None where nobody said it."""
        value = self.get(name)
        return None if value is None else round(value)

    def resolution(self, *names: str) -> int:
        """Half a unit of the last digit of some figures together, in bytes."""
        return sum(self.figures[name].resolution for name in names if name in self.figures)

    def knob(self, name: str) -> Any:
        """A setting as it was given; None where nobody said."""
        for at in self.order:
            if (value := self.processes[at].run.knob(name)) is not None:
                return value
        return None

    def settings(self) -> dict[str, Any]:
        """All settings as they were given."""
        found: dict[str, Any] = {}
        for at in reversed(self.order):
            started = self.processes[at].run.started
            if started is not None:
                found.update(started.knobs)
        return found

    def signs(self, name: str) -> Iterator[Noticed]:
        """Every process's sign of this name, in the order of the figures."""
        for at in self.order:
            for seq, decision in self.processes[at].run.decisions:
                if decision.decision == name:
                    yield Noticed(decision.inputs, Seen(at, seq))

    def sign(self, name: str) -> Noticed | None:
        """The first of them; None where nobody gave it."""
        return next(self.signs(name), None)

    def label(self, at: int) -> str | None:
        """What the log calls a rank; None for a process that is none."""
        started = self.processes[at].run.started
        return None if started is None else started.label

    @property
    def labels(self) -> list[str]:
        """All ranks that the log names."""
        named = [self.label(at) for at in range(len(self.processes))]
        return list(dict.fromkeys(label for label in named if label is not None))

    def origin(self, seen: Seen) -> Origin | None:
        """Where an event was read."""
        return self.processes[seen.process].origins.get(seen.seq)

    def line(self, at: int, seq: int) -> int:
        """Line of an event, for the order over all processes; its seq where it has none."""
        origin = self.origin(Seen(at, seq))
        return seq if origin is None or origin.line is None else origin.line

    def of(self, *names: str) -> tuple[Seen, ...]:
        """Where figures were read."""
        reads = [self.figures.get(name) for name in names]
        return tuple(read.seen for read in reads if read is not None and read.seen is not None)

    def last(self) -> Seen | None:
        """The last line that said anything; None where nothing says where it stands."""
        lines = [
            (origin.line, Seen(at, seq))
            for at, process in enumerate(self.processes)
            for seq, origin in process.origins.items()
            if origin.line is not None
        ]
        return max(lines, key=lambda each: (each[0], each[1].seq), default=(0, None))[1]

    def shown(self, seen: Iterable[Seen]) -> tuple[Mapping[str, Any], ...]:
        """Evidence for people: line and text where the event was read, else its place in the journal."""
        found: dict[Any, Mapping[str, Any]] = {}
        for each in seen:
            origin = self.origin(each)
            if origin is None or origin.line is None:
                found.setdefault(each, {"seq": each.seq})
            else:
                text = {} if origin.text is None else {"text": origin.text}
                found.setdefault(origin.line, {"line": origin.line, "seq": each.seq, **text})
        return tuple(found.values())

    def by_rank(self) -> dict[str, dict[str, int | float]]:
        """Figures of every process that the log names as a rank."""
        ranks: dict[str, dict[str, int | float]] = {}
        for at, process in enumerate(self.processes):
            label = self.label(at)
            if label is not None:
                figures = {name: event.value for name, (_, event) in process.run.figures.items()}
                ranks.setdefault(label, {}).update(figures)
        return ranks


def snapshot_of(facts: Facts) -> Snapshot | None:
    """The last reading of memory of the process whose figures come first; None in a text log, which has none."""
    runs = (facts.processes[at].run for at in facts.order)
    run = next((run for run in runs if any(visit.snapshots for visit in run.visits)), None)
    if run is None:
        return None
    # Loads the judgement of our own journals, which a text log has no use for.
    from startup_fsm.figures import last_snapshot

    return last_snapshot(run)


def gathered(processes: Sequence[Source], first: int | None) -> Facts:
    """
    The facts of a start.

    Args:
        processes: At least one.
        first: Index of the process that failed, whose figures come first; None where none did.
    """
    order = _order(processes, first)
    facts = Facts(processes=processes, order=order, dialect=_dialect(processes))
    for at in order:
        for name, (seq, event) in processes[at].run.figures.items():
            origin = processes[at].origins.get(seq)
            resolution = 0 if origin is None else origin.resolution or 0
            facts.figures.setdefault(name, Read(event.value, Seen(at, seq), resolution))
    for name in _KNOBS:
        value = facts.knob(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Of a share of more than the device nothing follows; engines refuse it.
        if is_number and name not in facts.figures and (name not in _SHARES or 0 < value <= 1):
            facts.figures[name] = Read(value, None)
    facts.runner = _runner(facts)
    _infer(facts)
    return facts


def _order(processes: Sequence[Source], first: int | None) -> tuple[int, ...]:
    def key(at: int) -> tuple[bool, bool, bool, int]:
        started, rank = processes[at].run.started, processes[at].run.rank
        label = None if started is None else started.label
        numbers = [] if label is None else _RANK.findall(label)
        is_zero = rank == 0 or (bool(numbers) and all(int(number) == 0 for number in numbers))
        return at != first, label is not None, not is_zero, at

    return tuple(sorted(range(len(processes)), key=key))


def _dialect(processes: Sequence[Source]) -> Dialect:
    started = [process.run.started for process in processes if process.run.started is not None]
    engine = next((each.source for each in started if each.source not in ("unknown", "torch", "journal")), None)
    engine = engine or next((each.engine for each in started if each.engine), None)
    version = next((each.engine_version for each in started if each.engine_version), None)
    found = dialect(engine, version)
    return found if found.versions.since is not None else found.narrowed(_wording(found, processes))


def _texts(processes: Sequence[Source]) -> Iterator[str]:
    seen: set[str] = set()
    for process in processes:
        for origin in process.origins.values():
            if origin.text is not None and origin.text not in seen:
                if len(seen) >= _TEXTS:
                    return
                seen.add(origin.text)
                yield origin.text


def _wording(engine: Dialect, processes: Sequence[Source]) -> Span:
    """Versions that print every sentence that was read."""
    span = Span()
    patterns = [(re.compile(wording.pattern), wording.span) for wording in engine.wordings]
    for text in _texts(processes):
        for pattern, versions in patterns:
            if pattern.search(text):
                span = span.and_also(versions)
    return span


def _runner(facts: Facts) -> str | None:
    said = next((str(sign.inputs["runner"]) for sign in facts.signs("runner") if "runner" in sign.inputs), None)
    if said is not None:
        return said
    patterns = [(re.compile(each.pattern), each.runner) for each in facts.dialect.wordings if each.runner]
    for text in _texts(facts.processes):
        for pattern, runner in patterns:
            if pattern.search(text):
                return runner
    return facts.dialect.default_runner


def _infer(facts: Facts) -> None:
    """Figures that follow from others."""
    total, share, asked = (facts.get(name) for name in ("total_bytes", "gpu_memory_utilization", "requested_bytes"))
    if asked is None and total is not None and share is not None:
        _put(facts, "requested_bytes", round(total * share), "total_bytes")
    elif total is None and asked is not None and share:
        _put(facts, "total_bytes", round(asked / share), "requested_bytes")
    elif share is None and asked is not None and total is not None and 0 < asked <= total:
        _put(facts, "gpu_memory_utilization", round(asked / total, 3), "total_bytes")
    keys, values = facts.get("k_bytes"), facts.get("v_bytes")
    if "kv_cache_bytes" not in facts.figures and keys is not None and values is not None:
        _put(facts, "kv_cache_bytes", round(keys + values), "k_bytes")


def _put(facts: Facts, name: str, value: float, like: str) -> None:
    if abs(value) >= ABSURD_BYTES:
        return
    # Two readings of one coarseness go into it.
    facts.figures[name] = Read(value, facts.figures[like].seen, 2 * facts.figures[like].resolution)
    facts.inferred.append(name)
