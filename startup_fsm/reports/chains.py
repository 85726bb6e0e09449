"""The critical chain of a start for people: what everybody waited for, and who is slower than the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from startup_fsm.chain import Chain, Meeting, Step, Straggler
from startup_fsm.reports.terminal import columns, duration, heading, indented, plain, points, share
from startup_fsm.reports.text import unseen_view
from startup_fsm.reports.views import ROWS, start_line
from startup_fsm.starts import Start

#: Time outside every state is a row of its own where it is at least this part of the chain.
_SMALL: Final = 100

_CLOCKS: Final = {
    "one": "of one process",
    "wall": "over {} processes, by their wall clocks",
    "log": "over {} processes, by the times of one log",
    "unknown": "of the longest of {} processes; their clocks cannot be related",
}


def chain_view(start: Start, chain: Chain) -> Iterator[RenderableType]:
    """The straggler first, then the chain step by step, then where ranks waited for each other."""
    yield start_line(start)
    if chain.stragglers:
        yield heading("Stragglers: own work, waiting left out")
        yield indented(points(map(_straggler, chain.stragglers[:ROWS])))
        yield from _rest(len(chain.stragglers))
    yield from _steps(chain)
    waited = [each for each in chain.meetings if each.longest_ns]
    if waited:
        yield heading("Where ranks waited for each other")
        yield indented(_meetings(sorted(waited, key=lambda each: -each.longest_ns)[:ROWS]))
        yield from _rest(len(waited))
    yield from unseen_view([*chain.unseen, *start.unseen])


def _straggler(each: Straggler) -> Text:
    where = _state(each.state, each.visit)
    over, middle = duration(each.over_ns), duration(each.median_ns)
    return plain(f"{each.process}: {where} took {duration(each.took_ns)}, {over} more than the median of {middle}")


def _steps(chain: Chain) -> Iterator[RenderableType]:
    yield heading(f"The chain {_CLOCKS[chain.clock].format(chain.processes)}: {duration(chain.total_ns)}")
    several = chain.processes > 1
    numbers = ("began", "took", "share")
    table = columns(*(["process"] if several else []), "state", *numbers, "what took most of it", numbers=numbers)
    small = [step for step in chain.steps if step.state is None and _is_small(step, chain.total_ns)]
    for step in chain.steps:
        if step in small:
            continue
        cells = [plain(step.process)] if several else []
        table.add_row(*cells, *_cells(step, chain.total_ns))
    yield indented(table)
    if small:
        outside = duration(sum(step.took_ns or 0 for step in small))
        yield indented(plain(f"and {outside} outside every state, in {len(small)} pieces", "dim"))


def _is_small(step: Step, total: int | None) -> bool:
    return step.took_ns is not None and total is not None and step.took_ns * _SMALL < total


def _cells(step: Step, total: int | None) -> Iterator[Text]:
    if step.state is None:
        yield plain("outside every state", "dim")
    else:
        state = plain(_state(step.state, step.visit))
        if step.ended != "left":
            state.append_text(plain(f" {step.ended}", "red"))
        yield state
    yield plain("-" if step.began_ns is None else duration(step.began_ns))
    yield plain("-" if step.took_ns is None else duration(step.took_ns))
    yield plain("-" if step.took_ns is None or total is None else share(step.took_ns, total))
    said = [] if step.waited_for is None else [f"begins as {step.waited_for} comes"]
    if step.what is not None and step.what_ns is not None:
        said.append(step.what if step.what.startswith("its body") else f"{step.what}, {duration(step.what_ns)}")
    yield plain("; ".join(said))


def _meetings(meetings: Sequence[Meeting]) -> RenderableType:
    table = columns("state", "waited for", "longest wait", "of", numbers=("longest wait",))
    for each in meetings:
        longest = max(each.waited_ns, key=lambda label: each.waited_ns[label])
        row = plain(_state(each.state, each.visit)), plain(each.last), plain(duration(each.longest_ns)), plain(longest)
        table.add_row(*row)
    return table


def _state(state: str, visit: int) -> str:
    return state if visit == 1 else f"{state} (visit {visit})"


def _rest(count: int) -> Iterator[RenderableType]:
    if count > ROWS:
        yield indented(plain(f"and {count - ROWS} more; --json has all", "dim"))
