"""The envelope of every line, and the registry of kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import attrs

#: Rises only when a meaning changes; 0 makes no promise yet.
SCHEMA_VERSION: Final = 0

#: Every kind, filled by the classes as they are defined.
EVENT_TYPES: Final[dict[str, type[Event]]] = {}


class Event:
    """The root of all events; subclasses register themselves by ``kind``."""

    kind: ClassVar[str]

    def __init_subclass__(cls, **_: object) -> None:
        if "kind" in cls.__dict__:
            EVENT_TYPES[cls.kind] = cls


@attrs.frozen(kw_only=True)
class Origin:
    """
    Where an imported event was read.

    Attributes:
        source: The importer, such as ``vllm``.
        line: Line number from 1.
        resolution: Half a unit of the last printed digit, in bytes; None for what is exact.
        inferred: True where nothing printed says so.
        text: The message that says so, as printed, at most 300 characters of it.
    """

    source: str
    line: int | None = None
    resolution: int | None = None
    inferred: bool = False
    text: str | None = None


@attrs.frozen(kw_only=True)
class UnknownEvent(Event):
    """An event of a kind that this version does not know; kept and shown."""

    payload: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Record:
    """
    One line of a journal: envelope and event.

    Attributes:
        v: Schema version.
        run: Run id; sorts by time.
        process: ``rank-00003``, or ``engine-<pid>`` for a process that is no rank.
        rank: Number, or None.
        attempt: From 1.
        seq: From 0, without gaps, per file.
        t: Monotonic ns since this file began; None where a source has no time.
        kind: Kind of the event.
        origin: Where an imported event was read; None for our own.
        event: The payload.
        extra: Fields that this version does not know, by path; kept when written again.
    """

    v: int = SCHEMA_VERSION
    run: str
    process: str
    rank: int | None = None
    attempt: int = 1
    seq: int
    t: int | None = None
    kind: str
    origin: Origin | None = None
    event: Event
    extra: Mapping[str, Any] = attrs.field(factory=dict)
