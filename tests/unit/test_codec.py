"""Codec: nothing is coerced, nothing is dropped, an error says where, and no value of an engine ends its start."""

from __future__ import annotations

import contextlib
import decimal
import enum
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import attrs
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from startup_fsm import events
from startup_fsm.codec import CODEC, MAX_LINE, Codec, as_plain
from startup_fsm.errors import DecodeError, UnknownSchema
from startup_fsm.events import EVENT_TYPES, DecisionMade, NoteAdded, Origin, Record, UnknownEvent
from startup_fsm.memory import Snapshot

OURS = {kind: cls for kind, cls in EVENT_TYPES.items() if cls.__module__.startswith("startup_fsm.events")}

INTEGERS = st.integers(-(2**63), 2**64 - 1)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | INTEGERS | TEXTS | FLOATS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Every value that a field of this annotation can have."""
    simple = {int: INTEGERS, str: TEXTS, bool: st.booleans(), float: FLOATS, Any: PLAIN, type(None): st.none()}
    if kind in simple:
        return simple[kind]
    if attrs.has(kind):
        return instances_of(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(TEXTS, values_of(arguments[1]), max_size=3)
    return st.one_of([values_of(each) for each in arguments])


def instances_of(kind: type) -> st.SearchStrategy[Any]:
    """Objects of an attrs class with arbitrary fields."""
    hints = get_type_hints(kind)
    fields = {field.name: values_of(hints[field.name]) for field in attrs.fields(kind)}
    return st.builds(kind, **fields)


def line_of(payload: object = None, **envelope: object) -> bytes:
    """One line as somebody else may have written it."""
    body = {
        "v": 0,
        "run": "r",
        "process": "p",
        "attempt": 1,
        "seq": 12,
        "t": 5,
        "kind": "note_added",
        "payload": payload,
    }
    return json.dumps({**body, **envelope}).encode()


def refused(payload: object = None, *, codec: Codec = CODEC, **envelope: object) -> DecodeError:
    """How a line is refused."""
    with pytest.raises(DecodeError) as caught:
        codec.decode(line_of(payload, **envelope))
    return caught.value


def record_of(event: events.Event, **envelope: Any) -> Record:
    """An event in an envelope."""
    fields = {"run": "r", "process": "p", "seq": 0, "kind": event.kind, "event": event, **envelope}
    return Record(**fields)


@pytest.mark.parametrize("kind", sorted(OURS))
def test_every_event_class_comes_back_equal(kind: str) -> None:
    """Whatever its fields hold, an event that is written is read back as the same object."""

    @settings(max_examples=30, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(instances_of(OURS[kind]), st.none() | instances_of(Origin), st.none() | st.integers(0, 9), st.integers(1, 9))
    def roundtrip(event: events.Event, origin: Origin | None, rank: int | None, attempt: int) -> None:
        record = record_of(event, origin=origin, rank=rank, attempt=attempt, t=7)
        line = CODEC.encode(record)
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        assert CODEC.decode(line) == record
        assert CODEC.encode(CODEC.decode(line)) == line

    roundtrip()


#: A wrong value for every annotation that an event has, with what is said about it.
WRONG: dict[Any, tuple[object, str]] = {
    int: ("7", "expected an integer, found '7'"),
    str: (7, "expected a string, found 7"),
    bool: (1, "expected true or false, found 1"),
    float: ("1.5", "expected a number, found '1.5'"),
}


def wrong_for(kind: Any) -> tuple[object, str] | None:
    """A value of the wrong type; None where any value will do."""
    if kind is Any:
        return None
    if kind in WRONG:
        return WRONG[kind]
    if attrs.has(kind):
        return [], "expected an object, found []"
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        return {}, "expected an array, found {}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return [], "expected an object, found []"
    if origin is Literal:
        return "no such word", "no such word"
    return next((wrong_for(each) for each in arguments if each is not type(None)), None)


@pytest.mark.parametrize("kind", sorted(OURS))
def test_every_field_of_every_event_is_strict_and_named(kind: str) -> None:
    """A wrong type in any field is refused, and the error names the field by its path."""
    cls = OURS[kind]
    hints = get_type_hints(cls)
    checked = 0
    for field in attrs.fields(cls):
        wrong = wrong_for(hints[field.name])
        if wrong is None:
            continue
        error = refused(valid_payload(cls) | {field.name: wrong[0]}, kind=kind)
        assert error.where == f"seq 12: payload.{field.name}"
        assert error.message.startswith(f"{error.where}: ")
        assert wrong[1] in error.message or "expected a number" in error.message
        checked += 1
    assert checked


@pytest.mark.parametrize("kind", sorted(OURS))
def test_every_required_field_is_missed_by_name(kind: str) -> None:
    """A line without a required field is refused, and the error names the field."""
    cls = OURS[kind]
    for field in attrs.fields(cls):
        if field.default is attrs.NOTHING:
            payload = valid_payload(cls)
            del payload[field.name]
            assert str(refused(payload, kind=kind)) == f"seq 12: payload.{field.name}: is missing"


def valid_payload(cls: type) -> dict[str, Any]:
    """The smallest payload that an event class takes."""
    simple: dict[Any, object] = {int: 1, str: "x", bool: True, float: 1.0, Any: None}
    hints, payload = get_type_hints(cls), {}
    for field in attrs.fields(cls):
        if field.default is attrs.NOTHING:
            kind = hints[field.name]
            kind = get_args(kind)[0] if kind not in simple and get_args(kind) else kind
            payload[field.name] = valid_payload(kind) if attrs.has(kind) else simple[kind]
    return payload


@pytest.mark.parametrize(
    ("kind", "payload", "where", "text"),
    [
        ("arena_mapped", {"base": True, "mapped_bytes": 1, "reserved_bytes": 1, "granule_bytes": 1}, "base", "True"),
        ("snapshot_taken", {"state": None, "label": "x", "snapshot": {"total_bytes": 1.0, "free_bytes": 1}}, "snapshot.total_bytes", "expected an integer, found 1.0"),
        ("snapshot_taken", {"state": None, "label": "x", "snapshot": {"total_bytes": 1}}, "snapshot.free_bytes", "is missing"),
        ("snapshot_taken", {"state": None, "label": "x", "snapshot": {"total_bytes": 1, "free_bytes": 1, "pools": [{"pool": "0.0", "reserved_bytes": 1, "active_bytes": 1}, {"pool": "0.1", "reserved_bytes": "1", "active_bytes": 1}]}}, "snapshot.pools.1.reserved_bytes", "expected an integer, found '1'"),
        ("estimate_made", {"estimate": "g", "method": "m", "recurring_bytes": 1, "readings": {"F0": 1, "F1": "2"}}, "readings.F1", "expected an integer, found '2'"),
        ("state_stalled", {"state": "x", "deadline_ns": 1, "stack": ["a", 2]}, "stack.1", "expected a string, found 2"),
        ("check_judged", {"check": "c", "state": "s", "findings": [{"code": "a.b", "severity": "fatal", "message": "m"}]}, "findings.0.severity", "fatal"),
        ("figure_read", {"figure": "f", "value": "1"}, "value", "expected a number, found '1'"),
        ("figure_read", {"figure": "f", "value": True}, "value", "expected a number, found True"),
    ],
)  # fmt: skip
def test_a_mistake_deep_inside_is_found(kind: str, payload: dict[str, Any], where: str, text: str) -> None:
    """The path goes through objects, arrays and mappings down to the value."""
    error = refused(payload, kind=kind)
    assert error.where == f"seq 12: payload.{where}"
    assert text in error.message


@pytest.mark.parametrize(
    ("envelope", "where"),
    [
        ({"seq": "12"}, "seq"),
        ({"seq": -1}, "seq"),
        ({"seq": True}, "seq"),
        ({"seq": 1.0}, "seq"),
        ({"v": "0"}, "v"),
        ({"v": -1}, "v"),
        ({"v": None}, "v"),
        ({"v": False}, "v"),
        ({"run": None}, "seq 12: run"),
        ({"process": 3}, "seq 12: process"),
        ({"kind": None}, "seq 12: kind"),
        ({"payload": []}, "seq 12: payload"),
        ({"payload": None}, "seq 12: payload"),
        ({"attempt": "1"}, "seq 12: attempt"),
        ({"attempt": 0}, "seq 12: attempt"),
        ({"rank": "0"}, "seq 12: rank"),
        ({"rank": -1}, "seq 12: rank"),
        ({"rank": False}, "seq 12: rank"),
        ({"t": 1.5}, "seq 12: t"),
        ({"t": "1"}, "seq 12: t"),
        ({"origin": "x"}, "seq 12: origin"),
        ({"origin": {}}, "seq 12: origin.source"),
        ({"origin": {"source": "v", "line": "3"}}, "seq 12: origin.line"),
    ],
)
def test_every_field_of_the_envelope_is_strict_and_named(envelope: dict[str, Any], where: str) -> None:
    """A wrong envelope is refused, and the error names the field."""
    error = refused(**{"payload": {}, **envelope})
    assert error.where == where
    assert where.rsplit(": ", maxsplit=1)[-1] in error.message


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[]", b"7", b"null", b'"x"', b"\xff\xfe", b"{}x", b'{"v":0', b"\x00" * 50]
)
def test_what_is_no_object_is_refused_as_a_line(line: bytes) -> None:
    """Whatever is no JSON object is one DecodeError."""
    with pytest.raises(DecodeError) as caught:
        CODEC.decode(line)
    assert caught.value.where in ("line", "v")


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(line: bytes) -> None:
    """Bytes decode to a record or to one of two errors."""
    with contextlib.suppress(DecodeError, UnknownSchema):
        CODEC.decode(line)


@given(
    st.sampled_from(sorted(OURS)),
    st.dictionaries(TEXTS | st.sampled_from(["state", "snapshot", "plan", "findings"]), PLAIN),
)
def test_no_payload_raises_anything_else(kind: str, payload: dict[str, Any]) -> None:
    """JSON of any shape decodes to a record or to a DecodeError with a place."""
    where = "seq 12: payload"
    try:
        CODEC.decode(line_of(payload, kind=kind))
    except DecodeError as error:
        where = error.where
    assert where.startswith("seq 12: payload")


def test_unknown_fields_are_kept_at_every_depth_and_written_again() -> None:
    """Fields of a later version survive reading and writing, nested ones and those with awkward names too."""
    payload = {
        "state": None,
        "label": "enter",
        "later": {"a": [1]},
        "snapshot": {
            "total_bytes": 9,
            "free_bytes": 4,
            "new/field~": 1,
            "pools": [
                {"pool": "0.0", "reserved_bytes": 1, "active_bytes": 1},
                {"pool": "0.1", "reserved_bytes": 1, "active_bytes": 1, "": "nameless"},
            ],
        },
    }
    line = line_of(payload, kind="snapshot_taken", origin={"source": "x", "page": 4}, zone="eu", **{"a/b": 1})
    record = CODEC.decode(line)
    assert record.extra == {
        "payload/later": {"a": [1]},
        "payload/snapshot/new~1field~0": 1,
        "payload/snapshot/pools/1/": "nameless",
        "origin/page": 4,
        "zone": "eu",
        "a~1b": 1,
    }
    again = orjson.loads(CODEC.encode(record))
    assert again == orjson.loads(line)
    assert CODEC.decode(CODEC.encode(record)) == record


def test_an_unknown_kind_is_kept_whole() -> None:
    """An event of a later version is kept and written again as it was."""
    line = line_of({"x": {"y": [1, None]}}, kind="wand_waved", extra_envelope=1)
    record = CODEC.decode(line)
    assert record.event == UnknownEvent(payload={"x": {"y": [1, None]}})
    assert record.kind == "wand_waved"
    assert orjson.loads(CODEC.encode(record)) == orjson.loads(line)


def test_defaults_are_not_written() -> None:
    """A field that has its default takes no bytes, and is read as its default."""
    body = orjson.loads(CODEC.encode(record_of(events.StateLeft(state="x"))))
    assert body["payload"] == {"state": "x"}


def test_a_newer_schema_is_refused_by_name() -> None:
    """The error names both versions and says what to do."""
    with pytest.raises(UnknownSchema, match=r"schema 3; .* reads up to 0") as caught:
        CODEC.decode(line_of({}, v=3))
    assert caught.value.hint is not None


def chain() -> Codec:
    """A codec of a test-only version 2."""

    def one(data: dict[str, Any]) -> dict[str, Any]:
        payload = dict(data["payload"])
        payload["note"] = {"size_bytes": payload.pop("kib") * 1024}
        return data | {"payload": payload}

    def two(data: dict[str, Any]) -> dict[str, Any]:
        note = data["payload"]["note"]
        return data | {"payload": {"note": {"bytes": note["size_bytes"]}}}

    return Codec(version=2, upcasters={0: one, 1: two})


def test_upcasters_run_in_a_chain() -> None:
    """A line of version 0 goes through both upcasters, one of version 1 through the second, one of 2 through none."""
    codec = chain()
    assert codec.decode(line_of({"kib": 3}, v=0)).event == NoteAdded(note={"bytes": 3072})
    assert codec.decode(line_of({"note": {"size_bytes": 5}}, v=1)).event == NoteAdded(note={"bytes": 5})
    assert codec.decode(line_of({"note": {"bytes": 7}}, v=2)).event == NoteAdded(note={"bytes": 7})


def test_what_was_upcast_is_written_in_the_new_version() -> None:
    """Written again, an upcast record says the version that it now has, and reads the same."""
    codec = chain()
    record = codec.decode(line_of({"kib": 3}, v=0))
    assert record.v == 2
    line = codec.encode(record)
    assert orjson.loads(line)["v"] == 2
    assert codec.decode(line) == record
    fresh = record_of(NoteAdded(note={"bytes": 1}))
    assert orjson.loads(codec.encode(fresh))["v"] == 2


def test_a_version_without_a_way_is_refused() -> None:
    """A missing upcaster is an error at ``v``, as is one that fails on what it gets."""
    assert refused({}, codec=Codec(version=2, upcasters={1: lambda data: data}), v=0).where == "v"
    error = refused({"no": "kib"}, codec=chain(), v=0)
    assert error.where == "v"
    assert "schema 0 to 1: KeyError" in error.message


class _Colour(enum.Enum):
    RED = "red"


class _Rude:
    """An object that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


@attrs.define
class _Theirs:
    first: int
    second: int = attrs.field(default=attrs.Factory(lambda self: self.first, takes_self=True))


def note_written(value: object) -> Any:
    """What the journal holds of a value in a note."""
    return CODEC.decode(CODEC.encode(record_of(NoteAdded(note={"value": value})))).event.note["value"]  # type: ignore[attr-defined]


def test_values_that_json_cannot_hold_are_written_as_the_nearest() -> None:
    """Text is worth more than a lost event; numbers of other libraries stay numbers."""
    assert note_written(2**64 - 1) == 2**64 - 1
    assert note_written(2**70) == str(2**70)
    assert note_written([2**70, 2**64 - 1, -(2**63)]) == [str(2**70), 2**64 - 1, -(2**63)]
    assert note_written("caf\ud800e") == "caf\\ud800e"
    assert note_written({"\udcff": 1}) == {"\\udcff": 1}
    assert note_written({3, 1}) == ["1", "3"]
    assert note_written((1, (2,))) == [1, [2]]
    assert note_written(_Colour.RED) == "red"
    assert note_written(b"x") == "b'x'"
    assert note_written(decimal.Decimal("1.5")) == "1.5"
    assert note_written({1: {None: True}}) == {"1": {"null": True}}
    assert note_written(type) == "<class 'type'>"


def test_not_a_number_is_written_as_null() -> None:
    """JSON has no NaN and no infinity."""
    assert note_written([float("nan"), float("inf")]) == [None, None]


def test_numbers_of_numpy_stay_numbers() -> None:
    """A byte count in a numpy integer is an integer in the journal."""
    numpy = pytest.importorskip("numpy")
    assert note_written(numpy.int64(7)) == 7
    assert type(note_written(numpy.int64(7))) is int
    assert note_written(numpy.float64(0.5)) == 0.5
    assert note_written(numpy.float32(0.5)) == 0.5
    finding = events.RanksAgreed(topic="t", agreed=numpy.arange(3))
    assert isinstance(CODEC.decode(CODEC.encode(record_of(finding))).event, events.RanksAgreed)


def test_no_value_of_an_engine_raises() -> None:
    """A circle, a rude object, a bottomless list: an event is written, and decodes."""
    circle: dict[str, Any] = {}
    circle["self"] = circle
    deep: list[Any] = []
    for _ in range(3_000):
        deep = [deep]
    for value in (circle, [circle], _Rude(), {"x": _Rude()}, {_Rude(): 1}, deep, _Theirs(1), {"\ud800": circle}):
        line = CODEC.encode(record_of(DecisionMade(decision="d", reason="r", inputs={"value": value, "kept": 1})))
        assert CODEC.decode(line).event.inputs["kept"] == 1  # type: ignore[attr-defined]


@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
        max_leaves=8,
    )
)
def test_as_plain_is_always_json(value: object) -> None:
    """What comes out can be written, and comes back the same when it is made plain again."""
    plain = as_plain(value)
    orjson.dumps(plain)
    assert repr(as_plain(plain)) == repr(plain)


OVERLONG: dict[str, events.Event] = {
    "text": events.StateFailed(state="capture_graphs", error_type="E", category="raised", message="x" * (3 << 20)),
    "frames": events.StateFailed(state="x", error_type="E", category="raised", message="", where=("frame " * 20,) * 20_000),
    "blocks": events.OomObserved(message="m", blocks=tuple({"pool": "0.0", "bytes": n} for n in range(80_000))),
    "notes": NoteAdded(note={f"note {n}": "y" * 300 for n in range(9_000)}),
    "names": NoteAdded(note={f"{n}" * 90_000: n for n in range(6)}),
    "tree": NoteAdded(note={"tree": [[[[["x" * 16] * 16] * 16] * 16] * 16] * 16}),
    "findings": events.CheckJudged(
        check="c",
        state="s",
        findings=tuple(
            events.judged.Finding(code="a.b", severity="error", message="z" * 5_000, observed=["w" * 100] * 50)
            for _ in range(400)
        ),
    ),
    "unicode": NoteAdded(note={"smile": "😀" * 400_000}),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(OVERLONG))
def test_overlong_lines_are_cut_and_say_so(name: str) -> None:
    """A line has at most 1 MiB, still decodes as its kind, keeps its envelope, and says that it was cut."""
    run, process = "20260101T000000Z-0123456789abcdef-and-more", "engine-1234567890123456789"
    event = OVERLONG[name]
    line = CODEC.encode(record_of(event, run=run, process=process, seq=5, extra={"zone": "z" * (2 << 20)}))
    assert len(line) <= MAX_LINE
    record = CODEC.decode(line)
    assert (record.run, record.process, record.seq, record.kind) == (run, process, 5, event.kind)
    assert record.extra["truncated"] is True
    assert type(record.event) is type(event)
    assert CODEC.decode(CODEC.encode(record)) == record


def test_a_long_message_keeps_its_beginning() -> None:
    """Of one long text 64 KiB stay."""
    record = CODEC.decode(CODEC.encode(record_of(OVERLONG["text"])))
    assert record.event == attrs.evolve(OVERLONG["text"], message="x" * 65_536)  # type: ignore[arg-type]


def test_the_longest_line_that_fits_is_not_cut() -> None:
    """At the limit nothing is cut; one byte more is."""
    empty = len(CODEC.encode(record_of(NoteAdded(note={"x": ""}))))
    fits = CODEC.encode(record_of(NoteAdded(note={"x": "a" * (MAX_LINE - empty)})))
    assert len(fits) == MAX_LINE
    assert CODEC.decode(fits).extra == {}
    over = CODEC.encode(record_of(NoteAdded(note={"x": "a" * (MAX_LINE - empty + 1)})))
    assert CODEC.decode(over).extra == {"truncated": True}


def test_a_snapshot_with_everything_fits_a_line() -> None:
    """Snapshots stay typed: an int stays an int, and free memory may be zero."""
    shot = Snapshot(total_bytes=2**63, free_bytes=0)
    taken = events.SnapshotTaken(state="x", label="enter", snapshot=shot)
    assert CODEC.decode(CODEC.encode(record_of(taken))).event == taken
