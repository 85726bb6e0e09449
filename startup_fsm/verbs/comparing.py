"""The verbs that compare: two starts with each other, and the ranks of one. No torch, no structlog."""

from __future__ import annotations

from typing import Annotated

import attrs
from cyclopts import Parameter

from startup_fsm.reading import read_starts
from startup_fsm.reports.output import SCHEMA, emit_json, emit_pages
from startup_fsm.starts import Start
from startup_fsm.verbs.arguments import Json, Path
from startup_fsm.verdict import EXIT_FINDINGS, EXIT_READY
from startup_fsm.verdicts import judge

First = Annotated[
    str, Parameter(name="A", allow_leading_hyphen=True, help="A PATH as of any verb; the last start in it is taken.")
]
Second = Annotated[
    str, Parameter(name="B", allow_leading_hyphen=True, help="The same, of the start to hold against A.")
]


def diff(a: First, b: Second, /, *, json: Json = False) -> int:
    """Hold two starts against each other: what made one worse, then settings, states, bytes and figures that differ."""
    from startup_fsm.diff import difference

    (first, first_of), (second, second_of) = (_last(path) for path in (a, b))
    judged = [judge(start.sources, source=start.source, origin=start.origin) for start in (first, second)]
    found = difference(first.sources, judged[0], second.sources, judged[1])
    earlier = [
        f"earlier starts of {name}: the last of {count} is compared"
        for name, count in (("A", first_of), ("B", second_of))
        if count > 1
    ]
    found = attrs.evolve(found, unseen=(*found.unseen, *earlier, *_unseen("A", first), *_unseen("B", second)))
    if json:
        emit_json({"schema": SCHEMA, "a": _named(first), "b": _named(second), **found.as_data()})
    else:
        from startup_fsm.reports.differences import difference_view

        emit_pages([difference_view(first, second, found)])
    return EXIT_FINDINGS if found.worse == "b" else EXIT_READY


def chain(path: Path, /, *, json: Json = False) -> int:
    """Show what decided how long a start took: the critical chain over its ranks, and who is slower than the others."""
    from startup_fsm.chain import chain as critical_chain

    found = [(start, critical_chain(start.sources)) for start in read_starts(path)]
    if json:
        rows = [
            {**_named(start), "chain": attrs.asdict(each), "unseen": [*each.unseen, *start.unseen]}
            for start, each in found
        ]
        emit_json({"schema": SCHEMA, "starts": rows})
    else:
        from startup_fsm.reports.chains import chain_view

        emit_pages(chain_view(start, each) for start, each in found)
    return EXIT_READY


def _last(path: str) -> tuple[Start, int]:
    """The last start that a path holds, and how many there are."""
    starts = read_starts(path)
    return starts[-1], len(starts)


def _named(start: Start) -> dict[str, object]:
    return {"run": start.run, "attempt": start.attempt, "source": start.source, "origin": start.origin}


def _unseen(name: str, start: Start) -> list[str]:
    return [f"{name}: {each}" for each in start.unseen]
