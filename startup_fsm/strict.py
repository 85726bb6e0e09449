"""
Plain data to attrs classes, strictly: nothing is coerced, nothing is dropped, and an error says where.

cattrs does the work; by default it would turn ``"7"`` into 7 and leave unknown fields out, so every type it meets here
has a hook of ours. No IO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, get_args, get_origin, get_type_hints

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn

from startup_fsm.errors import DecodeError


class _Mismatch(TypeError):
    """A value has the wrong type."""


class _Inside(ValueError):
    """Something is wrong with one entry of an array or object; the cause says what."""

    def __init__(self, step: str) -> None:
        self.step = step
        super().__init__(step)


def _strict(expected: type, name: str) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        # ``type is``: a bool is an int in Python and must not pass for one here.
        if type(value) is not expected:
            msg = f"expected {name}, found {shown(value)}"
            raise _Mismatch(msg)
        return value

    return structure


def _number(value: Any, _: Any) -> int | float:
    if type(value) not in (int, float):
        msg = f"expected a number, found {shown(value)}"
        raise _Mismatch(msg)
    return value  # type: ignore[no-any-return]


def shown(value: Any) -> str:
    """A value for an error message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _mapping_hook(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    item = get_args(kind)[1]

    def structure(value: Any, _: Any) -> Any:
        if type(value) is not dict:
            msg = f"expected an object, found {shown(value)}"
            raise _Mismatch(msg)
        if item is Any:
            return value
        if converter.detailed_validation:
            return {key: _entry(each, item, f".{key[:60]}", converter) for key, each in value.items()}
        return {key: converter.structure(each, item) for key, each in value.items()}

    return structure


def _entry(value: Any, kind: Any, step: str, converter: cattrs.Converter) -> Any:
    try:
        return converter.structure(value, kind)
    except Exception as error:
        raise _Inside(step) from error


def _tuple_hook(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    item = get_args(kind)[0]
    each_hook = converter.get_structure_hook(item) if attrs.has(item) else None

    def structure(value: Any, _: Any) -> Any:
        if type(value) is not list:
            msg = f"expected an array, found {shown(value)}"
            raise _Mismatch(msg)
        if converter.detailed_validation:
            return tuple([_entry(each, item, f".{index}", converter) for index, each in enumerate(value)])
        if each_hook is not None:
            return tuple([each_hook(each, item) for each in value])
        return tuple([converter.structure(each, item) for each in value])

    return structure


def _attrs_hook(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    inner = make_dict_structure_fn(kind, converter, _cattrs_detailed_validation=converter.detailed_validation)

    def structure(value: Any, _: Any) -> Any:
        if type(value) is not dict:
            msg = f"expected an object, found {shown(value)}"
            raise _Mismatch(msg)
        return inner(value, kind)

    return structure


def _converter(*, detailed: bool) -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=detailed)
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
    shape = _SHAPES[kind] = _Shape(frozenset(field.name for field in attrs.fields(kind)), _nested(kind))
    return shape


def unknown_fields(kind: Any, data: Mapping[str, Any], path: str) -> Iterable[tuple[str, Any]]:
    """Fields that ``kind`` does not have, at any depth: JSON pointer and value."""
    shape = _SHAPES.get(kind) or _shape(kind)
    if not shape.nested and shape.names.issuperset(data):
        # Nearly always.
        return ()
    return _unknown(shape, data, path)


def _unknown(shape: _Shape, data: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    if not shape.names.issuperset(data):
        for name in data:
            if name not in shape.names:
                yield f"{path}/{escaped(name)}", data[name]
    for name, (inner, many) in shape.nested.items():
        value = data.get(name)
        if not value:
            continue
        if many:
            for index, each in enumerate(value):
                yield from unknown_fields(inner, each, f"{path}/{name}/{index}")
        else:
            yield from unknown_fields(inner, value, f"{path}/{name}")


def escaped(name: str) -> str:
    """A name as one step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _first_leaf(error: BaseException, path: str) -> tuple[str, str]:
    """Path and text of the first mistake inside a cattrs error."""
    if isinstance(error, cattrs.BaseValidationError):
        inner = error.exceptions[0]
        notes = [note for note in getattr(inner, "__notes__", ()) if isinstance(note, cattrs.AttributeValidationNote)]
        return _first_leaf(inner, f"{path}.{notes[-1].name}" if notes else path)
    if isinstance(error, _Inside) and error.__cause__ is not None:
        return _first_leaf(error.__cause__, path + error.step)
    if isinstance(error, KeyError):
        return path, "is missing"
    return path, str(error)


def structured(data: Any, kind: type[Any], path: str) -> Any:
    """
    Data as an instance of ``kind``.

    Raises:
        DecodeError: A wrong type or a missing field; ``where`` is its path below ``path``.
    """
    try:
        return _FAST.structure(data, kind)
    except Exception:  # noqa: BLE001 - the detailed converter finds the place and says it
        try:
            return _DETAILED.structure(data, kind)
        except Exception as error:  # noqa: BLE001
            where, text = _first_leaf(error, path)
            msg = f"{where}: {text}"
            raise DecodeError(msg, where=where) from None
