"""
Event to one JSON line and back. Decoding is strict: nothing is coerced, nothing is dropped, and an error says where.

A field that has its default is not written, so a default never changes its meaning within a schema version. Fields
that this version does not know are kept in ``Record.extra`` by JSON pointer and written again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import orjson

from startup_fsm.errors import DecodeError, UnknownSchema
from startup_fsm.events import EVENT_TYPES, SCHEMA_VERSION, Event, Origin, Record, UnknownEvent
from startup_fsm.strict import escaped, shown, structured, unknown_fields

#: Longest line in bytes, newline included.
MAX_LINE: Final = 1 << 20

#: A pure function from the plain dict of one version to that of the next.
Upcaster = Callable[[dict[str, Any]], dict[str, Any]]

_ENVELOPE: Final = frozenset({"v", "run", "process", "rank", "attempt", "seq", "t", "kind", "origin", "payload"})


def _put(target: Any, pointer: str, value: Any) -> None:
    *steps, last = (step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/"))
    for step in steps:
        if isinstance(target, list):
            target = target[int(step)] if int(step) < len(target) else {}
        else:
            target = target.setdefault(step, {})
    target[last] = value


@attrs.frozen
class Codec:
    """
    Encoder and decoder of one schema version.

    Attributes:
        version: What is written, and the newest that is read.
        upcasters: By the version they start from; applied in a chain up to ``version``.
    """

    version: int = SCHEMA_VERSION
    upcasters: Mapping[int, Upcaster] = attrs.field(factory=dict)

    def encode(self, record: Record) -> bytes:
        """One line with its newline. Values that JSON cannot hold are written as text, overlong ones are cut."""
        line = self._dumped(record)
        return line if len(line) <= MAX_LINE else _shortened(line)

    def _dumped(self, record: Record) -> bytes:
        event = record.event
        payload = event.payload if isinstance(event, UnknownEvent) else event
        body: dict[str, Any] = {"v": record.v, "run": record.run, "process": record.process}
        if record.rank is not None:
            body["rank"] = record.rank
        body["attempt"] = record.attempt
        body["seq"] = record.seq
        body["t"] = record.t
        body["kind"] = record.kind
        if record.origin is not None:
            body["origin"] = record.origin
        body["payload"] = payload
        if record.extra:
            # A copy, since extras reach into the payload of an event that must stay as it is.
            body = orjson.loads(_dumps(body))
            for pointer, value in record.extra.items():
                _put(body, pointer, value)
        return _dumps(body) + b"\n"

    def decode(self, line: bytes | memoryview) -> Record:
        """
        One line to a record.

        Raises:
            DecodeError: No JSON object, a missing field, a value of the wrong type; ``where`` is its path.
            UnknownSchema: A newer version than this one.
        """
        try:
            data = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            msg = f"no JSON: {error}"
            raise DecodeError(msg, where="line") from None
        if type(data) is not dict:
            msg = f"expected an object, found {shown(data)}"
            raise DecodeError(msg, where="line")
        return self._record(self._upcast(data))

    def _upcast(self, data: dict[str, Any]) -> dict[str, Any]:
        version = data.get("v")
        if type(version) is not int or version < 0:
            msg = f"v: expected a schema version, found {shown(version)}"
            raise DecodeError(msg, where="v")
        if version > self.version:
            msg = f"the journal has schema {version}; this version of startup-fsm reads up to {self.version}"
            raise UnknownSchema(msg, hint="read it with the version that wrote it, or a newer one")
        while version < self.version:
            if version not in self.upcasters:
                msg = f"v: no way from schema {version} to {self.version}"
                raise DecodeError(msg, where="v")
            data = self.upcasters[version](data)
            version += 1
        return data

    def _record(self, data: dict[str, Any]) -> Record:
        get = data.get
        seq = get("seq")
        if type(seq) is not int or seq < 0:
            msg = f"seq: expected a number from 0, found {shown(seq)}"
            raise DecodeError(msg, where="seq")
        kind, payload, origin = get("kind"), get("payload"), get("origin")
        run, process, rank, attempt, t = get("run"), get("process"), get("rank"), get("attempt", 1), get("t")
        if not (
            type(kind) is str
            and type(run) is str
            and type(process) is str
            and type(payload) is dict
            and type(attempt) is int
            and (rank is None or type(rank) is int)
            and (t is None or type(t) is int)
        ):
            raise _envelope_error(seq, data)
        event_type = EVENT_TYPES.get(kind)
        extra: dict[str, Any] = {}
        event: Event
        if event_type is None:
            event = UnknownEvent(payload=payload)
        else:
            event = structured(payload, event_type, f"seq {seq}: payload")
            extra.update(unknown_fields(event_type, payload, "payload"))
        if not _ENVELOPE.issuperset(data):
            extra.update((escaped(name), data[name]) for name in data if name not in _ENVELOPE)
        return Record(
            v=self.version,
            run=run,
            process=process,
            rank=rank,
            attempt=attempt,
            seq=seq,
            t=t,
            kind=kind,
            origin=None if origin is None else structured(origin, Origin, f"seq {seq}: origin"),
            event=event,
            extra=extra,
        )


def _envelope_error(seq: int, data: Mapping[str, Any]) -> DecodeError:
    expected: dict[str, tuple[tuple[type, ...], str]] = {
        "run": ((str,), "a string"),
        "process": ((str,), "a string"),
        "kind": ((str,), "a string"),
        "payload": ((dict,), "an object"),
        "attempt": ((int,), "an integer"),
        "rank": ((int, type(None)), "an integer or null"),
        "t": ((int, type(None)), "an integer or null"),
    }
    for name, (types, text) in expected.items():
        value = data.get(name, 1 if name == "attempt" else None)
        if type(value) not in types:
            return DecodeError(f"seq {seq}: {name}: expected {text}, found {shown(value)}", where=f"seq {seq}: {name}")
    return DecodeError(f"seq {seq}: no event", where=f"seq {seq}")


def _dumps(body: Any) -> bytes:
    try:
        return orjson.dumps(body, default=_as_plain, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        # A lone surrogate or an integer beyond 64 bits: text is worth more than a lost event.
        return orjson.dumps(_plain(body))


def _as_plain(value: Any) -> Any:
    """What orjson does not know: our own classes, sets, other mappings; anything else as text."""
    if attrs.has(type(value)):
        return _changed(value)
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


def _changed(value: Any) -> dict[str, Any]:
    """
    Fields of one of our objects that differ from their default.

    By hand and not by cattrs: generating an encoder for each class costs more than a start has events to encode.
    """
    kind = type(value)
    if kind not in _FIELDS:
        _FIELDS[kind] = [
            (field.name, field.default.factory() if isinstance(field.default, attrs.Factory) else field.default)  # type: ignore[arg-type]
            for field in attrs.fields(kind)
        ]
    plain = {}
    for name, default in _FIELDS[kind]:
        each = getattr(value, name)
        # ``is`` first: comparing is what costs. True == 1, so the types are compared too.
        if each is not default and (each != default or type(each) is not type(default)):
            plain[name] = each
    return plain


_FIELDS: Final[dict[type, list[tuple[str, Any]]]] = {}


def _plain(value: Any) -> Any:
    if attrs.has(type(value)):
        return _plain(_changed(value))
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, bool) or value is None or isinstance(value, float):
        return value
    if isinstance(value, int):
        return value if -(1 << 63) <= value < (1 << 63) else str(value)
    return str(value).encode("utf-8", "backslashreplace").decode()


def _shortened(line: bytes) -> bytes:
    """The same line with long texts and arrays cut until it fits; ``truncated`` says so."""
    body = orjson.loads(line)
    body["truncated"] = True
    for limit in (65_536, 4_096, 256, 16):
        short = orjson.dumps(_cut(body, limit)) + b"\n"
        if len(short) <= MAX_LINE:
            return short
    body["payload"] = {}
    return orjson.dumps(body) + b"\n"


def _cut(value: Any, limit: int) -> Any:
    if isinstance(value, dict):
        return {key[:limit]: _cut(each, limit) for key, each in list(value.items())[:limit]}
    if isinstance(value, list):
        return [_cut(each, limit) for each in value[:limit]]
    return value[:limit] if isinstance(value, str) else value


CODEC: Final = Codec()
