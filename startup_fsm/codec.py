"""
Event to one JSON line and back. Decoding is strict: nothing is coerced, nothing is dropped, and an error says where.

A field that has its default is not written, so a default never changes its meaning within a schema version. Fields
that this version does not know are kept in ``Record.extra`` by JSON pointer and written again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, get_args, get_origin, get_type_hints

import attrs
import cattrs
import orjson
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn

from startup_fsm.errors import DecodeError, UnknownSchema
from startup_fsm.events import EVENT_TYPES, SCHEMA_VERSION, Event, Origin, Record, UnknownEvent

#: Longest line in bytes, newline included.
MAX_LINE: Final = 1 << 20

#: A pure function from the plain dict of one version to that of the next.
Upcaster = Callable[[dict[str, Any]], dict[str, Any]]

_ENVELOPE: Final = frozenset({"v", "run", "process", "rank", "attempt", "seq", "t", "kind", "origin", "payload"})


class _Mismatch(TypeError):
    """A value has the wrong type."""


def _strict(expected: type, name: str) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        # ``type is``: a bool is an int in Python and must not pass for one here.
        if type(value) is not expected:
            msg = f"expected {name}, found {_shown(value)}"
            raise _Mismatch(msg)
        return value

    return structure


def _number(value: Any, _: Any) -> int | float:
    if type(value) not in (int, float):
        msg = f"expected a number, found {_shown(value)}"
        raise _Mismatch(msg)
    return value  # type: ignore[no-any-return]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _mapping_hook(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    item = get_args(kind)[1]

    def structure(value: Any, _: Any) -> Any:
        if type(value) is not dict:
            msg = f"expected an object, found {_shown(value)}"
            raise _Mismatch(msg)
        if item is Any:
            return value
        return {key: converter.structure(each, item) for key, each in value.items()}

    return structure


def _tuple_hook(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    item = get_args(kind)[0]
    each_hook = converter.get_structure_hook(item) if attrs.has(item) else None

    def structure(value: Any, _: Any) -> Any:
        if type(value) is not list:
            msg = f"expected an array, found {_shown(value)}"
            raise _Mismatch(msg)
        if each_hook is not None:
            return tuple([each_hook(each, item) for each in value])
        return tuple([converter.structure(each, item) for each in value])

    return structure


def _attrs_hook(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    inner = make_dict_structure_fn(kind, converter, _cattrs_detailed_validation=converter.detailed_validation)

    def structure(value: Any, _: Any) -> Any:
        if type(value) is not dict:
            msg = f"expected an object, found {_shown(value)}"
            raise _Mismatch(msg)
        return inner(value, kind)

    return structure


def _converter(*, detailed: bool) -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=detailed, omit_if_default=True)
    for kind, name in ((int, "an integer"), (str, "a string"), (bool, "true or false")):
        converter.register_structure_hook(kind, _strict(kind, name))
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook_func(lambda kind: kind == int | float, _number)
    converter.register_structure_hook_factory(
        lambda kind: _has_origin(kind, Mapping), lambda kind: _mapping_hook(kind, converter)
    )
    converter.register_structure_hook_factory(
        lambda kind: _has_origin(kind, tuple), lambda kind: _tuple_hook(kind, converter)
    )
    converter.register_structure_hook_factory(attrs.has, lambda kind: _attrs_hook(kind, converter))
    converter.register_unstructure_hook_factory(
        attrs.has,
        lambda kind: make_dict_unstructure_fn(kind, converter, _cattrs_omit_if_default=True),
    )
    return converter


def _has_origin(kind: Any, wanted: type) -> bool:
    origin: Any = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, wanted)


_FAST: Final = _converter(detailed=False)
_DETAILED: Final = _converter(detailed=True)


def _nested(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Fields of an attrs class that hold attrs classes: name to (class, whether it is a tuple of them)."""
    found: dict[str, tuple[Any, bool]] = {}
    for name, annotation in get_type_hints(kind).items():
        for candidate in (annotation, *get_args(annotation)):
            if attrs.has(candidate) and get_origin(annotation) is not type:
                found[name] = (candidate, get_origin(annotation) is tuple)
    return found


@attrs.frozen
class _Shape:
    """What is known of a class, to find what is not."""

    names: frozenset[str]
    nested: dict[str, tuple[Any, bool]]


_SHAPES: Final[dict[Any, _Shape]] = {}


def _shape(kind: Any) -> _Shape:
    if kind not in _SHAPES:
        _SHAPES[kind] = _Shape(frozenset(field.name for field in attrs.fields(kind)), _nested(kind))
    return _SHAPES[kind]


def _unknown(kind: Any, data: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    shape = _shape(kind)
    if not shape.names.issuperset(data):
        for name in data:
            if name not in shape.names:
                yield f"{path}/{_escaped(name)}", data[name]
    for name, (inner, many) in shape.nested.items():
        value = data.get(name)
        if not value:
            continue
        if many:
            for index, each in enumerate(value):
                yield from _unknown(inner, each, f"{path}/{name}/{index}")
        else:
            yield from _unknown(inner, value, f"{path}/{name}")


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _put(target: Any, pointer: str, value: Any) -> None:
    *steps, last = (step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/"))
    for step in steps:
        if isinstance(target, list):
            target = target[int(step)] if int(step) < len(target) else {}
        else:
            target = target.setdefault(step, {})
    target[last] = value


def _first_leaf(error: BaseException, path: str) -> tuple[str, str]:
    """Path and text of the first mistake inside a cattrs error."""
    if isinstance(error, cattrs.BaseValidationError):
        inner = error.exceptions[0]
        notes = [note for note in getattr(inner, "__notes__", ()) if isinstance(note, cattrs.AttributeValidationNote)]
        return _first_leaf(inner, f"{path}.{notes[-1].name}" if notes else path)
    if isinstance(error, KeyError):
        return path, "is missing"
    return path, str(error)


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
        payload = event.payload if isinstance(event, UnknownEvent) else _FAST.unstructure(event)
        body: dict[str, Any] = {"v": record.v, "run": record.run, "process": record.process}
        if record.rank is not None:
            body["rank"] = record.rank
        body["attempt"] = record.attempt
        body["seq"] = record.seq
        body["t"] = record.t
        body["kind"] = record.kind
        if record.origin is not None:
            body["origin"] = _FAST.unstructure(record.origin)
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
            msg = f"expected an object, found {_shown(data)}"
            raise DecodeError(msg, where="line")
        return self._record(self._upcast(data))

    def _upcast(self, data: dict[str, Any]) -> dict[str, Any]:
        version = data.get("v")
        if type(version) is not int or version < 0:
            msg = f"v: expected a schema version, found {_shown(version)}"
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
            msg = f"seq: expected a number from 0, found {_shown(seq)}"
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
            event = self._structured(payload, event_type, f"seq {seq}: payload")
            extra.update(_unknown(event_type, payload, "payload"))
        if not _ENVELOPE.issuperset(data):
            extra.update((_escaped(name), data[name]) for name in data if name not in _ENVELOPE)
        return Record(
            v=self.version,
            run=run,
            process=process,
            rank=rank,
            attempt=attempt,
            seq=seq,
            t=t,
            kind=kind,
            origin=None if origin is None else self._structured(origin, Origin, f"seq {seq}: origin"),
            event=event,
            extra=extra,
        )

    @staticmethod
    def _structured(data: Any, kind: type[Any], path: str) -> Any:
        try:
            return _FAST.structure(data, kind)
        except Exception:  # noqa: BLE001 - the detailed converter finds the place and says it
            try:
                return _DETAILED.structure(data, kind)
            except Exception as error:  # noqa: BLE001
                where, text = _first_leaf(error, path)
                msg = f"{where}: {text}"
                raise DecodeError(msg, where=where) from None


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
            return DecodeError(f"seq {seq}: {name}: expected {text}, found {_shown(value)}", where=f"seq {seq}: {name}")
    return DecodeError(f"seq {seq}: no event", where=f"seq {seq}")


def _dumps(body: Any) -> bytes:
    try:
        return orjson.dumps(body, default=_as_text, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        # A lone surrogate or an integer beyond 64 bits: text is worth more than a lost event.
        return orjson.dumps(_plain(body))


def _as_text(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


def _plain(value: Any) -> Any:
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
