"""What is on the screen of a start that runs, and the lines where there is none."""

from __future__ import annotations

import io
import os
import unicodedata
from pathlib import Path
from typing import Any

import attrs
import pytest
from rich.console import Console

from startup_fsm.events import (
    EVENT_TYPES,
    CheckJudged,
    DecisionMade,
    Event,
    FigureRead,
    GraphCaptured,
    HookFailed,
    NoteAdded,
    OomObserved,
    Origin,
    PartEntered,
    PeerFailed,
    RanksAgreed,
    Record,
    RecoveryChosen,
    RunFinished,
    RunStarted,
    SignalReceived,
    SnapshotTaken,
    StateEntered,
    StateFailed,
    StateLeft,
    StateStalled,
)
from startup_fsm.findings import Finding
from startup_fsm.fold import fold
from startup_fsm.journal import Journal
from startup_fsm.memory import GIB, MIB, Snapshot
from startup_fsm.reports import live
from startup_fsm.reports.happenings import happenings
from startup_fsm.reports.live import Screen, Ticker
from startup_fsm.reports.news import News, Newsreader
from startup_fsm.reports.progress import Done, Held, amount, done_of, held_of, standpoint
from startup_fsm.reports.screen import clock, screen
from startup_fsm.starts import Process, Start
from startup_fsm.tail import Bar, Sight
from startup_fsm.testing import counting_start

GOLDEN = Path(__file__).parent / "golden"
HOSTILE = "\x1b[31mred\x07\x9b2J\u202edesrever\u200b[bold red]x[/]\r\n\ttab\ud800:smile:\u2028end"

#: Events that are no news to whoever watches: what they hold is in the bars, or nobody waits for it.
QUIET = {
    "snapshot_taken",
    "probe_recorded",
    "pool_opened",
    "pool_released",
    "arena_mapped",
    "graph_captured",
    "hook_ran",
}


def process(
    *events: Event, rank: int = 0, seconds: float = 1.0, alive: bool = True, origin: Origin | None = None
) -> Process:
    """One process with an event every so many seconds."""
    records = tuple(
        Record(
            run="20300101T000000Z-00000000",
            process=f"rank-{rank:05d}",
            rank=rank,
            seq=seq,
            t=int(seq * seconds * 1e9),
            kind=event.kind,
            event=event,
            origin=origin,
        )
        for seq, event in enumerate(events)
    )
    return Process(journal=Journal("j", records), history=fold(records), is_alive=alive)


def sight(*processes: Process, quiet_s: float = 0.0, **more: Any) -> Sight:
    """All of them, as they are seen."""
    start = Start(
        run="20300101T000000Z-00000000",
        attempt=1,
        source="journal",
        origin="runs/20300101T000000Z-00000000",
        is_whole=True,
        processes=processes,
    )
    return Sight(start=start, quiet_s=(quiet_s,) * len(processes), **more)


def shot(used: int, own: int | None = None, total: int = 80 * GIB) -> Snapshot:
    """A reading."""
    return Snapshot(total_bytes=total, free_bytes=total - used, process_bytes=used if own is None else own)


def begun(**facts: Any) -> RunStarted:
    """The first event."""
    given = {"engine": "demo", "engine_version": "1.2", "device": "a card", "plan": {"name": "throwaway"}} | facts
    return RunStarted(**given)


def eight() -> Sight:
    """Eight ranks, each somewhere else."""
    sizes = begun(knobs={"capture_sizes": [1, 2, 4, 8]})
    loading = [
        sizes,
        StateEntered(state="load_weights"),
        SnapshotTaken(state="load_weights", label="enter", snapshot=shot(2 * GIB)),
    ]
    capturing = [
        sizes,
        StateEntered(state="init_device"),
        StateLeft(state="init_device", duration_ns=10**9),
        StateEntered(state="capture_graphs"),
        SnapshotTaken(state="capture_graphs", label="enter", snapshot=shot(60 * GIB, 50 * GIB)),
    ]
    graph = GraphCaptured(state="capture_graphs", size=8, pool="0.1", pool_delta_bytes=GIB, outside_delta_bytes=GIB)
    oom = StateFailed(state="capture_graphs", error_type="E", category="oom", message="CUDA out of memory\nmore")
    grew = Finding(
        code="device.neighbour_grew", severity="warning", state="init_device", message="a neighbour took 1.00 GiB"
    )
    return sight(
        process(*loading, NoteAdded(state="load_weights", note={"progress": {"done": 3, "total": 4, "unit": "shards"}})),
        process(*loading, NoteAdded(state="load_weights", note={"progress": {"done": 40 * GIB, "total": 80 * GIB, "unit": "B"}}), rank=1),
        process(*capturing, graph, rank=2),
        process(*capturing, graph, graph, graph, oom, rank=3),
        process(*capturing, rank=4, alive=False),
        process(sizes, StateEntered(state="init_device"), CheckJudged(check="c", state="init_device", findings=(grew,)), rank=5),
        process(sizes, StateEntered(state="init_device"), StateLeft(state="init_device"), rank=6),
        process(*capturing, StateLeft(state="capture_graphs"), RunFinished(end="ready"), rank=7),
        quiet_s=62.0,
    )  # fmt: skip


def news_of(seen: Sight) -> list[News]:
    """What somebody should know of it."""
    return [each for each in Newsreader().read(seen) if each.severity]


def drawn(
    seen: Sight, news: list[News] | None = None, *, width: int = 80, height: int = 24, is_ascii: bool = False
) -> list[str]:
    """The lines of a screen, without colour."""
    console = Console(width=width, height=height, file=io.StringIO(), highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(
            screen(seen, news_of(seen) if news is None else news, width=width, height=height, is_ascii=is_ascii)
        )
    return [line.rstrip() for line in captured.get().splitlines()]


def golden(name: str, lines: list[str]) -> None:
    """The lines are what the file holds; WRITE_GOLDEN=1 writes it instead."""
    path, text = GOLDEN / f"{name}.txt", "\n".join(lines) + "\n"
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_screen_of_eight_ranks():
    """A row for each rank: state, time in it, shards or captures, memory; below it what somebody should know."""
    golden("screen", drawn(eight()))


def test_wide_screen():
    """A wide terminal has longer bars."""
    golden("screen_wide", drawn(eight(), width=130))


def test_ascii_screen():
    """A terminal that has only ASCII gets bars of ASCII."""
    # Where rich cuts a line it has a sign of its own.
    assert all(line.replace("…", "").isascii() for line in drawn(eight(), is_ascii=True))


@pytest.mark.parametrize("height", [3, 8, 12, 24, 60])
@pytest.mark.parametrize("width", [20, 60, 80, 200])
@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_screen_fits(ranks: int, width: int, height: int):
    """However many ranks: no line is wider than the terminal, and no more rows of them than it has room for."""
    seen = eight()
    all_of_them = [each for _ in range(ranks // 8 + 1) for each in seen.start.processes][:ranks]
    wide = sight(*all_of_them, quiet_s=5.0)
    lines = drawn(
        wide, [News(at_s=1.0, label="rank 0", severity="error", text="x" * 300)] * 80, width=width, height=height
    )

    assert max(map(len, lines)) <= width
    if height >= 12:
        assert len(lines) <= height


def test_hidden_ranks_are_counted():
    """Where there is no room for all ranks, those that failed or are behind are shown, and the others summed up."""
    base = eight().start.processes
    many = sight(*[base[7]] * 30, base[3], *[base[2]] * 30)
    lines = drawn(many, [], height=16)

    assert any("failed in capture_graphs" in line for line in lines)
    (hidden,) = [line for line in lines if line.startswith("and ")]
    assert hidden == "and 57 more: 30 ready, 27 in capture_graphs"


def test_missing_ranks_are_said():
    """Ranks that the launcher has announced and that have no journal yet are told."""
    lines = drawn(attrs.evolve(eight(), missing=3))

    assert "and 3 announced by the launcher without a journal so far" in lines


def test_what_ranks_say_alike():
    """The same line of many ranks stands once, with how many they are."""
    news = [News(at_s=1.0, label=f"rank {rank}", severity="note", text="the same") for rank in range(8)]
    lines = [line for line in drawn(eight(), news) if "the same" in line]

    assert lines == ["   1.00 s  rank 0 and 7 more  note  the same"]


def test_nothing_hostile_reaches_the_terminal():
    """Labels, states, engines, findings and errors are cleaned."""
    bad = process(
        begun(engine=HOSTILE, engine_version=HOSTILE, device=HOSTILE, plan={"name": HOSTILE}, label=HOSTILE),
        StateEntered(state=HOSTILE),
        PartEntered(state=HOSTILE, part=HOSTILE),
        NoteAdded(note={"progress": {"done": 1, "total": 2, "unit": HOSTILE}}),
        StateFailed(state=HOSTILE, error_type=HOSTILE, category=HOSTILE, message=HOSTILE),
    )
    written: list[str] = []
    ticker = Ticker(written.append, HOSTILE)
    ticker.show(lambda: None, changed=True)
    ticker.show(lambda: attrs.evolve(sight(bad), start=attrs.evolve(sight(bad).start, origin=HOSTILE)), changed=True)
    for text in ("\n".join(drawn(sight(bad), width=300)), "".join(written)):
        assert "\\x1b[31mred" in text
        assert not {
            each for each in text if each != "\n" and unicodedata.category(each) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        }


def test_lines_without_a_terminal():
    """One line per change: time, rank, what happened; each tenth of a progress once."""
    written: list[str] = []
    ticker = Ticker(written.append, "runs")
    ticker.show(lambda: None, changed=False)
    ticker.show(lambda: None, changed=True)
    assert written == ["waiting for runs\n"]
    graph = GraphCaptured(state="capture_graphs", size=8, pool="0.1")
    events = [begun(knobs={"capture_sizes": [1, 2, 4, 8]}), StateEntered(state="capture_graphs"), graph, graph]
    for count in (1, 2, 3, 3, 4):
        ticker.show(lambda count=count: sight(process(*events[:count])), changed=True)
    failed = StateFailed(state="capture_graphs", error_type="E", category="oom", message="out of memory")
    ticker.show(lambda: sight(process(*events, failed, alive=False)), changed=True)
    ticker.show(lambda: sight(process(*events, failed, alive=False)), changed=True)

    assert written[1:] == [
        "     0 ns  rank 0  demo 1.2 begins on a card, plan throwaway\n",
        "   1.00 s  rank 0  enters capture_graphs\n",
        "   2.00 s  rank 0  capture_graphs: 1/4 graphs\n",
        "   3.00 s  rank 0  capture_graphs: 2/4 graphs\n",
        "   4.00 s  rank 0  error  capture_graphs failed (oom): out of memory\n",
        "        -  rank 0  error  gone in capture_graphs: nobody writes its journal any more\n",
    ]


def test_lines_are_on_one_clock():
    """Times of several ranks count from the first of them."""
    first = process(begun(wall_ns=5_000_000_000), StateEntered(state="load_weights"))
    second = process(begun(wall_ns=7_500_000_000), StateEntered(state="load_weights"), rank=1)

    assert [(each.label, each.at_s) for each in Newsreader().read(sight(second, first))] == [
        ("rank 0", 0.0),
        ("rank 0", 1.0),
        ("rank 1", 2.5),
        ("rank 1", 3.5),
    ]


def test_journal_that_begins_again_is_news():
    """Another journal under the same name is told from its beginning; one that only grew is not told twice."""
    reader = Newsreader()
    events = [begun(), StateEntered(state="init_device"), StateLeft(state="init_device")]
    assert len(reader.read(sight(process(*events[:2])))) == 2
    assert [each.text for each in reader.read(sight(process(*events)))] == ["leaves init_device"]
    again = [begun(engine="other"), StateEntered(state="load_weights")]

    assert [each.text for each in reader.read(sight(process(*again)))] == [
        "other 1.2 begins on a card, plan throwaway",
        "enters load_weights",
    ]


def test_log_that_is_read_anew_says_nothing_twice():
    """What a log tells differently when more of it is there is told, and nothing else."""
    reader, origin = Newsreader(), Origin(source="vllm", line=1)
    events = [begun(source="vllm"), StateEntered(state="init_device"), FigureRead(figure="weights_bytes", value=GIB)]
    assert len(reader.read(sight(process(*events, origin=origin)))) == 3
    moved = [events[0], StateEntered(state="load_weights"), *events[1:]]

    assert [each.text for each in reader.read(sight(process(*moved, origin=origin)))] == ["enters load_weights"]


@pytest.mark.parametrize("kind", sorted(EVENT_TYPES))
def test_every_kind_is_news_or_known_to_be_none(kind: str):
    """A kind of event that is added has a line, or is named here as one that has none."""
    samples: dict[str, Event] = {
        "check_judged": CheckJudged(
            check="c", state="s", findings=(Finding(code="a.b", severity="note", message="m"),)
        ),
        "note_added": NoteAdded(note={"survived": "E: m"}),
        "peer_failed": PeerFailed(peer="rank 3", state="verify", reason="r"),
        "signal_received": SignalReceived(signal="SIGTERM"),
        "snapshot_taken": SnapshotTaken(state=None, label="F0", snapshot=shot(GIB)),
    }
    event = samples.get(kind) or _made(EVENT_TYPES[kind])
    record = Record(run="r", process="p", seq=0, kind=kind, event=event)

    assert bool(list(happenings(record))) == (kind not in QUIET)


def _made(kind: Any) -> Event:
    """An event with something in each field that has no default."""
    values = {str: "x", "str": "x", int: 1, "int": 1, int | float: 1, "int | float": 1}
    fields = attrs.fields(kind)
    return kind(**{field.name: values[field.type] for field in fields if field.default is attrs.NOTHING})


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (RanksAgreed(topic="blocks", agreed=7, decided_by="rank 3"), "ranks agree on blocks: 7, decided by rank 3"),
        (RecoveryChosen(state="allocate_kv", edge="shrink", target="teardown", reason="oom: m", taken=1, bound=2), "goes on to teardown by shrink, 1 of 2: oom: m"),
        (OomObserved(state="verify", tried_bytes=GIB, free_bytes=MIB), "out of memory: 1.00 GiB were asked for, 1.00 MiB were free"),
        (StateStalled(state="verify", deadline_ns=5 * 10**9, stack=("a:1 f", "b:2 g: wait()")), "verify passed its deadline of 5.00 s at: b:2 g: wait()"),
        (HookFailed(hook="lease", moment="on_event", policy="warn", error="E: gone"), "hook lease failed at on_event: E: gone"),
        (DecisionMade(decision="without_graphs", reason="asked for"), "without_graphs: asked for"),
        (RunFinished(end="failed", reason="E in verify\nmore"), "failed: E in verify"),
    ],
)  # fmt: skip
def test_lines_of_events(event: Event, line: str):
    """What a line says."""
    (said,) = happenings(Record(run="r", process="p", seq=0, kind=event.kind, event=event))

    assert said.text == line


def test_captures_are_counted():
    """Captures are counted against the sizes of the engine, the sample, or what the engine notes of them."""
    graph = GraphCaptured(state="capture_throwaway", size=8, pool="0.1")
    entered = StateEntered(state="capture_throwaway")
    sampled = begun(knobs={"capture_sizes": [1, 2, 4, 8], "graph_sample": 2})
    noted = NoteAdded(note={"progress": {"done": 1, "total": 3, "unit": "graphs"}})

    assert done_of(process(begun(), entered, graph).history) == Done(done=1, total=None, unit="graphs")
    assert done_of(process(sampled, entered, graph).history) == Done(done=1, total=2, unit="graphs")
    assert done_of(process(sampled, entered, graph, noted, graph).history) == Done(done=2, total=3, unit="graphs")
    assert done_of(process(sampled, entered, *[graph] * 3).history) == Done(done=3, total=None, unit="graphs")


@pytest.mark.parametrize("note", [{"done": "1"}, {"done": -1}, {"done": True}, "half", {}, None])
def test_notes_that_are_no_progress(note: Any):
    """A note of that name that holds something else is none."""
    history = process(begun(), StateEntered(state="load_weights"), NoteAdded(note={"progress": note})).history

    assert done_of(history) is None


def test_bars_of_a_log():
    """A bar that a log ends with counts for the state that it speaks of, and for no other."""
    shards, graphs = Bar("Loading safetensors checkpoint shards", 3, 4), Bar("Capturing CUDA graphs", 22, 51)
    loading = process(begun(source="vllm"), StateEntered(state="load_weights")).history
    capturing = process(begun(source="vllm"), StateEntered(state="capture_graphs")).history

    assert done_of(loading, shards) == Done(done=3, total=4, unit="shards")
    assert done_of(loading, graphs) is None
    assert done_of(capturing, graphs) == Done(done=22, total=51, unit="graphs")
    assert done_of(capturing, shards) == Done(done=0, total=None, unit="graphs")


def test_memory_moves_with_captures():
    """What captures have added since the last reading counts, other processes apart."""
    graph = GraphCaptured(state="capture_graphs", size=8, pool="0.1", pool_delta_bytes=MIB, outside_delta_bytes=MIB)
    read = SnapshotTaken(state="capture_graphs", label="enter", snapshot=shot(60 * GIB, 50 * GIB))
    history = process(begun(), StateEntered(state="capture_graphs"), read, graph, graph).history

    assert held_of(history) == Held(own=50 * GIB + 4 * MIB, other=10 * GIB, total=80 * GIB)
    assert held_of(process(begun()).history) is None


def test_memory_of_a_log():
    """Of a log, what it has printed so far."""
    figures = [
        FigureRead(figure=name, value=size) for name, size in (("weights_bytes", GIB), ("total_bytes", 80 * GIB))
    ]
    history = process(begun(source="vllm"), StateEntered(state="load_weights"), *figures).history

    assert held_of(history) == Held(own=GIB, other=0, total=80 * GIB)


def test_time_in_a_state_goes_on():
    """How long a state has been open counts to this moment, not to its last event."""
    point = standpoint(process(begun(), StateEntered(state="load_weights"), NoteAdded()), quiet_s=30.0)

    assert (point.standing, point.since_ns) == ("open", 31_000_000_000)


@pytest.mark.parametrize(
    ("ns", "text"), [(0, "0 s"), (59.4e9, "59 s"), (61e9, "1:01"), (3_599e9, "59:59"), (3_661e9, "1:01:01")]
)
def test_clock(ns: float, text: str):
    """Whole seconds, then minutes, then hours."""
    assert clock(ns) == text


@pytest.mark.parametrize(
    ("done", "text"),
    [
        (Done(done=3, total=4, unit="shards"), "3/4 shards"),
        (Done(done=3, total=None, unit="graphs"), "3 graphs"),
        (Done(done=GIB, total=4 * GIB, unit="B"), "25% of 4.00 GiB"),
        (Done(done=GIB, total=None, unit="B"), "1.00 GiB"),
        (Done(done=0, total=0, unit="B"), "0 B"),
    ],
)
def test_amounts(done: Done, text: str):
    """Counts as they are, bytes as a share."""
    assert amount(done) == text


def test_screen_is_drawn_when_it_is_time(monkeypatch: pytest.MonkeyPatch):
    """A change is drawn within a quarter of a second, nothing more often; without one, once a second."""
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    shown = Screen(Console(file=io.StringIO(), force_terminal=True, width=80, height=24), "runs")
    looked: list[float] = []

    def look() -> Sight:
        looked.append(now[0])
        return eight()

    with shown:
        for tick in range(40):
            now[0] = 100 + tick / 10
            shown.show(look, changed=tick in (11, 12, 13))

    assert [round(each - 100, 1) for each in looked] == [0.0, 1.0, 1.3, 2.3, 3.3]


def test_whole_start_is_told():
    """A start from its beginning to ready: each state is entered and left, and what it ends with is the last line."""
    boot, engine = counting_start(progress=False)
    seen: list[Record] = []
    boot.recorder.listeners.append(seen.append)
    boot.run(engine)
    written: list[str] = []
    done = Process(journal=Journal("j", tuple(seen)), history=boot.history, is_alive=False)
    Ticker(written.append, "runs").show(lambda: sight(done), changed=True)
    states = [visit.state for visit in boot.history.visits]

    assert [line.split()[-1] for line in written if " enters " in line] == states
    assert sum(" leaves " in line for line in written) == len(states)
    assert " ready after " in written[-1] or " graphs" in written[-1]
