"""The pages that compare, ``diff`` and ``chain``, and bars of memory: golden text, exit codes, hostile journals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import orjson
import pytest
from rich.console import Console

from startup_fsm.chain import chain
from startup_fsm.cli import main
from startup_fsm.diff import difference
from startup_fsm.events import Event, RanksAgreed, RunFinished, RunStarted
from startup_fsm.memory import GIB, MIB, Account
from startup_fsm.reading import read_starts
from startup_fsm.reports.bars import Bar, Piece, bars
from startup_fsm.reports.chains import chain_view
from startup_fsm.reports.costs import MemoryEdge
from startup_fsm.reports.differences import difference_view
from startup_fsm.reports.terminal import page
from startup_fsm.starts import Start
from startup_fsm.testing import counting_start
from startup_fsm.verdicts import judge
from tests.reports.test_text import assert_harmless, failed_start, golden, hostile_data, lines, shown, snapshot, state

ROOT = Path(__file__).parents[2]
STARTED = ROOT / "tests" / "logs" / "started"
FORBIDDEN = {"asyncio", "pynvml", "structlog", "torch", "transitions"}

_LOADED = """
import sys
from startup_fsm.cli import main
main(sys.argv[1:])
print(*{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
"""


def set_as(events: Sequence[tuple[int, Event]], **started: Any) -> list[tuple[int, Event]]:
    """The same start with something else in its first event."""
    (after, first), *others = events
    assert isinstance(first, RunStarted)
    return [(after, attrs.evolve(first, **started)), *others]


def good_start() -> list[tuple[int, Event]]:
    """The start that fails in ``verify``, but for its end: it is ready."""
    events = failed_start()
    at = next(place for place, (_, event) in enumerate(events) if getattr(event, "state", "") == "verify")
    with_kv = snapshot(default=1040, kv=6000)
    return [
        *events[:at],
        *state("verify", with_kv, with_kv, ms=40, source="allocate_kv"),
        (1, RunFinished(end="ready")),
    ]


def written(directory: Path, name: str, *ranks: Sequence[tuple[int, Event]]) -> Path:
    """A run directory with a journal for each rank."""
    run = directory / name
    run.mkdir(parents=True)
    for rank, events in enumerate(ranks):
        process = f"rank-{rank:05d}"
        (run / f"{process}.1.jsonl").write_bytes(b"".join(lines(events, process=process, rank=rank)))
    return run


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Start, Start]:
    """A start that is ready and one that is not, read from directories of the same names everywhere."""
    monkeypatch.chdir(tmp_path)
    knobs = {"gpu_memory_utilization": 0.8, "max_num_seqs": 64, "capture_sizes": list(range(1, 9))}
    written(Path("runs"), "good", set_as(good_start(), knobs=knobs, versions={"torch": "2.11.0"}))
    knobs |= {"gpu_memory_utilization": 0.9, "max_num_seqs": 256}
    written(Path("runs"), "bad", set_as(failed_start(), knobs=knobs, versions={"torch": "2.12.0"}))
    return read_starts("runs/good")[0], read_starts("runs/bad")[0]


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text logs in the working directory."""
    for path in STARTED.glob("*.log"):
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Four ranks: the third is slow in loading, and the others wait for it where the KV cache is sized."""
    monkeypatch.chdir(tmp_path)
    empty, loaded = snapshot(default=0), snapshot(default=1024)

    def went(rank: int) -> list[tuple[int, Event]]:
        slow = rank == 2
        sized = state("size_kv", loaded, loaded, ms=3 if slow else 9_003, source="load_weights")
        sized.insert(2, (0, RanksAgreed(topic="blocks", agreed=6000, decided_by="rank 2")))
        return [
            (0, RunStarted(wall_ns=1_000_000_000 + rank * 1_000_000, host="host", pid=rank)),
            *state("load_weights", empty, loaded, ms=15_000 if slow else 6_000 + rank, edge=None),
            *sized,
            *state("verify", loaded, loaded, ms=2_000, source="size_kv"),
            (1, RunFinished(end="ready")),
        ]

    written(Path("runs"), "four", *map(went, range(4)))
    return read_starts("runs/four")[0]


def told(a: Start, b: Start) -> Any:
    """What differs between two starts."""
    verdicts = [judge(each.sources, source=each.source, origin=each.origin) for each in (a, b)]
    return difference(a.sources, verdicts[0], b.sources, verdicts[1])


def test_diff_of_journals(both: tuple[Start, Start]):
    """What made it worse first; then settings, versions, states, bytes, figures, and what is not seen."""
    golden("diff", shown(difference_view(*both, told(*both))))


def test_diff_of_logs(logs: None, capsys: pytest.CaptureFixture[str]):
    """Two text logs: the same page, which says that there are no snapshots."""
    assert main(["diff", "ready.log", "capture_at_0996.log"]) == 2
    golden("diff_logs", capsys.readouterr().out)


def test_diff_of_the_same(both: tuple[Start, Start]):
    """Nothing differs, and the page is short."""
    golden("diff_same", shown(difference_view(both[0], both[0], told(both[0], both[0]))))


def test_chain_of_one(both: tuple[Start, Start]):
    """One process: its states, and what took most of each."""
    golden("chain", shown(chain_view(both[1], chain(both[1].sources))))


def test_chain_of_ranks(ranks: Start):
    """The straggler first, the way through it, and who waited for it how long."""
    golden("chain_ranks", shown(chain_view(ranks, chain(ranks.sources))))


@pytest.mark.parametrize("width", [40, 80, 100])
def test_no_line_is_wider_than_asked(both: tuple[Start, Start], ranks: Start, width: int):
    """Whatever is on these pages fits its width."""
    pages = [
        difference_view(*both, told(*both)),
        chain_view(both[1], chain(both[1].sources)),
        chain_view(ranks, chain(ranks.sources)),
    ]
    text = "".join(page(content, width=width) for content in pages)

    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize(
    ("a", "b", "code"),
    [
        ("ready.log", "capture_at_0996.log", 2),
        ("capture_at_0996.log", "ready.log", 0),
        ("ready.log", "ready.log", 0),
        ("ready.log", "missing.log", 4),
    ],
)
def test_exit_codes(logs: None, a: str, b: str, code: int, capsys: pytest.CaptureFixture[str]):
    """2 where B is worse, 0 where it is not, 4 where one of them cannot be read."""
    assert main(["diff", a, b]) == code
    captured = capsys.readouterr()
    assert (captured.err == "") == (code != 4)


def test_diff_as_json(logs: None, capsys: pytest.CaptureFixture[str]):
    """Everything is data: both starts by name, the cause, and what differs."""
    main(["diff", "ready_v1.log", "sampler_at_0996_v1.log", "--json"])
    data = json.loads(capsys.readouterr().out)

    assert (data["schema"], data["worse"], data["finding"]["code"]) == (1, "b", "verify.out_of_memory")
    assert data["a"]["origin"] == "ready_v1.log:1-51"
    assert data["ties"][0]["name"] == "gpu_memory_utilization"
    assert data["settings"] == [{"name": "gpu_memory_utilization", "a": 0.9, "b": 0.996}]
    assert {each["name"] for each in data["figures"]} >= {"kv_available_bytes", "kv_tokens"}


def test_chain_as_json(ranks: Start, capsys: pytest.CaptureFixture[str]):
    """The chain, meetings and stragglers of each start are data."""
    assert main(["chain", "runs/four", "--json"]) == 0
    (start,) = json.loads(capsys.readouterr().out)["starts"]
    found = start["chain"]

    assert (found["clock"], found["processes"]) == ("wall", 4)
    assert [(each["process"], each["state"]) for each in found["stragglers"]] == [("rank 2", "load_weights")]
    assert next(each for each in found["meetings"] if each["state"] == "size_kv")["last"] == "rank 2"
    assert [each["process"] for each in found["steps"] if each["state"] == "load_weights"] == ["rank 2"]


def test_the_last_start_is_compared(logs: None, capsys: pytest.CaptureFixture[str]):
    """Of several starts in one file the last is taken, and that is said."""
    both = Path("ready.log").read_bytes() + Path("capture_at_0996.log").read_bytes()
    Path("both.log").write_bytes(both)
    assert main(["diff", "ready.log", "both.log", "--json"]) == 2
    data = json.loads(capsys.readouterr().out)

    assert data["finding"]["code"] == "graphs.not_reserved"
    assert "earlier starts of B: the last of 2 is compared" in data["unseen"]


def loaded(*arguments: str) -> set[str]:
    """Top-level modules that a verb has loaded when it is done."""
    command = [sys.executable, "-c", _LOADED, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return set(ran.stderr.split())


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_light_reading(tmp_path: Path, options: tuple[str, ...]):
    """Neither verb loads what only a start needs."""
    good, bad = written(tmp_path, "good", good_start()), written(tmp_path, "bad", failed_start())

    assert loaded("diff", str(good), str(bad), *options) & FORBIDDEN == set()
    assert loaded("chain", str(bad), *options) & FORBIDDEN == set()


def hostile_journal(directory: Path) -> Path:
    """A journal with hostile text in every field that takes any."""
    boot, engine = counting_start(journal=directory / "runs")
    boot.run(engine)
    assert boot.path is not None
    path = directory / "hostile"
    data = [hostile_data(orjson.loads(line)) for line in boot.path.read_bytes().splitlines()]
    path.write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in data))
    return path


@pytest.mark.parametrize(
    "words", [("diff", "good", "hostile"), ("diff", "hostile", "good"), ("chain", "hostile"), ("blame", "hostile")]
)
def test_hostile_journal(words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Hostile text in every field of a journal comes through as text."""
    paths = {"hostile": hostile_journal(tmp_path), "good": written(tmp_path, "good", good_start())}
    main([str(paths.get(word, word)) for word in words])
    captured = capsys.readouterr()

    assert_harmless(captured.out)
    assert "\x1b" not in captured.err


def test_paths_that_begin_with_a_dash(capsys: pytest.CaptureFixture[str]):
    """A mistyped option is no path."""
    assert main(["diff", "-a", "-b"]) in (1, 4)
    assert capsys.readouterr().err.startswith("error: ")


# Bars of memory.


def piece(letter: str, size: int) -> Piece:
    """Some bytes in MiB."""
    return Piece(letter=letter, style="", bytes=size * MIB)


def drawn(own: Sequence[Piece], foreign: Sequence[Piece] = (), *, requested: int | None = 800, width: int = 22) -> str:
    """A bar of a device of 1,000 MiB in twenty cells."""
    bar = Bar(
        own=tuple(own),
        foreign=tuple(foreign),
        total_bytes=1000 * MIB,
        requested_bytes=None if requested is None else requested * MIB,
    )
    return bar.text(width).plain


@pytest.mark.parametrize(
    ("own", "foreign", "text"),
    [
        ([], [], "................|....]"),
        ([("o", 100), ("D", 400)], [], "ooDDDDDDDD......|....]"),
        ([("D", 800)], [], "DDDDDDDDDDDDDDDD|....]"),
        ([("D", 900)], [], "DDDDDDDDDDDDDDDD|DD..]"),
        ([("D", 100)], [("x", 300)], "DD............xx|xxxx]"),
        ([("D", 20), ("K", 20), ("G", 20)], [], "K...............|....]"),
        ([("D", -50), ("K", 100)], [], "KK..............|....]"),
        ([("D", 5000)], [("x", 5000)], "xxxxxxxxxxxxxxxx|xxxx]"),
    ],
)
def test_bar(own: Sequence[tuple[str, int]], foreign: Sequence[tuple[str, int]], text: str):
    """Ours from the left, others from the right, the request as a mark between cells, the device as the end."""
    assert drawn([piece(*each) for each in own], [piece(*each) for each in foreign]) == text


@pytest.mark.parametrize(
    ("requested", "width", "text"),
    [
        (None, 21, "DDDDDDDDDD..........]"),
        (1000, 22, "DDDDDDDDDD..........|]"),
        (5000, 22, "DDDDDDDDDD..........|]"),
        (0, 22, "|DDDDDDDDDD..........]"),
        (800, 12, "DDDDD...|..]"),
        (800, 1, "|.]"),
    ],
)
def test_marks_of_a_bar(requested: int | None, width: int, text: str):
    """The request is marked where there is one, at most at the end; bars get narrower, but keep their marks."""
    found = drawn([piece("D", 500)], requested=requested, width=width)
    assert found == text or (width == 1 and found in ("D|]", "|D]", "|.]", ".|]"))


def test_cells_of_a_bar_add_up():
    """However small its parts are, a bar has as many letters as their sum has cells."""
    parts = [piece("D", 30) for _ in range(20)]

    assert drawn(parts).count("D") == 12


def edge(**more: Any) -> MemoryEdge:
    """Memory at one edge of a device of 1 GiB."""
    accounts = [("outside torch", 128), ("torch pool default", 256), ("torch pool mine", 128), ("other processes", 64)]
    given: dict[str, Any] = {
        "state": "load_weights",
        "visit": 1,
        "ended": "left",
        "total_bytes": GIB,
        "requested_bytes": 921 * MIB,
        "used_bytes": 576 * MIB,
        "accounts": tuple(Account(account=name, bytes=size * MIB, source="s") for name, size in accounts),
    }
    return MemoryEdge(**(given | more))


def test_bars_with_their_legend():
    """Each edge has a row; every letter, both marks and the free part are explained."""
    edges = [edge(state=None, visit=0), edge(), edge(state="verify", visit=2, ended="failed", peak_bytes=192 * MIB)]
    golden("bars", shown(bars(edges)))


def test_no_bars_without_readings():
    """A log without a reading of memory has no bars."""
    assert list(bars([])) == []


def test_bars_do_without_colour():
    """In colour and without it the letters are the same."""
    edges = [edge()]
    console = Console(width=80, force_terminal=True, color_system="truecolor", highlight=False)
    with console.capture() as captured:
        for each in bars(edges):
            console.print(each)
    coloured = captured.get()

    assert "\x1b[" in coloured
    plain = "".join(part.partition("m")[2] if at else part for at, part in enumerate(coloured.split("\x1b[")))
    assert [line.rstrip() for line in plain.strip("\n").splitlines()] == shown(bars(edges)).splitlines()


def test_blame_of_a_log_says_that_it_has_no_bars(logs: None, capsys: pytest.CaptureFixture[str]):
    """Without snapshots there are no bars, and the page says why."""
    assert main(["blame", "ready.log"]) == 0
    text = capsys.readouterr().out

    assert "Memory at every edge" not in text
    assert "bytes at the edges: no memory was read" in text


def test_edges_as_json(both: tuple[Start, Start], capsys: pytest.CaptureFixture[str]):
    """``blame --json`` has memory at every edge, account by account, adding up to what is used."""
    main(["blame", "runs/bad", "--json"])
    (start,) = json.loads(capsys.readouterr().out)["starts"]
    edges = start["processes"][0]["edges"]

    assert [each["state"] for each in edges][:3] == [None, "init_device", "load_weights"]
    assert edges[-1]["ended"] == "failed"
    assert edges[-1]["requested_bytes"] == 7372 * MIB
    for each in edges:
        assert sum(account["bytes"] for account in each["accounts"]) == each["used_bytes"]
