"""What the page is made of: data that was folded once, names that are nobody's, and a size that has a bound."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson
import pytest

from startup_fsm.bootstrap import Bootstrap
from startup_fsm.budget import Knobs
from startup_fsm.cli import main
from startup_fsm.codec import CODEC
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.engines.counting import CountingEngine
from startup_fsm.events import HookRan, NoteAdded, RunStarted, StateEntered, StateStalled
from startup_fsm.journal import read_journal
from startup_fsm.memory import GIB, MIB, accounts
from startup_fsm.reading import read_starts
from startup_fsm.reports.page.frames import frames_of, printed
from startup_fsm.reports.page.render import LIMIT, asset, embedded, fitted, packed
from startup_fsm.testing import counting_start
from startup_fsm.verdicts import judge
from tests.reports.page_starts import HOSTILE, HUGE, LOG, data_of, hostile_start, page_of, start_of, verdict_of

ROOT = Path(__file__).parents[2]
HISTORIES = ROOT / "tests" / "histories"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    """The benchmark, which makes starts of many ranks."""
    spec = importlib.util.spec_from_file_location("report_page", ROOT / "benchmarks" / "report_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ready() -> dict[str, Any]:
    """The data of a start that came to ready."""
    return data_of(read_starts(HISTORIES / "ready.jsonl")[0])


@pytest.fixture(scope="module")
def failed() -> dict[str, Any]:
    """The data of a start that ran out of memory while capturing."""
    return data_of(read_starts(HISTORIES / "oom_in_capture.jsonl")[0])


def held(rank: dict[str, Any], at: int) -> dict[str, int]:
    """Bytes by account of one row of memory."""
    row = rank["memory"][at][4:]
    return {name: size for (name, _), size in zip(rank["accounts"], row, strict=False) if size}


def test_frames_are_the_fold():
    """The last frame of each visit is the snapshot with which the state ended, account by account."""
    journal = read_journal(HISTORIES / "ready.jsonl")
    start = read_starts(HISTORIES / "ready.jsonl")[0]
    history = start.processes[0].history
    frames = frames_of(history, {record.seq: record.t for record in journal.records})

    assert [frame.seq for frame in frames] == sorted(frame.seq for frame in frames)
    for at, visit in enumerate(history.visits):
        last = [frame for frame in frames if frame.visit == at][-1]
        assert visit.after is not None
        assert last.label == "leave"
        assert last.reading is not None
        expected = {account.account: account.bytes for account in accounts(visit.after) if account.bytes}
        assert last.reading.held == expected
        assert last.reading.free == visit.after.free_bytes


def test_frames_between_snapshots():
    """A captured graph adds what it took to the last reading, and the frame says that nothing was read."""
    boot, engine = counting_start(knobs=Knobs(utilization=0.9))
    boot.run(engine)
    frames = [frame for frame in frames_of(boot.history, {}) if frame.label.startswith("graph")]
    captures = [event for visit in boot.history.visits for _, event in visit.captures]

    assert len(frames) == len(captures) == 10
    assert {frame.reading.basis for frame in frames if frame.reading} == {"counted"}
    assert frames[0].captures == 1
    assert frames[0].reading is not None
    assert frames[0].reading.held["torch pool throwaway_graphs"] == captures[0].pool_delta_bytes


def test_ledger_adds_up(ready: dict[str, Any]):
    """The accounts of the last reading and what is free are the device, to the byte."""
    ledger = ready["ranks"][0]["ledger"]

    assert sum(row[2] for row in ledger["rows"]) + ledger["free"] == ledger["total"]
    assert [row[0] for row in ledger["rows"]] == [
        "torch pool default", "torch pool kv", "torch pool graphs", "outside torch", "other processes", "unexplained",
    ]  # fmt: skip


def test_visits(failed: dict[str, Any]):
    """A visit has its times, its end, what it captured, and what was asked for and not had."""
    visits = failed["ranks"][0]["visits"]
    last = visits[-1]

    assert [visit["state"] for visit in visits][-2:] == ["allocate_kv", "capture_graphs"]
    assert (last["ended"], last["category"]) == ("failed", "oom")
    assert last["tried"] == 32 * MIB
    assert visits[4]["graphs"][0] == 3
    assert held(failed["ranks"][0], last["memory"])["torch pool kv"] > 0


def test_verdict_words(failed: dict[str, Any], ready: dict[str, Any]):
    """The answer comes first, in words, with its advice."""
    assert failed["verdict"]["line"] == "Out of memory in capture_graphs"
    assert failed["verdict"]["because"].startswith("Nothing was reserved for the graphs, they need at least")
    assert failed["verdict"]["advice"][0]["do"].startswith("set graph_estimate from none to")
    assert ready["verdict"]["line"] == "Ready"
    assert ready["verdict"]["because"].startswith("The KV cache has 2.")


def test_checks(failed: dict[str, Any], ready: dict[str, Any]):
    """Findings come before what held, the diagnosis's own among them; each has a seq to go to."""
    assert failed["checks"][0][:2] == ["diagnosis", "size_kv"]
    assert failed["checks"][0][4:6] == ["error", "graphs.not_reserved"]
    assert {row[4] for row in ready["checks"]} == {"held"}
    assert all(isinstance(row[11], int) for row in ready["checks"])


def test_graph(failed: dict[str, Any]):
    """The way that was taken is in the graph, its end too; states without trouble stand in the first column."""
    graph = failed["graph"]
    taken = [(edge["source"], edge["target"]) for edge in graph["edges"] if edge["taken"]]

    assert ("capture_graphs", "failed") in taken
    assert ("init_device", "load_weights") in taken
    assert {state["column"] for state in graph["states"] if state["name"] != "recover_allocator"} == {0}
    assert failed["ranks"][0]["steps"][-1] == ["capture_graphs", None, "failed", "failed"]


class Hungry(CountingEngine):
    """Its first two verifications ask for more than there is."""

    tries = 0

    def verify(self, step: Any) -> None:
        type(self).tries += 1
        if self.tries < 3:
            self.device.malloc(self.device.snapshot().free_bytes + 8 * MIB)
        super().verify(step)


def test_retries_are_counted(tmp_path: Path):
    """An edge that was taken twice says so, and a state that was visited again is a visit of its own."""
    device = SimulatedDevice(4 * GIB)
    boot = Bootstrap(
        device=device, journal=tmp_path, discover=False, progress=False, knobs=Knobs(utilization=0.9, retries=2)
    )
    boot.run(Hungry(device=device))
    assert boot.path is not None
    data = data_of(read_starts(boot.path)[0])
    edges = {(edge["source"], edge["target"]): edge["taken"] for edge in data["graph"]["edges"]}

    assert edges["verify", "teardown"] == 2
    assert edges["verify", "ready"] == 1
    assert [visit["visit"] for visit in data["ranks"][0]["visits"] if visit["state"] == "verify"] == [1, 2, 3]
    assert data["ranks"][0]["budget"]["times"] == 3


def test_lanes():
    """Hooks and stalls lie in the state in which they were, with their times."""
    events = [
        RunStarted(wall_ns=5, plan={}),
        StateEntered(state="load_weights"),
        HookRan(hook="lease", moment="before_state", state="load_weights", duration_ns=3_000_000, count=2),
        StateStalled(state="load_weights", deadline_ns=1_000_000, stack=("/srv/x.py:1 f", "/srv/y.py:2 g: wait()")),
    ]
    rank = data_of(start_of(events))["ranks"][0]

    assert rank["marks"]["hooks"] == [["lease", "before_state", "load_weights", 2_000, 3_000, 2, None]]
    assert rank["marks"]["stalls"][0][:4] == ["load_weights", 1, 3_000, 1_000]
    assert rank["marks"]["stalls"][0][4].endswith("path-1.py:2 g: wait()") or "path-" in rank["marks"]["stalls"][0][4]
    assert rank["visits"][0]["hooks"] == [2, 3_000]


def test_clocks_of_ranks(benchmark: ModuleType, tmp_path: Path):
    """Ranks are aligned by their wall clocks; where one does not tell it, none are."""
    run = benchmark.written_start(tmp_path, ranks=3, events=120)
    data = data_of(read_starts(run)[0])
    lost = data_of(start_of([RunStarted(wall_ns=5)], [RunStarted()]))

    assert [rank["offset"] for rank in data["ranks"]] == [0, 40_000, 80_000]
    assert data["clock"] == {"is_aligned": True, "hosts": 1}
    assert lost["clock"]["is_aligned"] is False


def test_printed_figures(tmp_path: Path):
    """Of a log, the picture is what it printed, state by state, and says that nothing was read."""
    log = tmp_path / "vllm.log"
    log.write_text(LOG)
    start = read_starts(log)[0]
    history = max((process.history for process in start.processes), key=lambda history: len(history.figures))
    reading = printed(history, history.last_seq)

    assert reading is not None
    assert reading.basis == "printed"
    assert reading.held["weights"] == round(14.99 * 2**30)
    assert reading.held["KV cache"] == round(50.21 * 2**30)
    assert reading.held["graphs"] == round(0.62 * 2**30)


SECRETS = (
    "node17.cluster.example.com", "node17", "48213", "mustermann", "/srv/", "Big Customer", "0b5c6a1e-6a0e", "10.0.0.7",
    "expandable_segments", "hf_abcdefghijklmnop",
)  # fmt: skip


def secretive() -> Any:
    """A start that names its machine wherever it can."""
    return start_of(
        [
            RunStarted(
                wall_ns=1, host="node17.cluster.example.com", pid=48213, boot_id="0b5c6a1e-6a0e-4d5e-9a55-3b1f8f3f0c11",
                engine="x", device="cuda:0 on node17",
                knobs={"model": "/srv/Big Customer/model", "download_dir": "/home/mustermann/cache"},
                environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUDA_VISIBLE_DEVICES": "0"},
            ),
            StateEntered(state="load_weights"),
            NoteAdded(state="load_weights", note={"pid": 48213, "who": "mustermann", "/srv/key": "10.0.0.7:29500"}),
            StateStalled(state="load_weights", deadline_ns=1, stack=("/srv/Big Customer/run.py:3 load: open(path)",)),
            HookRan(hook="lease of node17", moment="on_event", state="load_weights"),
            NoteAdded(note={"said": "token hf_abcdefghijklmnop of PID 48213 in /srv/Big Customer/model on node17"}),
        ],
        origin="/home/mustermann/runs of mine/x",
    )  # fmt: skip


def test_nobody_is_named():
    """By default no path, host, user, process number or environment is anywhere in the page."""
    text = page_of(secretive())

    assert [secret for secret in SECRETS if secret in text] == []


def test_full_names_everybody():
    """With everything kept they all are, but the boot id, which the page does not show."""
    text = page_of(secretive(), full=True)

    assert [secret for secret in SECRETS if secret not in text] == ["0b5c6a1e-6a0e"]


def test_tokens_are_stable():
    """The same start gives the same page, and one thing has one token on all of it."""
    data = data_of(secretive())

    assert page_of(secretive()) == page_of(secretive())
    assert data["ranks"][0]["host"] == "host-1"
    assert "lease of host-1" in str(data["ranks"][0]["marks"]["hooks"])


@pytest.mark.parametrize(
    ("origin", "shown"),
    [("runs", "path-1"), ("/srv/logs/vllm.log:17-633", "path-1:17-633"), ("-", "-"), ("x.jsonl", "path-1")],
)
def test_origin(origin: str, shown: str):
    """What was read is a token with its lines; a plain name is not taken out of our sentences."""
    data = data_of(start_of([RunStarted(), NoteAdded(note={"said": "several runs"})], origin=origin))

    assert data["about"]["origin"] == shown
    assert data["ranks"][0]["events"]["text"][1] == "note (said several runs)"


def test_light(tmp_path: Path):
    """The verb loads nothing that starts an engine."""
    script = "import sys; from startup_fsm.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    words = ["report", str(HISTORIES / "ready.jsonl"), "-o", str(tmp_path / "x.html")]
    ran = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = {name.partition(".")[0] for name in ran.stdout.split()}

    assert loaded & {"asyncio", "pynvml", "structlog", "torch", "transitions"} == set()
    assert "startup_fsm" in loaded


def test_nothing_of_a_journal_is_markup():
    """Hostile text stands in the data block only, where no character of it can begin markup."""
    text = page_of(hostile_start())
    before, _, rest = text.partition('<script type="application/json" id="report">')
    data, _, after = rest.partition("</script>")

    assert not re.search("[<>&\u2028\u2029]", data)
    assert "window.harmed" not in before + after
    assert "window.harmed" in data
    assert not set(data) & {"\x1b", "\u202e", "\x07", "\x9b", "\u200b", "\x00"}
    assert orjson.loads(data)["schema"] == 1


def test_policy():
    """The policy lets nothing in but what is in the file, each by its digest."""
    text = page_of(hostile_start())
    policy = re.search('http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert policy is not None
    assert style is not None
    digests = [f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in scripts]

    assert policy[1] == (
        f"default-src 'none'; script-src {digests[0]} {digests[1]};"
        f" style-src 'sha256-{base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()}';"
        " img-src data:; base-uri 'none'; form-action 'none'"
    )
    assert len(scripts) == 2
    assert "unsafe" not in policy[1]


def test_loads_nothing():
    """No address of a network is anywhere in what is shipped, but names of formats and of the library's home."""
    text = page_of(read_starts(HISTORIES / "ready.jsonl")[0])
    addresses = set(re.findall(r"https?://[^\s'\"<>)]+", text))

    assert addresses == {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"}
    assert not re.search(r"""\b(?:src|href)\s*=\s*["'](?!#|data:)""", text)


def test_library_has_its_licence():
    """The vendored library stands in the page with its licence."""
    assert "Copyright (c) 2022 Leon Sorokin" in asset("vendor/uPlot.LICENSE")
    assert "Copyright (c) 2022 Leon Sorokin" in page_of(read_starts(HISTORIES / "ready.jsonl")[0])


def test_no_markup_from_text():
    """No script of ours can parse text as markup or run it."""
    scripts = "\n".join(path.read_text() for path in (ROOT / "startup_fsm/reports/page/assets/js").iterdir())

    assert (
        re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|eval\(|new Function|fetch\(", scripts)
        == []
    )


@pytest.mark.parametrize(
    "text", [HUGE, "<" * 1_000_000, "&\u2028" * 500_000, HOSTILE * 2_000], ids=["w", "lt", "amp", "all"]
)
def test_hostile_size(text: str):
    """Texts of millions of characters in every field leave the page small, and are cut quickly."""
    start = hostile_start(text=text)
    verdict_of(start)
    began = time.perf_counter()
    size = len(page_of(start).encode())

    assert size < 800_000
    assert time.perf_counter() - began < 5


def test_large_start(benchmark: ModuleType, tmp_path: Path):
    """8 ranks of 2,000 events are written in under 2 s and stay under 1.5 MB."""
    run = benchmark.written_start(tmp_path, ranks=8, events=2_000)
    seconds = min(benchmark.written(run, tmp_path / "report.html") for _ in range(3))

    assert (tmp_path / "report.html").stat().st_size < benchmark.LARGEST
    assert seconds < benchmark.SLOWEST_WRITING


def test_too_large(benchmark: ModuleType, tmp_path: Path):
    """What does not fit is left out of the middle and counted; the first and the last events stay."""
    run = benchmark.written_start(tmp_path, ranks=2, events=400)
    whole = packed(data_of(read_starts(run)[0]))
    short = embedded(whole | {"texts": [each[:60] for each in whole["texts"]]})
    small = orjson.loads(fitted(whole, len(short.encode()) + 200))
    room = (len(short.encode()) + len(fitted(whole, 0).encode())) // 2
    smaller = orjson.loads(fitted(whole, room))
    events = smaller["ranks"][0]["events"]

    assert max(map(len, small["texts"])) < max(map(len, whole["texts"]))
    assert len(small["ranks"][0]["events"]["seq"]) == len(whole["ranks"][0]["events"]["seq"])
    assert events["left"][0] > 0
    assert sum(events["seq"]) == sum(whole["ranks"][0]["events"]["seq"])
    assert sum(each or 0 for each in events["t"]) == sum(each or 0 for each in whole["ranks"][0]["events"]["t"])
    assert len(fitted(whole, room).encode()) <= room


def test_many_ranks():
    """Of 300 processes the first are drawn one by one, and the others counted."""
    data = data_of(start_of(*([RunStarted(wall_ns=1), StateEntered(state="load_weights")] for _ in range(300))))

    assert len(data["ranks"]) == 64
    assert data["ranks_left"] == 236
    assert len(embedded(data)) < LIMIT


def test_empty_journal():
    """A journal with its first line only has a page."""
    data = data_of(start_of([RunStarted()]))

    assert data["ranks"][0]["visits"] == []
    assert data["ranks"][0]["ledger"] is None
    assert data["verdict"]["outcome"] == "incomplete"


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A small journal in a file."""
    path = tmp_path / "rank-00000.1.jsonl"
    events = start_of([RunStarted(host="node17"), StateEntered(state="load_weights")]).processes[0].journal.records
    path.write_bytes(b"".join(CODEC.encode(record) for record in events))
    return path


def test_verb(journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The verb writes the file, says so on stderr, and leaves stdout to data."""
    assert main(["report", str(journal), "-o", str(tmp_path / "x.html")]) == 0
    said = capsys.readouterr()

    assert said.out == ""
    assert said.err.startswith("written: ")
    assert (tmp_path / "x.html").read_text().startswith("<!doctype html>")
    assert sorted(each.name for each in tmp_path.iterdir()) == [journal.name, "x.html"]


def test_verb_to_stdout(journal: Path, capsys: pytest.CaptureFixture[str]):
    """A dash is standard output; ``--json`` gives the data, redacted in the same way."""
    assert main(["report", str(journal), "-o", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")
    assert main(["report", str(journal), "--json"]) == 0
    data = orjson.loads(capsys.readouterr().out)

    assert data["ranks"][0]["host"] == "host-1"
    assert main(["report", str(journal), "--json", "--full"]) == 0
    assert orjson.loads(capsys.readouterr().out)["ranks"][0]["host"] == "node17"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--start", "2"], 1, "error: --start 2: there is 1"),
        (["-o", "/nowhere/x.html"], 1, "error: /nowhere/x.html: No such file or directory"),
    ],
)
def test_verb_errors(journal: Path, words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]):
    """What cannot be done is one sentence and a hint."""
    assert main(["report", str(journal), *words]) == code
    assert capsys.readouterr().err.startswith(said)


def test_verb_without_a_journal(tmp_path: Path):
    """A path that holds nothing is unreadable, and no file is made."""
    assert main(["report", str(tmp_path / "nothing"), "-o", str(tmp_path / "x.html")]) == 4
    assert list(tmp_path.iterdir()) == []


def test_the_start_that_matters(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Of the attempts of one run the last is shown unless another is asked for; the others are named."""
    run = tmp_path / "run"
    run.mkdir()
    for attempt, name in enumerate(("oom_in_capture", "ready"), 1):
        lines = (HISTORIES / f"{name}.jsonl").read_bytes().splitlines(keepends=True)
        renamed = [line.replace(b'"attempt":1', f'"attempt":{attempt}'.encode()) for line in lines]
        (run / f"rank-00000.{attempt}.jsonl").write_bytes(b"".join(renamed))
    assert main(["report", str(run), "--json"]) == 0
    data = orjson.loads(capsys.readouterr().out)
    assert main(["report", str(run), "--json", "--start", "1"]) == 0
    first = orjson.loads(capsys.readouterr().out)

    assert [each["line"] for each in data["starts"]] == ["Out of memory in capture_graphs", "Ready"]
    assert data["verdict"]["outcome"] == "ready"
    assert first["verdict"]["outcome"] == "oom"
    assert [each["shown"] for each in first["starts"]] == [True, False]


def test_same_verdict(failed: dict[str, Any]):
    """The page says what the doctor says."""
    start = read_starts(HISTORIES / "oom_in_capture.jsonl")[0]
    verdict = judge(start.sources, source=start.source, origin=start.origin)

    assert [each["code"] for each in failed["verdict"]["findings"]] == [each.finding.code for each in verdict.findings]
    assert len(failed["verdict"]["advice"]) == len(verdict.advice)
