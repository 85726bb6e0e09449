"""
What several ranks make of what each of them says: who watches whom, what all agree on, and what is odd. Pure.

Offers are by rank number; what leaves here for people names ranks by their labels.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from startup_fsm.findings import Finding
from startup_fsm.fold import RunState
from startup_fsm.memory import format_bytes
from startup_fsm.sources import Source

#: Not a rank: what all ranks talk through.
STORE: Final = -1

#: Topics of ``ranks_agreed``.
JOIN, FINGERPRINT, SETTINGS, DEVICES, BLOCKS, READY = "join", "fingerprint", "settings", "devices", "blocks", "ready"

_LONGEST_TEXT: Final = 500
#: Ranks and settings that a sentence names.
_NAMED: Final = 8
#: More than this share of what the ranks could have had is worth a warning when the smallest decides.
_UNEVEN: Final = 0.1


@attrs.frozen(kw_only=True)
class Failure:
    """
    The first failure among the ranks.

    Attributes:
        rank: Whose; :data:`STORE` where what they talk through was lost.
        state: The state in which it failed; None where it had entered none, or nobody knows.
        reason: What it said, or what was seen of it.
        restart: Whether a new process may go on with the run.
        given_up: Whether it was others who gave that rank up, so that it has to be told itself.
    """

    rank: int
    state: str | None = None
    reason: str = ""
    restart: bool = False
    given_up: bool = False

    @property
    def label(self) -> str:
        """``rank 3``."""
        return label(self.rank)

    def __str__(self) -> str:
        where = f" in {self.state}" if self.state else ""
        return f"{self.label} failed{where}: {self.reason}" if self.reason else f"{self.label} failed{where}"


@attrs.frozen(kw_only=True)
class Ending:
    """
    How a state ended on one rank.

    Attributes:
        edge: The edge that this rank would take after a failure; None where it has none, or where it ended well.
        failed: Why it failed, in words; None where it ended well.
    """

    edge: str | None = None
    failed: str | None = None

    def as_data(self) -> dict[str, str]:
        """Plain data; nothing for a state that ended well."""
        given = {"edge": self.edge, "failed": self.failed}
        return {name: value for name, value in given.items() if value is not None}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Ending:
        """What :meth:`as_data` gave."""
        return cls(edge=data.get("edge"), failed=data.get("failed"))


def label(rank: int) -> str:
    """What a rank is called in journals."""
    return "the store" if rank == STORE else f"rank {rank}"


def labelled(offers: Mapping[int, Any]) -> dict[str, Any]:
    """The same offers by label, in the order of the ranks."""
    return {label(rank): offers[rank] for rank in sorted(offers)}


def bounded(text: str) -> str:
    """Text of another rank, or for one: one line without control characters, at most 500 of them."""
    shown = "".join(each if each.isprintable() else " " for each in text[: 4 * _LONGEST_TEXT])
    shown = " ".join(shown.split())
    return shown if len(shown) <= _LONGEST_TEXT else shown[: _LONGEST_TEXT - 3] + "..."


def neighbours(rank: int, size: int) -> tuple[int, ...]:
    """
    The ranks that this one has a connection with: those 1, 2, 4, ... before and after it, in a circle.

    At most ``2 * log2(size)`` of them. Whichever few ranks are dead or stuck, news still reaches all others.
    """
    steps = itertools.takewhile(lambda step: step < size, (1 << power for power in itertools.count()))
    found = {(rank + sign * step) % size for step in steps for sign in (1, -1)}
    return tuple(sorted(found - {rank}))


def least(offers: Mapping[int, int]) -> tuple[int, int | None]:
    """The smallest offer, and the rank that decided; None where all offer the same."""
    smallest = min(offers.values())
    if all(offer == smallest for offer in offers.values()):
        return smallest, None
    return smallest, min(rank for rank, offer in offers.items() if offer == smallest)


def way(endings: Mapping[int, Ending]) -> tuple[int | None, str | None]:
    """
    What all ranks do after a state: the first rank that failed, and the edge that all of them take.

    Without a failure both are None. An edge is taken by all or by none: every rank that failed must have chosen it.
    """
    failed = {rank: ending for rank, ending in endings.items() if ending.failed is not None}
    if not failed:
        return None, None
    chosen = {ending.edge for ending in failed.values()}
    # A rank that would fail for good is the one to name.
    first = min(failed, key=lambda rank: (failed[rank].edge is not None, rank))
    return first, chosen.pop() if len(chosen) == 1 else None


def shared(values: Mapping[int, Any]) -> dict[Any, tuple[int, ...]]:
    """Ranks by what they gave; those that gave None are nowhere."""
    found: dict[Any, tuple[int, ...]] = {}
    for rank in sorted(values):
        if values[rank] is not None:
            found[values[rank]] = (*found.get(values[rank], ()), rank)
    return found


def differing(settings: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What is not the same on all: by name of the setting, the value of each rank by its label."""
    names = sorted({name for each in settings.values() for name in each})
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        values = {rank: each.get(name) for rank, each in settings.items()}
        if any(value != values[min(values)] for value in values.values()):
            found[name] = labelled(values)
    return found


# What is judged, from the journal of one rank.


def judged_alike(run: RunState) -> list[Finding]:
    """All ranks start the same thing, each on a device of its own."""
    found: list[Finding] = []
    settings = next((event.agreed for _, event in run.agreements if event.topic == SETTINGS), None)
    for seq, event in run.agreements:
        if event.topic == FINGERPRINT and event.agreed is None and event.offers:
            found.append(_disagreement(seq, event.offers, settings if isinstance(settings, Mapping) else {}))
        if event.topic == DEVICES:
            ranks_of = shared({at: str(device) for at, device in enumerate(event.offers.values())})
            names = list(event.offers)
            twice = {device: [names[at] for at in ranks] for device, ranks in ranks_of.items() if ranks[1:]}
            found += [_same_device(seq, device, ranks) for device, ranks in twice.items()]
    return found


def _disagreement(seq: int, offers: Mapping[str, Any], settings: Mapping[str, Any]) -> Finding:
    sides: dict[str, list[str]] = {}
    for name, fingerprint in offers.items():
        sides.setdefault(str(fingerprint), []).append(name)
    against = " and ".join(_some(side) for side in sides.values())
    different = "; ".join(
        f"{name} is {' and '.join(f'{value} on {who}' for who, value in values.items())}"
        for name, values in list(settings.items())[:_NAMED]
        if isinstance(values, Mapping)
    )
    return Finding(
        code="ranks.disagree",
        severity="error",
        state="init_device",
        message=f"{against} start different things: {different or 'their fingerprints differ'}",
        observed=dict(offers),
        evidence=(seq,),
    )


def _same_device(seq: int, device: Any, names: Sequence[str]) -> Finding:
    return Finding(
        code="ranks.same_device",
        severity="error",
        state="init_device",
        message=f"{_some(names)} use one device: {device}",
        observed=device,
        evidence=(seq,),
    )


def judged_even(run: RunState, since: int = 0) -> list[Finding]:
    """What the smallest rank leaves unused on the others, in the agreements from the event ``since`` on."""
    for seq, event in reversed(run.agreements):
        if event.topic != BLOCKS or seq < since or event.decided_by is None or type(event.agreed) is not int:
            continue
        offers = {name: offer for name, offer in event.offers.items() if type(offer) is int and offer >= 0}
        most, whole = max(offers.values(), default=0), sum(offers.values())
        unused = sum(offer - event.agreed for offer in offers.values())
        if event.agreed < 0 or not whole or unused <= _UNEVEN * whole:
            return []
        block = next((computed.block_bytes for _, computed in reversed(run.budgets)), 0)
        size = f" ({format_bytes((most - event.agreed) * block)} more)" if block else ""
        return [
            Finding(
                code="ranks.uneven",
                severity="warning",
                state="size_kv",
                message=f"{event.decided_by} has {event.agreed} KV blocks to offer, others up to {most}{size}:"
                f" {unused / whole:.0%} of what the ranks could have had stays unused",
                observed=event.agreed * block or None,
                expected=most * block or None,
                bytes=(most - event.agreed) * block,
                evidence=(seq,),
            )
        ]
    return []


def judged_missing(run: RunState) -> list[Finding]:
    """Who did not come to a meeting."""
    return [
        Finding(
            code="ranks.missing",
            severity="error",
            state=next((visit.state for visit in reversed(run.visits) if visit.entered_seq <= seq), None),
            message=f"{_some(event.missing)} did not come to the meeting {event.topic!r}",
            observed=list(event.missing),
            evidence=(seq,),
        )
        for seq, event in run.agreements
        if event.missing
    ]


def _some(names: Sequence[str]) -> str:
    """Names in words, with a bound: ``rank 0, rank 2 and 5 more``."""
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


# What is judged over all of them.


def by_peer(run: RunState) -> bool:
    """Whether this rank ended because another one did."""
    visit = run.current
    return bool(run.peer_failures) or (
        visit is not None and visit.failed is not None and visit.failed.category == "peer"
    )


def comes_last(finding: Finding, labels: Sequence[str]) -> bool:
    """Whether a finding is no cause: what another journal of the same start tells better, or what is but a waste."""
    is_echo = finding.code == "ranks.peer_failed" and any(f"{each} failed" in finding.message for each in labels)
    return is_echo or finding.code == "ranks.uneven"


def said_already(finding: Finding, seen: set[tuple[str, str]]) -> bool:
    """Whether another rank said the very same about all of them; remembers it where not."""
    if not finding.code.startswith("ranks."):
        return False
    key = (finding.code, finding.message)
    is_old = key in seen
    seen.add(key)
    return is_old


def unseen(sources: Sequence[Source]) -> list[str]:
    """Ranks of the same start whose journals were not read, as far as the others name them."""
    read = {source.label for source in sources}
    named: set[str] = set()
    for source in sources:
        for _, event in source.run.agreements:
            named.update(event.offers)
        named.update(event.peer for _, event in source.run.peer_failures)
    lost = sorted(name for name in named - read if name.startswith("rank "))
    return [f"the journal of {_some(lost)}"] if lost else []
