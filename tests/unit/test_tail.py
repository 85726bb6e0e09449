"""Following what grows: journals in pieces, torn, truncated and replaced; runs that are not there yet; logs and pipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from startup_fsm import reading
from startup_fsm.codec import CODEC, MAX_LINE
from startup_fsm.errors import JournalError, UnknownSchema
from startup_fsm.events import Event, Record, RunFinished, RunStarted, StateEntered, StateFailed, StateLeft
from startup_fsm.identity import boot_id, host_name
from startup_fsm.journal import JournalWriter, read_journal
from startup_fsm.lines import Line, Lines
from startup_fsm.mirror import mirror_texts
from startup_fsm.tail import Bar, Tail, journals, streams, tail_of
from startup_fsm.tail.journals import JournalTail
from startup_fsm.tail.streams import GrowingFile, TextTail, last_bar
from startup_fsm.verdicts import judge

RUN = "20300101T000000Z-00000000"
VLLM = """INFO 03-05 10:00:00 [api_server.py:1000] vLLM API server version 0.11.0
INFO 03-05 10:00:01 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='m', max_seq_len=4096
INFO 03-05 10:00:02 [gpu_model_runner.py:2338] Starting to load model m...
Loading safetensors checkpoint shards:   0% Completed | 0/4 [00:00<?, ?it/s]
"""
SHARDS = "Loading safetensors checkpoint shards:  75% Completed | 3/4 [00:03<00:01,  1.00s/it]\n"
READY = """INFO 03-05 10:00:09 [default_loader.py:267] Loading weights took 4.10 seconds
INFO 03-05 10:00:10 [gpu_model_runner.py:2392] Model loading took 2.4389 GiB and 5.1 seconds
INFO 03-05 10:00:30 [core.py:214] init engine (profile, create kv cache, warmup model) took 20.00 seconds
"""
DEAD = """ERROR 03-05 10:00:12 [core.py:700] EngineCore failed to start.
ERROR 03-05 10:00:12 [core.py:700] Traceback (most recent call last):
ERROR 03-05 10:00:12 [core.py:700]   File "/x/vllm/v1/worker/gpu_worker.py", line 213, in load_model
ERROR 03-05 10:00:12 [core.py:700]     self.model_runner.load_model(eep_scale_up=eep_scale_up)
ERROR 03-05 10:00:12 [core.py:700] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
"""


def records(*events: Event, rank: int = 0, attempt: int = 1, run: str = RUN) -> list[Record]:
    """Events of one rank, numbered."""
    return [
        Record(
            run=run,
            process=f"rank-{rank:05d}",
            rank=rank,
            attempt=attempt,
            seq=seq,
            t=seq * 1_000,
            kind=event.kind,
            event=event,
        )
        for seq, event in enumerate(events)
    ]


def course(**facts: object) -> list[Event]:
    """A start from its beginning to ready."""
    return [
        RunStarted(**facts),  # type: ignore[arg-type]
        StateEntered(state="init_device"),
        StateLeft(state="init_device"),
        StateEntered(state="load_weights", edge="advance", source="init_device"),
        StateLeft(state="load_weights"),
        RunFinished(end="ready", state="load_weights"),
    ]


def lines(given: list[Record]) -> list[bytes]:
    """As a journal has them."""
    return [CODEC.encode(record) for record in given]


class Written:
    """A journal that a test writes by hand, with the lock that a writer has."""

    def __init__(self, directory: Path, rank: int = 0, attempt: int = 1, **facts: object) -> None:
        self.writer = JournalWriter(directory, f"rank-{rank:05d}", attempt=attempt)
        self.path = self.writer.path
        self.waiting = lines(records(*course(**facts), rank=rank, attempt=attempt))

    def write(self, count: int = 1) -> None:
        for _ in range(count):
            self.writer.append(self.waiting.pop(0))


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Callable[..., Written]]:
    """Journals of one run."""
    all_written: list[Written] = []

    def make(rank: int = 0, *, directory: str = RUN, **options: object) -> Written:
        all_written.append(Written(tmp_path / directory, rank, **options))  # type: ignore[arg-type]
        return all_written[-1]

    yield make
    for each in all_written:
        each.writer.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are short."""
    monkeypatch.setattr(journals, "_ASK_S", 0.01)
    monkeypatch.setattr(journals, "_SETTLE_S", 0.05)
    monkeypatch.setattr(journals, "_MISSING_S", 0.3)
    monkeypatch.setattr(journals, "_RESTART_S", 0.5)
    monkeypatch.setattr(streams, "_SOONEST_S", 0.0)
    monkeypatch.setattr(streams, "_FAILED_S", 0.2)
    monkeypatch.setattr(streams, "_FAILED_AND_HELD_S", 0.6)
    monkeypatch.setattr(streams, "_LOOK_S", 0.0)


def until(tail: Tail, what: Callable[[], bool], seconds: float = 30.0) -> None:
    """Poll until something holds."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came"
        tail.poll()
        time.sleep(0.005)


def over(tail: Tail) -> str:
    """Poll until it is over; the outcome."""
    until(tail, lambda: tail.is_over)
    start = tail.final()
    return judge(start.sources, source=start.source, origin=start.origin).outcome


def states(tail: Tail) -> list[tuple[str, str | None]]:
    """What is seen: processes and their states."""
    sight = tail.sight()
    return [] if sight is None else [(each.label, each.history.state) for each in sight.start.processes]


@given(st.lists(st.binary(max_size=30), max_size=12), st.lists(st.integers(1, 40), max_size=12))
def test_lines_do_not_depend_on_blocks(texts: list[bytes], sizes: list[int]):
    """However bytes come in, the lines, their numbers and their places are the same."""
    content = b"\n".join(texts)
    whole = Lines()
    expected = [*whole.feed(content)]
    parts, at, found = Lines(), 0, []
    for size in [*sizes, len(content)]:
        found += parts.feed(content[at : at + size])
        at += size

    assert found == expected
    assert parts.rest() == whole.rest()
    assert [each.text for each in found] == content.split(b"\n")[:-1]
    assert all(content[each.offset : each.offset + each.length] == each.text for each in found)


def test_endless_line_is_not_held():
    """Of a line that is too long only its first bytes are kept, and its length is known."""
    found = Lines()
    for _ in range(5):
        assert [*found.feed(b"x" * MAX_LINE)] == []
    assert [*found.feed(b"\n")] == [Line(1, 0, b"x" * (MAX_LINE + 1), 5 * MAX_LINE, complete=True)]


def test_journal_in_pieces(tmp_path: Path):
    """A journal that comes byte by byte is folded event by event; half a line waits for its end."""
    path = tmp_path / "rank-00000.1.jsonl"
    content = b"".join(lines(records(*course())))
    tail, seen = JournalTail(path), []
    with path.open("ab", buffering=0) as file:
        for at in range(0, len(content), 7):
            file.write(content[at : at + 7])
            tail.poll(path.stat(), time.monotonic())
            seen.append(tail.history.records)

    assert seen == [content[: at + 7].count(b"\n") for at in range(0, len(content), 7)]
    assert tail.process.journal.records == read_journal(path).records
    assert tail.process.journal.problems == ()
    assert tail.history.state == "load_weights"


def test_short_write_is_taken_again(tmp_path: Path):
    """What a writer cuts off half a line and writes again is read as it is in the end."""
    path = tmp_path / "rank-00000.1.jsonl"
    first, second, *_ = lines(records(*course()))
    tail = JournalTail(path)
    path.write_bytes(first + second[:30])
    tail.poll(path.stat(), 0)
    with path.open("r+b") as file:
        file.truncate(len(first))
        file.seek(0, os.SEEK_END)
        file.write(second)
    tail.poll(path.stat(), 0)

    assert tail.history.records == 2
    assert tail.process.journal.problems == ()


@pytest.mark.parametrize("way", ["truncated", "replaced", "written over", "removed"])
def test_another_journal_under_the_name(tmp_path: Path, way: str):
    """A journal that is truncated, replaced, written over with more, or made anew is read from its beginning."""
    path = tmp_path / "rank-00000.1.jsonl"
    path.write_bytes(b"".join(lines(records(*course()))[:2]))
    tail = JournalTail(path)
    tail.poll(path.stat(), 0)
    assert (tail.history.run, tail.history.state) == (RUN, "init_device")
    whole = lines(records(*course(), run="20310101T000000Z-11111111"))
    content = b"".join(whole[:1] if way == "truncated" else whole)
    if way == "replaced":
        (tmp_path / "other").write_bytes(content)
        (tmp_path / "other").replace(path)
    else:
        if way == "removed":
            path.unlink()
            tail.poll(None, 0)
            assert not tail.is_alive
        path.write_bytes(content)
    assert tail.poll(path.stat(), 1)

    assert tail.history.run == "20310101T000000Z-11111111"
    assert tail.history.records == (1 if way == "truncated" else len(whole))
    assert tail.is_alive


def test_lost_beginning(tmp_path: Path):
    """Of a journal whose beginning is lost every line still says whose it is."""
    path = tmp_path / "rank-00003.2.jsonl"
    path.write_bytes(b"".join(lines(records(*course(), rank=3, attempt=2))[1:]))
    tail = JournalTail(path)
    tail.poll(path.stat(), 0)

    assert (tail.process.label, tail.history.run, tail.history.attempt) == ("rank 3", RUN, 2)
    assert tail.process.journal.problems[0].kind == "gap"


def test_newer_schema(tmp_path: Path):
    """A journal of a newer version is refused by name, whenever its line comes."""
    path = tmp_path / "rank-00000.1.jsonl"
    path.write_bytes(lines(records(*course()))[0])
    tail = tail_of(str(path))
    until(tail, lambda: states(tail) == [("rank 0", None)])
    with path.open("ab") as file:
        file.write(b'{"v":99,"run":"r","process":"p","seq":1,"t":0,"kind":"k","payload":{}}\n')

    with pytest.raises(UnknownSchema, match="schema 99"):
        until(tail, lambda: False)


def test_start_that_is_not_there_yet(tmp_path: Path, written: Callable[..., Written]):
    """A directory of runs, the run in it and its first event are waited for."""
    tail = tail_of(str(tmp_path / "runs"))
    for _ in range(3):
        assert not tail.poll()
        assert not tail.is_over
    journal = written(directory=f"runs/{RUN}")
    for _ in range(3):
        tail.poll()
    assert tail.sight() is None
    journal.write(2)
    until(tail, lambda: states(tail) == [("rank 0", "init_device")])
    journal.write(4)

    assert over(tail) == "ready"
    assert tail.final().origin == str(tmp_path / "runs" / RUN)


def test_ranks_that_come_later(tmp_path: Path, written: Callable[..., Written]):
    """A rank whose journal is made later is seen; the run is over when all are."""
    first = written(0)
    tail = tail_of(str(tmp_path / RUN))
    first.write(4)
    until(tail, lambda: states(tail) == [("rank 0", "load_weights")])
    second = written(1)
    second.write(2)
    until(tail, lambda: states(tail) == [("rank 0", "load_weights"), ("rank 1", "init_device")])
    first.write(2)
    for _ in range(30):
        tail.poll()
        assert not tail.is_over
        time.sleep(0.005)
    second.write(4)

    assert over(tail) == "ready"


def test_announced_ranks_are_waited_for(tmp_path: Path, written: Callable[..., Written]):
    """Where the launcher has announced more ranks, a run does not end with those that are there; but not for ever."""
    first = written(0, environment={"WORLD_SIZE": "2"})
    first.write(6)
    tail = tail_of(str(tmp_path / RUN))
    until(tail, lambda: tail.sight() is not None)
    began = time.monotonic()
    sight = tail.sight()
    assert sight is not None
    assert sight.missing == 1
    until(tail, lambda: tail.is_over)

    assert time.monotonic() - began > 0.2


@pytest.mark.parametrize("size", ["many", "99999999999", "٣", "-1", ""])
def test_announcements_that_are_none(tmp_path: Path, written: Callable[..., Written], size: str):
    """A number of ranks that is no number, or none that can be, announces nothing."""
    written(0, environment={"WORLD_SIZE": size}).write(6)
    tail = tail_of(str(tmp_path / RUN))
    until(tail, lambda: tail.is_over)
    sight = tail.sight()

    assert sight is not None
    assert sight.missing == 0


def test_next_attempt_of_a_run(tmp_path: Path, written: Callable[..., Written]):
    """Of a run the newest attempt is followed."""
    written(0).write(3)
    tail = tail_of(str(tmp_path / RUN))
    until(tail, lambda: states(tail) == [("rank 0", "init_device")])
    second = written(0, attempt=2)
    second.write(4)
    until(tail, lambda: states(tail) == [("rank 0", "load_weights")])
    second.write(2)

    assert over(tail) == "ready"
    assert tail.final().attempt == 2


@pytest.mark.parametrize("again", [True, False])
def test_process_that_may_start_again(tmp_path: Path, written: Callable[..., Written], again: bool):
    """A start that failed and whose process lives on may begin again in its own place: that is waited for, a while."""
    here = {"host": host_name(), "boot_id": boot_id(), "pid": os.getpid()}
    first = written(0, **here)
    failed = RunFinished(end="failed", state="load_weights")
    first.waiting[-1] = lines(records(*course(**here)[:-1], failed))[-1]
    first.write(6)
    tail = tail_of(str(tmp_path / RUN))
    until(tail, lambda: states(tail) == [("rank 0", "load_weights")])
    began = time.monotonic()
    while time.monotonic() - began < 0.2:
        tail.poll()
        assert not tail.is_over
    if again:
        written(0, attempt=2).write(6)

    assert over(tail) == ("ready" if again else "error")
    assert tail.final().attempt == (2 if again else 1)


def test_newest_run(tmp_path: Path, written: Callable[..., Written]):
    """Of a directory of runs the newest is followed, or with ``is_next`` the next one that comes."""
    written(directory="20290101T000000Z-00000000").write(2)
    written(directory="20300101T000000Z-00000000").write(6)
    newest, following = tail_of(str(tmp_path)), tail_of(str(tmp_path), is_next=True)
    assert over(newest) == "ready"
    for _ in range(5):
        assert not following.poll()
    written(directory="20290601T000000Z-22222222").write(4)
    until(following, lambda: states(following) == [("rank 0", "load_weights")])
    assert following.final().origin.endswith("20290601T000000Z-22222222")


def test_next_attempt_alone(tmp_path: Path, written: Callable[..., Written]):
    """With ``is_next`` the attempts that a run directory holds already do not count."""
    written(0).write(6)
    tail = tail_of(str(tmp_path / RUN), is_next=True)
    for _ in range(5):
        assert not tail.poll()
        assert not tail.is_over
    written(0, attempt=2).write(4)
    until(tail, lambda: states(tail) == [("rank 0", "load_weights")])


def test_writer_that_is_killed(tmp_path: Path):
    """A process that dies without an end is gone, half a line is no trouble, and the doctor says the same."""
    script = """
        import sys, time
        from startup_fsm.bootstrap import Bootstrap
        from startup_fsm.plan import observed
        boot = Bootstrap(plan=observed(), journal=sys.argv[1], device="sim", discover=False)
        with boot.state("load_weights"):
            print(flush=True)
            time.sleep(60)
    """
    command = [sys.executable, "-c", "import textwrap,sys;exec(textwrap.dedent(sys.stdin.read()))", str(tmp_path)]
    # A start of this process may have told its run to those that it spawns.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("STARTUP_FSM_", "RANK"))}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(script)
        process.stdin.close()
        process.stdout.readline()
        tail = tail_of(str(tmp_path))
        until(tail, lambda: states(tail) == [("rank 0", "load_weights")])
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            tail.poll()
            assert not tail.is_over
        process.send_signal(signal.SIGKILL)
        process.wait()

    assert over(tail) == "incomplete"
    sight = tail.sight()
    assert sight is not None
    assert [each.is_alive for each in sight.start.processes] == [False]


def test_writer_that_lets_go(tmp_path: Path, written: Callable[..., Written]):
    """A journal without an end that nobody holds is over; what was written just before that is read."""
    journal = written(0)
    journal.write(2)
    tail = tail_of(str(journal.path))
    until(tail, lambda: bool(states(tail)))
    journal.write(2)
    journal.writer.close()

    assert over(tail) == "incomplete"
    assert states(tail) == [("rank 0", "load_weights")]


def test_old_journal_is_over_at_once(tmp_path: Path, written: Callable[..., Written]):
    """What ended long ago is told without waiting for anything."""
    journal = written(0)
    journal.write(4)
    journal.writer.close()
    began = time.monotonic()

    assert over(tail_of(str(journal.path))) == "incomplete"
    assert time.monotonic() - began < 2


def test_dead_process_whose_lock_is_held(tmp_path: Path, written: Callable[..., Written]):
    """A process of this boot that no longer exists is gone, though a child of it may hold the lock."""
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    written(0, host=host_name(), boot_id=boot_id(), pid=process.pid).write(4)

    assert over(tail_of(str(tmp_path / RUN))) == "incomplete"


def test_empty_journal_is_not_asked_for_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Between its making and its first event a journal is left alone: the writer may be about to take the lock."""
    asked: list[int] = []

    def noticed(descriptor: int) -> bool:
        asked.append(os.fstat(descriptor).st_size)
        return False

    monkeypatch.setattr(journals, "is_held", noticed)
    path = tmp_path / RUN / "rank-00000.1.jsonl"
    path.parent.mkdir()
    path.touch()
    tail = tail_of(str(path.parent))
    for _ in range(20):
        tail.poll()
        time.sleep(0.005)
    assert asked == []
    path.write_bytes(lines(records(*course()))[0])
    until(tail, lambda: bool(asked))

    assert min(asked) > 0


def test_writers_are_never_in_the_way(tmp_path: Path):
    """While somebody follows as fast as possible, journals are made, locked and written without trouble."""
    stop = threading.Event()

    def follow() -> None:
        tail = tail_of(str(tmp_path / RUN))
        while not stop.is_set():
            tail.poll()

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        troubles = []
        for rank in range(150):
            journal = Written(tmp_path / RUN, rank)
            journal.write(6)
            journal.writer.close()
            troubles.append(journal.writer.trouble)
    finally:
        stop.set()
        follower.join()

    assert set(troubles) == {None}


def test_run_that_is_deleted(tmp_path: Path, written: Callable[..., Written]):
    """Where the files go while they are followed, what was read is told."""
    journal = written(0)
    journal.write(4)
    tail = tail_of(str(tmp_path / RUN))
    until(tail, lambda: bool(states(tail)))
    journal.path.unlink()
    journal.path.parent.rmdir()

    assert over(tail) == "incomplete"
    assert tail.final().processes[0].history.state == "load_weights"


def test_nothing_but_half_an_event(tmp_path: Path):
    """A journal that ends within its first event says so, as for every reader."""
    path = tmp_path / "rank-00000.1.jsonl"
    path.write_bytes(lines(records(*course()))[0][:50])
    tail = tail_of(str(path))
    until(tail, lambda: tail.is_over)

    with pytest.raises(JournalError, match="no whole event in this journal"):
        tail.final()


def test_unreadable(tmp_path: Path):
    """What is there and cannot be read is an error, not something to wait for."""
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="Not a directory"):
        tail_of(str(tmp_path / "file" / "more")).poll()
    with pytest.raises(JournalError, match="null"):
        tail_of("a\0b").poll()


def test_following_costs_little(tmp_path: Path, written: Callable[..., Written]):
    """Eight ranks that stand still cost less than a millisecond a look."""
    for rank in range(8):
        written(rank).write(4)
    tail = tail_of(str(tmp_path / RUN))
    until(tail, lambda: len(states(tail)) == 8)
    began = time.process_time()
    for _ in range(100):
        tail.poll()

    assert (time.process_time() - began) / 100 < 1e-3


def test_descriptors_are_not_kept(tmp_path: Path, written: Callable[..., Written]):
    """However many ranks there are, none of their journals stays open."""
    for rank in range(20):
        written(rank).write(2)
    tail = tail_of(str(tmp_path / RUN))
    before = len([*Path("/proc/self/fd").iterdir()])
    until(tail, lambda: len(states(tail)) == 20)

    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_log_that_grows(tmp_path: Path):
    """The log of an engine is followed to its closing line; the bar at its end is told."""
    path = tmp_path / "vllm.log"
    path.touch()
    tail = tail_of(str(path))
    assert not tail.poll()
    with path.open("a") as file:
        print(VLLM, file=file, flush=True, end="")
        until(tail, lambda: [state for _, state in states(tail)] == ["load_weights"])
        print(SHARDS, file=file, flush=True, end="")
        until(tail, lambda: (sight := tail.sight()) is not None and sight.bar is not None and sight.bar.done == 3)
        sight = tail.sight()
        assert sight is not None
        assert sight.bar == Bar("Loading safetensors checkpoint shards", 3, 4)
        assert not tail.is_over
        print(READY, file=file, flush=True, end="")

        assert over(tail) == "ready"


def test_log_that_dies(tmp_path: Path):
    """A log that tells of a failure is over when nothing more comes; while somebody writes it, a little later."""
    path = tmp_path / "vllm.log"
    path.write_text(VLLM + DEAD)
    began = time.monotonic()
    assert over(tail_of(str(path))) == "oom"
    alone = time.monotonic() - began
    with path.open("a") as file:
        holder = subprocess.Popen(["sleep", "60"], stdout=file)
    try:
        path.write_text(VLLM + DEAD)
        began = time.monotonic()
        assert over(tail_of(str(path))) == "oom"
        held = time.monotonic() - began
    finally:
        holder.kill()
        holder.wait()

    assert alone > 0.15
    assert held > 0.5


def test_silent_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A log that tells of no end is followed while somebody has it open for writing, and over when nobody has."""
    monkeypatch.setattr(streams, "_SILENT_S", 0.4)
    path = tmp_path / "vllm.log"
    path.write_text(VLLM)
    with path.open("a") as file:
        holder = subprocess.Popen(["sleep", "60"], stdout=file)
    try:
        tail = tail_of(str(path))
        until(tail, lambda: bool(states(tail)))
        end = time.monotonic() + 0.8
        while time.monotonic() < end:
            tail.poll()
            assert not tail.is_over
            time.sleep(0.02)
    finally:
        holder.kill()
        holder.wait()

    assert over(tail) == "incomplete"


def test_readers_are_no_writers(tmp_path: Path):
    """Whoever only reads a log does not keep it alive."""
    path = tmp_path / "vllm.log"
    path.write_text(VLLM)
    source = GrowingFile(path)
    source.poll()
    with path.open() as reader, subprocess.Popen(["sleep", "60"], stdin=reader) as holder:
        assert not source.is_written()
        holder.kill()


def test_rotated_log(tmp_path: Path):
    """A log that is replaced begins again."""
    path = tmp_path / "vllm.log"
    path.write_text(VLLM + READY)
    tail = TextTail(GrowingFile(path), str(path))
    tail.poll()
    assert tail.is_over
    path.rename(tmp_path / "vllm.log.1")
    path.write_text(VLLM)
    tail.poll()

    assert [state for _, state in states(tail)] == ["load_weights"]
    assert not tail.is_over


def test_next_start_of_a_log(tmp_path: Path):
    """With ``is_next`` what a log holds already does not count."""
    path = tmp_path / "vllm.log"
    path.write_text(VLLM + READY)
    tail = tail_of(str(path), is_next=True)
    for _ in range(3):
        assert not tail.poll()
        assert not tail.is_over
    with path.open("a") as file:
        file.write(VLLM)
        file.flush()
        until(tail, lambda: [state for _, state in states(tail)] == ["load_weights"])


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The writing end of a pipe that is in the place of standard input; a test closes it."""
    there, here = os.pipe()
    monkeypatch.setattr("startup_fsm.tail.choice.STDIN_DESCRIPTOR", there)
    yield here
    os.close(there)


@pytest.fixture
def pipe() -> Iterator[Tail]:
    """What follows standard input."""
    with closing(tail_of("-")) as tail:
        yield tail


def test_pipe(here: int, pipe: Tail):
    """A pipe is followed without waiting for its end; its end is the end of its writer."""
    tail = pipe
    assert not tail.poll()
    os.write(here, VLLM.encode())
    until(tail, lambda: [state for _, state in states(tail)] == ["load_weights"])
    assert not tail.is_over
    os.close(here)

    assert over(tail) == "incomplete"
    assert tail.final().origin.startswith("-:")


@pytest.mark.parametrize("way", ["journal", "mirror"])
def test_events_through_a_pipe(here: int, pipe: Tail, way: str):
    """A journal, or mirrored lines among other text, come through a pipe; while it is open they are running."""
    given = records(*course())
    texts = lines(given)
    if way == "mirror":
        texts = [f"noise\n{text}\n".encode() for record in given for text in mirror_texts(record)]
    tail = pipe
    os.write(here, b"".join(texts[:4]))
    until(tail, lambda: states(tail) == [("rank 0", "load_weights")])
    sight = tail.sight()
    assert sight is not None
    assert [each.is_alive for each in sight.start.processes] == [True]
    assert not tail.is_over
    os.write(here, b"".join(texts[4:]))

    assert over(tail) == "ready"
    os.close(here)
    tail.drain()


def test_pipe_is_drained(here: int, pipe: Tail):
    """When the start is over its writer can still write: nobody closes its pipe."""
    tail = pipe
    os.write(here, (VLLM + READY).encode())
    until(tail, lambda: tail.is_over)

    def serve() -> None:
        for _ in range(40):
            os.write(here, b"INFO: 200 OK\n" * 1_000)
        os.close(here)

    server = threading.Thread(target=serve)
    server.start()
    tail.drain()
    server.join(timeout=10)

    assert not server.is_alive()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<00:03]", ("Loading safetensors checkpoint shards", 1, 4)),
        (b"Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  43%|\xe2\x96\x88\xe2\x96\x88  | 22/51 [00:01]", ("Capturing CUDA graphs", 22, 51)),
        (b"Capturing batches (bs=4 avail_mem=1.00 GB):   4%|\xe2\x96\x8d     | 1/23 [00:00]", ("Capturing batches", 1, 23)),
        (b"Capturing a:  1%| | 1/9\rCapturing a:  2%| | 2/9", ("Capturing a", 2, 9)),
        (b"nothing of the kind: 12/13", None),
        (b"", None),
    ],
)  # fmt: skip
def test_bars(text: bytes, expected: tuple[str, int, int] | None):
    """The last bar of a text, as tqdm and the loaders of engines print it."""
    assert last_bar(text) == (None if expected is None else Bar(*expected))


def test_bars_are_found_in_linear_time():
    """Text that nearly is a bar, many times, costs nothing to speak of."""
    began = time.process_time()
    for text in (b"A" * 8_192, b"Aa " * 2_700, b"Abc: 1%|" + b" " * 8_000, b"Abcd (" * 1_400):
        last_bar(text)

    assert time.process_time() - began < 1


def test_failure_that_is_answered_is_no_end(here: int, pipe: Tail):
    """A mirrored start whose state failed is not over while it may go on."""
    failed = StateFailed(state="load_weights", error_type="E", category="raised", message="m")
    given = records(*course()[:4], failed)
    tail = pipe
    os.write(here, b"".join(f"{text}\n".encode() for record in given for text in mirror_texts(record)))
    until(tail, lambda: states(tail) == [("rank 0", "load_weights")])
    assert not tail.is_over
    again = attrs.evolve(given[-1], seq=5, kind="state_entered", event=StateEntered(state="load_weights", visit=2))
    os.write(here, b"".join(f"{text}\n".encode() for text in mirror_texts(again)))
    until(tail, lambda: (sight := tail.sight()) is not None and sight.start.processes[0].history.records == 6)
    os.close(here)

    assert over(tail) == "incomplete"


def test_public_names_of_the_reader():
    """What following shares with the reader is the reader's."""
    assert journals.is_held is reading.is_held
    assert streams.starts_in is reading.starts_in
