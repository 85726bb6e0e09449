"""
The screen of a start that runs: a row for each rank with its state, shards and captures, memory; below it the news.

Pure: what is seen becomes what rich draws. All that a journal or a log says is cleaned here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import attrs
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from startup_fsm.memory import GIB, MIB, format_bytes
from startup_fsm.reports.news import News
from startup_fsm.reports.progress import Done, Held, Standpoint, amount, standpoint
from startup_fsm.reports.terminal import clean, duration, plain, severity
from startup_fsm.starts import Process
from startup_fsm.states import position
from startup_fsm.tail import Sight

#: Lines of the screen that are no rank, and those that the news have at least.
_AROUND: Final = 7
_NEWS: Final = 4
#: Columns from which bars are long, and the cells of a bar.
_WIDE: Final = 110
_CELLS: Final = (6, 20)

#: Blocks of bars: own, others, free; done, to do. The second are for a terminal that has only ASCII.
_BLOCKS: Final = ("█▒░", "━─")
_ASCII: Final = ("#+.", "=-")


def screen(sight: Sight, news: Sequence[News], *, width: int, height: int, is_ascii: bool = False) -> RenderableType:
    """
    What is on a screen of so many columns and lines.

    Args:
        sight: The start.
        news: What somebody should know, oldest first.
        width: Columns of the terminal.
        height: Lines of the terminal.
        is_ascii: Whether it has no other letters.
    """
    processes = sight.start.processes
    points = [
        standpoint(process, quiet_s=quiet, bar=sight.bar)
        for process, quiet in zip(processes, sight.quiet_s, strict=True)
    ]
    shown, hidden = _chosen(points, max(1, height - _AROUND - _NEWS))
    parts: list[RenderableType] = [*_head(sight), Text(), _ranks(shown, width, is_ascii=is_ascii)]
    if hidden:
        parts.append(plain(f"and {len(hidden)} more: {_summed(hidden)}", "dim"))
    if sight.missing:
        parts.append(plain(f"and {sight.missing} announced by the launcher without a journal so far", "yellow"))
    parts += [*_so_far(processes, width), Text()]
    room = max(1, height - _AROUND - len(shown))
    parts += [_cropped(news_line(each)) for each in _merged(news)[-room:]] or [plain("nothing to tell so far", "dim")]
    return Group(*parts)


def _merged(news: Sequence[News]) -> list[News]:
    """What several processes say alike once, with how many they are."""
    labels: dict[tuple[str, str], list[str]] = {}
    for each in news:
        labels.setdefault((each.severity, each.text), []).append(each.label)
    merged = []
    for each in news:
        whose = labels.pop((each.severity, each.text), None)
        if whose:
            others = len(set(whose)) - 1
            merged.append(attrs.evolve(each, label=f"{each.label} and {others} more") if others else each)
    return merged


def _head(sight: Sight) -> Iterator[Text]:
    start = sight.start
    started = next((each.history.started for each in start.processes if each.history.started is not None), None)
    yield _cropped(plain(f"run {start.run or 'unknown'}, attempt {start.attempt}  ({start.origin})", "bold"))
    if started is None:
        yield plain("its beginning is lost", "dim")
        return
    plan = started.plan.get("name") if started.source == "journal" else None
    words = [f"{started.engine or 'unknown engine'} {started.engine_version or ''}".rstrip()]
    words += [f"on {started.device}"] if started.device else []
    words += [f"plan {plan}"] if plan else []
    words += [f"{len(start.processes)} processes"] if len(start.processes) > 1 else []
    yield _cropped(plain(", ".join(words), "dim"))


def _chosen(points: Sequence[Standpoint], most: int) -> tuple[list[Standpoint], list[Standpoint]]:
    """Those that there is room for: who failed and who is behind first; in the order of ranks."""
    if len(points) <= most:
        return list(points), []
    order = {"failed": 0, "ended": 0, "gone": 0, "ready": 2}
    urgent = sorted(
        range(len(points)), key=lambda at: (order.get(points[at].standing, 1), position(points[at].state), at)
    )
    kept = set(urgent[: max(1, most - 1)])
    return [points[at] for at in sorted(kept)], [point for at, point in enumerate(points) if at not in kept]


def _summed(points: Sequence[Standpoint]) -> str:
    counted = Counter("ready" if each.standing == "ready" else f"in {each.state or 'no state'}" for each in points)
    return ", ".join(f"{count} {what}" for what, count in counted.most_common(4))


def _ranks(points: Sequence[Standpoint], width: int, *, is_ascii: bool) -> Table:
    labels = [clean(point.label, 20) for point in points]
    clocks = ["" if point.since_ns is None else clock(point.since_ns) for point in points]
    # Where there is no room, the name of a state is cut, not who is in it.
    least = (min(12, max(map(len, labels))), 0, max(map(len, clocks)), 0, 0, 0)
    table = Table.grid(padding=(0, 1, 0, 0))
    for each in least:
        table.add_column(no_wrap=True, overflow="ellipsis", min_width=each)
    cells = _CELLS[width >= _WIDE]
    (own, other, free), (done, rest) = _ASCII if is_ascii else _BLOCKS
    for label, since, point in zip(labels, clocks, points, strict=True):
        memory = _bar(_parts(point.held), cells, ((own, "cyan"), (other, "magenta"), (free, "dim")))
        table.add_row(
            plain(label),
            _state(point),
            plain(since, "dim"),
            _bar(_shares(point.done), cells, ((done, "green"), (rest, "dim"))),
            plain("" if point.done is None else _counted(point.done)),
            memory.append_text(plain("" if point.held is None else f" {_pair(point.held)}")),
        )
    return table


def _state(point: Standpoint) -> Text:
    state = point.state or "no state"
    if point.standing == "ready":
        return Text("ready", "bold green")
    if point.standing in ("failed", "ended", "gone"):
        word = "gone" if point.standing == "gone" else "failed"
        return plain(f"{word} in {state}" if point.state else word, "bold red")
    if point.standing == "between":
        return plain(f"after {state}", "dim")
    return plain(f"{state}, {point.part}" if point.part else state, "" if point.standing == "open" else "dim")


def _shares(done: Done | None) -> tuple[float, float] | None:
    if done is None or not done.total:
        return None
    share = min(1.0, done.done / done.total)
    return share, 1 - share


def _parts(held: Held | None) -> tuple[float, float, float] | None:
    if held is None or not held.total:
        return None
    own = min(1.0, held.own / held.total)
    other = min(1 - own, held.other / held.total)
    return own, other, 1 - own - other


def _bar(shares: Sequence[float] | None, cells: int, blocks: Sequence[tuple[str, str]]) -> Text:
    """Parts of a whole as cells; a part that is not 0 has one at least, what is left has the rest."""
    bar = Text()
    if shares is None:
        return bar
    left = cells
    for share, (block, style) in zip(shares[:-1], blocks[:-1], strict=True):
        width = min(left, max(round(share * cells), 1 if share > 0 else 0))
        bar.append(block * width, style)
        left -= width
    return bar.append(blocks[-1][0] * left, blocks[-1][1])


def _counted(done: Done) -> str:
    """As short as it can be: there is little room for it."""
    return _of(done.done, done.total) if done.unit == "B" and done.total else amount(done)


def _pair(held: Held) -> str:
    return f"{format_bytes(held.own)} printed" if held.total is None else _of(held.own, held.total)


def _of(part: int, whole: int) -> str:
    unit, name = (GIB, "GiB") if whole >= GIB else (MIB, "MiB")
    return f"{part / unit:.1f}/{whole / unit:.1f} {name}"


def _so_far(processes: Sequence[Process], width: int) -> Iterator[Text]:
    """What the process has behind it that has the most before it; the latest of it, where there is no room."""
    slowest = min(processes, key=lambda each: (each.history.finished is not None, position(each.history.state)))
    line = f"so far ({clean(slowest.label, 20)}):"
    states = [
        f" {clean(visit.state, 40)} {duration(visit.duration_ns)},"
        for visit in slowest.history.visits
        if visit.duration_ns is not None
    ]
    room = width - len(line) - 4
    while states and sum(map(len, states)) > room:
        del states[0]
    if states:
        yield _cropped(plain(line + "".join(states).rstrip(","), "dim"))


def clock(ns: float) -> str:
    """Time that passes, in whole seconds: what is looked at must not flicker."""
    seconds = ns / 1e9
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _cropped(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def news_line(news: News) -> Text:
    """Time, process, severity and what happened."""
    at = "-" if news.at_s is None else duration(round(news.at_s * 1e9))
    line = plain(f"{at:>9}  {clean(news.label)}  ", "dim")
    if news.severity:
        line.append_text(severity(news.severity)).append("  ")
    return line.append_text(plain(news.text))
