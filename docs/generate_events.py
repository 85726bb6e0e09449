"""
Write ``events.md`` from the event classes: every kind, every field, its type, its default, and what it means.

The text comes from the classes and their docstrings alone; ``make events`` runs this, a test compares.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import attrs

from startup_fsm import events, findings, memory

TARGET = Path(__file__).parent / "events.md"

INTRODUCTION = """\
# Events

<!-- Generated from the classes of startup_fsm.events by `make events`; change it there. -->

A journal is lines of JSON. Each line is an envelope, with one event in its field `payload`. Kinds are stable strings in
the past tense, never import paths. Bytes are integers in bytes, times integers in nanoseconds. A field of the payload
that has its default is not written. Fields and kinds that a reader does not know are kept. The schema version of this
release is {version}; it rises only when a meaning changes.
"""

#: The modules of kinds, in reading order; a module that is not listed comes last.
ORDER: tuple[str, ...] = ("course", "measured", "judged", "around")

#: What an event may hold, in the order in which the page explains it.
PARTS: tuple[type[Any], ...] = (
    events.Origin,
    memory.Snapshot,
    memory.PoolUsage,
    memory.Tenant,
    findings.Finding,
    events.BudgetTerm,
)


def meanings(cls: type[Any]) -> tuple[str, dict[str, str]]:
    """What the docstring says: the text before ``Attributes:``, and one text for each field that it explains."""
    head, _, tail = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    fields: dict[str, str] = {}
    names: list[str] = []
    for line in tail.splitlines():
        if opening := re.match(r" {4}([a-z]\w*(?:, [a-z]\w*)*): (.*)", line):
            names = opening[1].split(", ")
            fields |= dict.fromkeys(names, opening[2])
        elif line.strip():
            fields |= {name: f"{fields[name]} {line.strip()}" for name in names}
    return prose(head), fields


def prose(text: str) -> str:
    """A docstring as Markdown, on as many lines as it has paragraphs."""
    text = re.sub(r":(?:func|data|class):`~?([^`]+)`", r"`\1`", text.strip()).replace("``", "`")
    text = re.sub(r"\bNone\b", "null", text)
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def kind_of_value(annotation: object) -> str:
    """A type as the JSON has it, with a link where this page explains it."""
    text = str(annotation).replace("Mapping[str, Any]", "object").replace("Any", "any")
    text = re.sub(r"Mapping\[str, (\w+)\]", r"object of \1", text)
    text = re.sub(r"tuple\[(.+), \.\.\.\]", r"list of \1", text).replace("None", "null")
    text = re.sub(r"\bstr\b", "string", re.sub(r"\bint\b", "integer", re.sub(r"\bbool\b", "boolean", text)))
    explained = "|".join(part.__name__ for part in PARTS)
    return re.sub(rf"\b({explained})\b", lambda name: f"[{name[1]}](#{name[1].lower()})", text).replace("|", "or")


def default_of(field: attrs.Attribute[Any]) -> str:
    """The default as JSON, or that there is none."""
    default: Any = field.default
    if default is attrs.NOTHING:
        return "required"
    return f"`{json.dumps(default.factory() if hasattr(default, 'factory') else default)}`"


def table(cls: type[Any], *, leave_out: frozenset[str] = frozenset()) -> str:
    """The fields of one class as a table."""
    _, texts = meanings(cls)
    # As it is written in the class: attrs resolves its own copy as soon as somebody structures the class.
    types = {
        name: text for base in reversed(cls.__mro__) for name, text in vars(base).get("__annotations__", {}).items()
    }
    rows = [
        f"| `{field.name}` | {kind_of_value(types[field.name])} | {default_of(field)}"
        f" | {prose(texts.get(field.name, ''))} |"
        for field in attrs.fields(cls)
        if field.name not in leave_out
    ]
    return "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows]) if rows else "No fields."


def section(title: str, cls: type[Any], **options: frozenset[str]) -> str:
    """A heading, what the class is, its fields."""
    return f"{title}\n\n{meanings(cls)[0]}\n\n{table(cls, **options)}\n"


def kinds_by_module() -> list[str]:
    """All kinds under the first sentence of their module, in reading order."""
    modules: dict[str, list[str]] = {}
    for kind, cls in events.EVENT_TYPES.items():
        modules.setdefault(cls.__module__, []).append(kind)
    known = {f"{events.__name__}.{name}": place for place, name in enumerate(ORDER)}
    lines: list[str] = []
    for module in sorted(modules, key=lambda name: (known.get(name, len(known)), name)):
        lines.append(f"## {title_of(module)}\n")
        lines += [section(f"### `{kind}`", events.EVENT_TYPES[kind]) for kind in modules[module]]
    return lines


def title_of(module: str) -> str:
    """What a module is for: its docstring up to the first colon or full stop."""
    return re.split(r"[:.]", inspect.cleandoc(sys.modules[module].__doc__ or module), maxsplit=1)[0]


def page() -> str:
    """The whole page."""
    parts = [section(f"### {cls.__name__}", cls) for cls in PARTS]
    envelope = section("## The envelope", events.Record, leave_out=frozenset({"event", "extra"}))
    return "\n".join(
        [
            INTRODUCTION.format(version=events.SCHEMA_VERSION),
            envelope,
            *kinds_by_module(),
            "## What events hold\n",
            *parts,
        ]
    )


def main() -> int:
    """Write the page, and say so."""
    TARGET.write_text(page(), encoding="utf-8")
    print(TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
