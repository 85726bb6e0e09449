"""
Event to one JSON line and back. Decoding is strict: nothing is coerced, nothing is dropped, and an error says where.

A field that has its default is not written, so a default never changes its meaning within a schema version. Fields
that this version does not know are kept in ``Record.extra`` by JSON pointer and written again.
"""

from __future__ import annotations

import enum
import numbers
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
        body: dict[str, Any] = {"v": self.version, "run": record.run, "process": record.process}
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
            try:
                data = self.upcasters[version](data)
            except Exception as error:
                msg = f"v: cannot be brought from schema {version} to {version + 1}: {type(error).__name__}: {error}"
                raise DecodeError(msg, where="v") from error
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
            and attempt >= 1
            and (rank is None or (type(rank) is int and rank >= 0))
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
        if origin is not None:
            origin = structured(origin, Origin, f"seq {seq}: origin")
            extra.update(unknown_fields(Origin, data["origin"], "origin"))
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
            origin=origin,
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
            return _out_of_place(seq, name, text, value)
    if data.get("attempt", 1) < 1:
        return _out_of_place(seq, "attempt", "a number from 1", data["attempt"])
    return _out_of_place(seq, "rank", "a number from 0", data.get("rank"))


def _out_of_place(seq: int, name: str, expected: str, value: Any) -> DecodeError:
    where = f"seq {seq}: {name}"
    return DecodeError(f"{where}: expected {expected}, found {shown(value)}", where=where)


def _dumps(body: Any) -> bytes:
    try:
        return orjson.dumps(body, default=_as_plain, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        # A lone surrogate, an integer beyond 64 bits, a circle, an object that cannot say what it is: text is worth
        # more than a lost event, and no value of an engine may end its start here.
        return orjson.dumps(as_plain(body))


def _as_plain(value: Any) -> Any:
    """What orjson does not know: our own classes, numbers of other libraries, other containers; the rest as text."""
    kind = type(value)
    if attrs.has(kind):
        return _changed(value)
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return list(value)
    # A byte count in an integer of numpy stays a number.
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else str(value)


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
        if each is not default and (default is None or each != default or type(each) is not type(default)):
            plain[name] = each
    return plain


_FIELDS: Final[dict[type, list[tuple[str, Any]]]] = {}


def as_plain(value: Any, depth: int = 0) -> Any:
    """
    The nearest that JSON can hold, of anything: never raises, and ends where a structure does not.

    What orjson takes by itself stays as it is; an integer beyond 64 bits, a lone surrogate and an unknown object
    become text.
    """
    if value is None or isinstance(value, bool):
        return value
    if depth > _DEEPEST:
        return "..."
    try:
        return _as_plain_at(value, depth)
    except Exception as error:  # noqa: BLE001 - an engine's object may raise whatever it likes
        return f"<{type(value).__name__}: {type(error).__name__}>"


def _as_plain_at(value: Any, depth: int) -> Any:
    if isinstance(value, enum.Enum):
        return as_plain(value.value, depth + 1)
    if attrs.has(type(value)):
        return as_plain(_changed(value), depth)
    if isinstance(value, Mapping):
        return {_text(key): as_plain(each, depth + 1) for key, each in list(value.items())}
    if isinstance(value, (list, tuple)):
        return [as_plain(each, depth + 1) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(_text, value))
    if isinstance(value, numbers.Integral):
        number = int(value)
        return number if -(1 << 63) <= number < (1 << 64) else str(number)
    return float(value) if isinstance(value, numbers.Real) else _text(value)


def _text(value: Any) -> str:
    return str(value).encode("utf-8", "backslashreplace").decode()


_DEEPEST: Final = 64
#: Strings, arrays and objects are cut to so many entries, in turn, until a line fits.
_LIMITS: Final = (65_536, 4_096, 256, 16)
#: Below these nothing is cut: names of fields, and as many of them as an event has.
_KEY, _KEYS = 256, 64
#: Fields of an event lie no deeper than this in its payload; what does is a value without a type.
_TYPED_DEPTH: Final = 4


def _shortened(line: bytes) -> bytes:
    """The same line with long texts and arrays of the payload cut until it fits; ``truncated`` says so."""
    body = orjson.loads(line)
    for name in set(body).difference(_ENVELOPE):
        body[name] = _cut(body[name], _LIMITS[-1], _DEEPEST)
    body["truncated"] = True
    payload = body["payload"]
    for limit, depth in (*((limit, _DEEPEST) for limit in _LIMITS), (_LIMITS[-1], _TYPED_DEPTH)):
        short = _dumps(body | {"payload": _cut(payload, limit, depth)}) + b"\n"
        if len(short) <= MAX_LINE:
            return short
    bare = {name: _cut(each, _LIMITS[-1], 0) for name, each in payload.items() if not isinstance(each, (dict, list))}
    known = {name: each for name, each in body.items() if name in _ENVELOPE}
    return _dumps(known | {"payload": bare, "truncated": True}) + b"\n"


def _cut(value: Any, limit: int, depth: int) -> Any:
    if isinstance(value, str):
        return value[:limit]
    if not isinstance(value, (dict, list)):
        return value
    if depth == 0:
        return "..."
    if isinstance(value, list):
        return [_cut(each, limit, depth - 1) for each in value[:limit]]
    entries = list(value.items())[: max(limit, _KEYS)]
    return {key[: max(limit, _KEY)]: _cut(each, limit, depth - 1) for key, each in entries}


CODEC: Final = Codec()
