"""The pages, held against golden text, and against journals that want to break the terminal."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import orjson
import pytest
from rich.console import RenderableType

from startup_fsm.cli import main
from startup_fsm.codec import CODEC
from startup_fsm.events import (
    BudgetComputed,
    BudgetTerm,
    CheckJudged,
    Event,
    GraphCaptured,
    HookRan,
    ProbeRecorded,
    Record,
    RunStarted,
    SnapshotTaken,
    StateEntered,
    StateFailed,
    StateLeft,
)
from startup_fsm.findings import Advice, Change, Finding
from startup_fsm.memory import GIB, MIB, Account, PoolUsage, Snapshot, Tenant
from startup_fsm.plan import eager
from startup_fsm.reading import read_starts
from startup_fsm.replay import replay
from startup_fsm.reports.terminal import page
from startup_fsm.reports.text import verdict_view
from startup_fsm.reports.views import blame_view, plans_view, replay_view, times_view
from startup_fsm.starts import Start
from startup_fsm.testing import counting_start
from startup_fsm.verdict import RankedFinding, Verdict

GOLDEN = Path(__file__).parent / "golden"
HOSTILE = (
    "\x1b[31mred\x07\x9b2J\u202edesrever\u2066\u200b\ufeff[bold red]x[/bold red][/]\r\n\ttab\ud800:smile:\u2028end"
)


def golden(name: str, text: str) -> None:
    """The text is what the file holds; WRITE_GOLDEN=1 writes it instead."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def shown(content: Iterable[RenderableType]) -> str:
    """As in a pipe: 80 columns, no colour."""
    return page(content, width=80)


def snapshot(*, default: int, kv: int = 0, free: int | None = None, peak: int = 0) -> Snapshot:
    """Memory of a device of 8 GiB, all in MiB; what is outside torch is 300 MiB, another process has 64 MiB."""
    pools = [PoolUsage(pool="0.0", purpose="default", reserved_bytes=default * MIB, active_bytes=default * MIB)]
    if kv:
        pools.append(PoolUsage(pool="0.1", purpose="kv", reserved_bytes=kv * MIB, active_bytes=kv * MIB))
    own = default + kv + 300
    return Snapshot(
        total_bytes=8 * GIB,
        free_bytes=(8192 - own - 64 if free is None else free) * MIB,
        process_bytes=own * MIB,
        allocated_bytes=default * MIB,
        reserved_bytes=(default + kv) * MIB,
        reserved_peak_bytes=peak * MIB,
        pools=tuple(pools),
        tenants=(Tenant(label="4711", bytes=64 * MIB),),
        sources={"torch": "allocator", "process": "nvml", "tenants": "nvml"},
    )


def state(
    name: str, before: Snapshot, after: Snapshot, *, ms: int, edge: str | None = "advance", source: str | None = None
) -> list[tuple[int, Event]]:
    """A state that ended well: its events, each with the ms that it lies after the one before it."""
    return [
        (1, StateEntered(state=name, edge=edge, source=source)),
        (0, SnapshotTaken(state=name, label="enter", snapshot=before)),
        (ms, SnapshotTaken(state=name, label="leave", snapshot=after)),
        (
            0,
            StateLeft(
                state=name,
                duration_ns=ms * 1_000_000,
                cpu_ns=ms * 900_000,
                bookkeeping_ns=20_000,
                measuring_ns=30_000,
            ),
        ),
    ]


def failed_start() -> list[tuple[int, Event]]:
    """A start by the eager plan that runs out of memory in ``verify`` and says nothing after it."""
    empty, loaded, profiled = snapshot(default=0), snapshot(default=1024), snapshot(default=1040, peak=1500)
    with_kv = snapshot(default=1040, kv=6000)
    terms = (
        BudgetTerm(term="requested", bytes=7372 * MIB, source="gpu_memory_utilization"),
        BudgetTerm(term="used_by_us", bytes=-1340 * MIB, source="nvml"),
        BudgetTerm(term="graphs", bytes=0, source="no graphs are captured"),
    )
    budget = BudgetComputed(
        terms=terms,
        available_bytes=6032 * MIB,
        block_bytes=MIB,
        blocks=6000,
        kv_bytes=6000 * MIB,
        requested_bytes=7372 * MIB,
        total_bytes=8 * GIB,
        reachable_bytes=8128 * MIB,
    )
    events: list[tuple[int, Event]] = [
        (0, RunStarted(wall_ns=0, host="host", pid=1, engine="example", plan=eager().as_data())),
        *state("init_device", empty, empty, ms=12, edge=None),
        *state("load_weights", empty, loaded, ms=1500, source="init_device"),
        *state("profile_activations", loaded, profiled, ms=400, source="load_weights"),
        *state("size_kv", profiled, profiled, ms=3, source="profile_activations"),
        *state("allocate_kv", profiled, with_kv, ms=5, source="size_kv"),
        (1, StateEntered(state="verify", edge="advance", source="allocate_kv")),
        (0, SnapshotTaken(state="verify", label="enter", snapshot=with_kv)),
        (20, GraphCaptured(state="verify", size=8, pool="0.2", duration_ns=7_000_000, pool_delta_bytes=2 * MIB)),
        (0, HookRan(hook="lease", moment="before_state", state="verify", duration_ns=1_500_000)),
        (0, ProbeRecorded(probe="replay", state="verify", skipped="no values: tensors are fakes")),
        (2, SnapshotTaken(state="verify", label="fail", snapshot=with_kv)),
        (
            0,
            StateFailed(
                state="verify",
                error_type="torch.OutOfMemoryError",
                category="oom",
                message="CUDA out of memory.",
                duration_ns=23_000_000,
                cpu_ns=21_000_000,
            ),
        ),
    ]
    at = next(place for place, (_, event) in enumerate(events) if getattr(event, "state", "") == "size_kv")
    events.insert(at + 2, (0, budget))
    return events


def lines(events: Iterable[tuple[int, Event]], *, process: str = "rank-00000", rank: int | None = 0) -> list[bytes]:
    """A journal, line by line."""
    written, t = [], 0
    for seq, (after, event) in enumerate(events):
        t += after * 1_000_000
        record = Record(
            run="20300101T000000Z-00000000", process=process, rank=rank, seq=seq, t=t, kind=event.kind, event=event
        )
        written.append(CODEC.encode(record))
    return written


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """The failed start, read from a run directory that has the same name everywhere."""
    monkeypatch.chdir(tmp_path)
    directory = Path("runs") / "20300101T000000Z-00000000"
    directory.mkdir(parents=True)
    (directory / "rank-00000.1.jsonl").write_bytes(b"".join(lines(failed_start())))
    return read_starts("runs")[0]


def whole_verdict() -> Verdict:
    """A verdict in which everything is said that can be said."""
    finding = Finding(
        code="graphs.estimate_short",
        severity="error",
        state="capture_graphs",
        part="full",
        message="the graphs took 3.00 GiB, 1.50 GiB were reserved for them",
        observed=3 * GIB,
        expected=GIB + 512 * MIB,
        tolerance=64 * MIB,
        scope="process",
        bytes=GIB + 512 * MIB,
        evidence=(41, 77),
    )
    note = Finding(code="device.neighbour_present", severity="note", state="init_device", message="4711 holds 64 MiB")
    stalled = Finding(code="state.stalled", severity="warning", state="load_weights", message="30 s passed")
    return Verdict(
        origin="runs/20300101T000000Z-00000000",
        engine="example",
        engine_version="1.2",
        run="20300101T000000Z-00000000",
        attempt=2,
        ranks=8,
        outcome="oom",
        failed_state="capture_graphs",
        part="full",
        failed_rank="rank 3",
        figures={"total_bytes": 8 * GIB, "gpu_memory_utilization": 0.9, "max_model_len": 4096, "gpu_blocks": 12},
        ledger=(
            Account(account="torch pool default", bytes=5 * GIB, source="allocator"),
            Account(account="outside torch", bytes=700 * MIB, source="nvml"),
            Account(account="unexplained", bytes=-2 * MIB, source="identity"),
        ),
        unexplained_bytes=-2 * MIB,
        missing_bytes=GIB + 512 * MIB,
        findings=(
            RankedFinding(finding=finding, rank="rank 3", evidence=({"seq": 41}, {"seq": 77}, {"line": 9})),
            RankedFinding(finding=stalled, evidence=({"seq": 5}, {"text": "loader.py:12 read: os.read(pipe, 1)"})),
            RankedFinding(finding=note, evidence=()),
        ),
        advice=(
            Advice(
                changes=(
                    Change(
                        setting="gpu_memory_utilization",
                        direction="lower",
                        flag="--gpu-memory-utilization 0.72",
                        before=0.9,
                        to=0.72,
                    ),
                    Change(setting="max_num_seqs", direction="lower", before=512, to=256),
                ),
                because="1.50 GiB are missing",
                leftover_bytes=36 * MIB,
                interval=(0.6, 0.72),
            ),
            Advice(
                changes=(Change(setting="kv_cache_memory_bytes", direction="set", to=GIB, unit="bytes"),),
                because="1.00 GiB fits",
            ),
            Advice(
                changes=(Change(setting="capture_sizes", direction="lower", before=list(range(1, 52))),),
                because="fewer graphs take less memory",
            ),
            Advice(changes=(Change(setting="none", direction="investigate"),), because="look at dmesg"),
        ),
        unseen=("who holds 2 MiB",),
    )


def test_verdict():
    """Outcome, whose start it is, findings with evidence, advice with arithmetic, every byte, what is not seen."""
    golden("verdict", shown(verdict_view(whole_verdict())))


def test_verdict_of_nothing_wrong():
    """A start that is ready and of which little is known is short."""
    golden("ready", shown(verdict_view(Verdict(outcome="ready", run="20300101T000000Z-00000000"))))


def test_times(start: Start):
    """States in order, what of them was ours, what lies outside, and what cannot be seen."""
    golden("times", shown(times_view(start)))


def test_blame(start: Start):
    """What cost most, in time and in bytes, by account and edge."""
    golden("blame", shown(blame_view(start)))


def test_replay(start: Start):
    """What the plan does not allow, and judgements that are not in the journal."""
    golden("replay", shown(replay_view(start, [replay(start.processes[0].journal.records)])))


def test_replay_that_diverges(tmp_path: Path):
    """An edge that the plan does not have is named with its place, and so is a judgement that differs."""
    events = failed_start()
    without_profile = [*events[:9], *events[13:]]
    judged = CheckJudged(
        check="weights_once",
        state="load_weights",
        findings=(Finding(code="weights.second_copy", severity="warning", message="twice"),),
    )
    without_profile.insert(8, (0, judged))
    path = tmp_path / "rank-00000.1.jsonl"
    path.write_bytes(b"".join(lines(without_profile)))
    (read,) = read_starts(path)
    text = shown(replay_view(attrs.evolve(read, origin="journal"), [replay(read.processes[0].journal.records)]))

    golden("diverged", text)


def test_plans():
    """A list of plans with their states."""
    golden("plans", shown(plans_view([("eager", [each.name for each in eager().states])])))


def test_several_processes(tmp_path: Path):
    """Each process has its own part of a page; how their clocks relate is said to be unknown."""
    for rank in range(2):
        content = b"".join(lines(failed_start()[: 9 + 4 * rank], process=f"rank-0000{rank}", rank=rank))
        (tmp_path / f"rank-0000{rank}.1.jsonl").write_bytes(content)
    (read,) = read_starts(tmp_path)

    golden("processes", shown(times_view(attrs.evolve(read, origin="runs"))))


@pytest.mark.parametrize("width", [40, 80, 100])
def test_no_line_is_wider_than_asked(start: Start, width: int):
    """Whatever is on a page fits its width."""
    pages = [
        verdict_view(whole_verdict()),
        times_view(start),
        replay_view(start, [replay(start.processes[0].journal.records)]),
    ]
    text = "".join(page(content, width=width) for content in pages)

    assert max(map(len, text.splitlines())) <= width


def hostile(value: Any) -> Any:
    """The same with hostile text in every field that takes any text."""
    if attrs.has(type(value)):
        fixed = {"severity", "direction", "outcome"}
        changed = {
            field.name: hostile(getattr(value, field.name))
            for field in attrs.fields(type(value))
            if field.name not in fixed
        }
        return attrs.evolve(value, **changed)
    if isinstance(value, str):
        return HOSTILE
    if isinstance(value, tuple):
        return tuple(map(hostile, value))
    if isinstance(value, list):
        return list(map(hostile, value))
    if isinstance(value, dict):
        return {
            HOSTILE if not index else f"{HOSTILE}{index}": hostile(each) for index, each in enumerate(value.values())
        }
    return value


def assert_harmless(text: str) -> None:
    """Nothing that a terminal obeys, nothing that cannot be seen, and markup shown as it was written."""
    bad = {each for each in text if each != "\n" and unicodedata.category(each) in ("Cc", "Cf", "Cs", "Zl", "Zp")}

    assert bad == set()
    assert "[bold red]" in text.replace("\n", "")


def test_hostile_verdict():
    """Hostile text in every field of a verdict is shown as it is, and does nothing."""
    assert_harmless(shown(verdict_view(hostile(whole_verdict()))))


def hostile_data(value: Any, key: str = "") -> Any:
    """JSON data with hostile text in all values and in the names of what has no fixed names."""
    if isinstance(value, dict):
        free = key in ("knobs", "note", "versions", "environment", "inputs", "result", "sources", "readings")
        names = (f"{name}{HOSTILE}" if free else name for name in value)
        return {
            name.encode("utf-8", "replace").decode(): hostile_data(each, old)
            for name, old, each in zip(names, value, value.values(), strict=True)
        }
    if isinstance(value, list):
        return [hostile_data(each, key) for each in value]
    kept = ("severity", "kind", "label", "policy", "category", "end")
    return (
        (value + HOSTILE).encode("utf-8", "replace").decode() if isinstance(value, str) and key not in kept else value
    )


@pytest.mark.parametrize("verb", ["doctor", "time", "blame", "verify", "plan"])
def test_hostile_journal(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Hostile text in every field of a journal comes through every verb as text, on stdout and on stderr."""
    boot, engine = counting_start(journal=tmp_path)
    boot.run(engine)
    assert boot.path is not None
    data = [hostile_data(orjson.loads(line)) for line in boot.path.read_bytes().splitlines()]
    edges = data[0]["payload"]["plan"]["edges"]
    for edge in edges:
        edge["name"] = edge["name"].removesuffix(HOSTILE.encode("utf-8", "replace").decode())
        edge["target"] = "ready" if edge["target"].startswith("ready") else edge["target"]
        edge["target"] = "failed" if edge["target"].startswith("failed") else edge["target"]
    for each in data:
        each["kind"] = (
            "surprise" + HOSTILE.encode("utf-8", "replace").decode() if each["kind"] == "hook_ran" else each["kind"]
        )
    path = tmp_path / "hostile"
    path.write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in data))
    main([verb, str(path)])
    captured = capsys.readouterr()

    assert_harmless(captured.out)
    assert "\x1b" not in captured.err


def test_hostile_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A path may hold escape sequences; the error that names it does not."""
    assert main(["doctor", str(tmp_path / "\x1b[2J\u202e[bold red]")]) == 4
    assert_harmless(capsys.readouterr().err)
