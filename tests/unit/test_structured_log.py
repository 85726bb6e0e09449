"""The mirror as a structured log: short lines, one write each, and no trouble for whoever starts an engine."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import orjson
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from startup_fsm.events import NoteAdded, Record, StateEntered, StateFailed
from startup_fsm.fishing import fish
from startup_fsm.mirror import LINE_LIMIT
from startup_fsm.structured_log import KEY, Mirror

PROCESSES = 8
EVENTS = 60

CHILD = textwrap.dedent("""
    import os, random, sys
    from startup_fsm.events import NoteAdded, Record
    from startup_fsm.structured_log import Mirror

    rank = int(sys.argv[1])
    noise = random.Random(rank)
    mirror = Mirror(stdout=True)
    for seq in range(int(sys.argv[2])):
        note = {"n": seq, "text": chr(200 + rank) * noise.choice([10, 100, 1000, 5000])}
        event = NoteAdded(state="load_weights", note=note)
        mirror.write(Record(run="r", process=f"rank-{rank:05}", rank=rank, seq=seq, t=seq, kind=event.kind, event=event))
        size = noise.choice([0, 20, 500, 6000])
        os.write(1, b"startup noise | of rank %d " % rank + b"." * size + b"\\n" * noise.choice([0, 1]))
        print("print", rank, "y" * noise.choice([1, 300, 9000]), flush=noise.random() < 0.5)
    assert mirror.trouble is None
""")


def record(seq=0, event=None, *, process="rank-00000", kind=None):
    event = event or NoteAdded(state="load_weights", note={"n": seq})
    return Record(run="r1", process=process, seq=seq, t=0, kind=kind or event.kind, event=event)


class TestLines:
    def test_fields(self):
        """A line is JSON: when, how grave, what, whose, in which state, and the text."""
        stream = io.StringIO()
        Mirror(stream).write(record(0, StateEntered(state="load_weights")))
        line = json.loads(stream.getvalue())
        assert list(line) == ["timestamp", "level", "event", "process", "state", KEY]
        assert line["timestamp"].endswith("Z")
        assert (line["level"], line["event"], line["state"]) == ("info", "state_entered", "load_weights")

    def test_levels(self):
        """A failure is an error."""
        stream = io.StringIO()
        failed = StateFailed(state="verify", error_type="E", category="raised", message="m")
        Mirror(stream).write(record(0, failed))
        assert json.loads(stream.getvalue())["level"] == "error"

    @settings(max_examples=80, deadline=None)
    @given(st.text(max_size=300), st.text(max_size=300), st.text(max_size=300), st.text(max_size=6_000))
    def test_bound(self, kind, process, state, text):
        """No line is longer than 4,096 bytes with its newline, whatever the event is called and holds."""
        stream = io.BytesIO()
        mirror = Mirror(stream)
        mirror.write(record(2**62, NoteAdded(state=state, note={text: text}), process=process, kind=kind or "x"))
        assert mirror.trouble is None
        for line in stream.getvalue().splitlines(keepends=True):
            assert len(line) <= LINE_LIMIT
            assert line.endswith(b"}\n")
            assert "state" in json.loads(line) or not state

    def test_longest_names(self):
        """The names beside the text leave room for it at their longest."""
        stream = io.BytesIO()
        Mirror(stream).write(
            record(0, NoteAdded(state="s" * 99, note={"t": "x" * 20_000}), process="p" * 999, kind="k" * 99)
        )
        longest = max(stream.getvalue().splitlines(keepends=True), key=len)
        assert b'"timestamp"' in longest
        assert 4_000 < len(longest) <= LINE_LIMIT

    def test_own_configuration(self):
        """What an application tells structlog does not reach the mirror, and the mirror tells structlog nothing."""
        before = structlog.get_config()
        try:
            structlog.configure(
                processors=[lambda *_: "broken"], wrapper_class=structlog.make_filtering_bound_logger(50)
            )
            configured = structlog.get_config()
            stream = io.StringIO()
            Mirror(stream).write(record())
            assert len(fish(stream.getvalue()).journals) == 1
            assert structlog.get_config() == configured
        finally:
            structlog.configure(**before)

    def test_given_line(self):
        """The line of the journal is taken as it is."""
        stream = io.StringIO()
        body = {
            "v": 0,
            "run": "r1",
            "process": "rank-00000",
            "attempt": 1,
            "seq": 0,
            "t": 0,
            "kind": "new",
            "payload": {"a": 1},
        }
        Mirror(stream).write(record(), orjson.dumps(body) + b"\n")
        (journal,) = fish(stream.getvalue()).journals
        assert journal.records[0].kind == "new"


class TestTrouble:
    def test_broken_pipe(self, capsys):
        """A reader that has gone turns the mirror off, said once, and nothing is raised."""
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "wb", buffering=0) as stream:
            mirror = Mirror(stream)
            mirror.write(record())
            mirror.write(record(1))
        assert "BrokenPipeError" in mirror.trouble
        said = capsys.readouterr().err
        assert said.count("no longer mirrored") == 1
        assert "hint:" in said

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
    def test_full_disk(self):
        """A full disk turns it off."""
        with Path("/dev/full").open("wb", buffering=0) as stream:
            mirror = Mirror(stream)
            mirror.write(record())
        assert "No space left" in mirror.trouble

    def test_closed(self):
        """A stream that was closed turns it off; the number of its descriptor may be another file's."""
        with Path(os.devnull).open("wb") as stream:
            mirror = Mirror(stream)
        mirror.write(record())
        assert "closed" in mirror.trouble

    def test_none(self, monkeypatch):
        """A process without stderr starts all the same."""
        monkeypatch.setattr(sys, "stderr", None)
        mirror = Mirror()
        mirror.write(record())
        assert mirror.trouble is not None

    def test_full_pipe(self, monkeypatch):
        """A non-blocking pipe that nobody reads turns it off, after whole lines only."""
        monkeypatch.setattr("startup_fsm.structured_log._FULL_S", 0.01)
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        with os.fdopen(writing, "wb", buffering=0) as stream, os.fdopen(reading, "rb") as reader:
            mirror = Mirror(stream)
            for seq in range(2_000):
                mirror.write(record(seq))
            assert "nobody reads it" in mirror.trouble
            stream.close()
            content = reader.read()
        assert content.endswith(b"}\n")
        assert fish(content).journals[0].problems == ()

    def test_value_of_no_kind(self):
        """What JSON cannot hold is mirrored as text."""
        stream = io.StringIO()
        mirror = Mirror(stream)
        mirror.write(record(0, NoteAdded(note={"bad": "\ud800", "big": 1 << 80, "odd": object()})))
        assert mirror.trouble is None
        assert len(fish(stream.getvalue()).journals) == 1

    def test_forked_child(self):
        """A forked child's copy writes nothing: it would repeat the numbers of its parent."""
        reading, writing = os.pipe()
        with os.fdopen(writing, "wb", buffering=0) as stream, os.fdopen(reading, "rb") as reader:
            mirror = Mirror(stream)
            child = os.fork()
            if child == 0:
                mirror.write(record(1))
                os._exit(0)
            os.waitpid(child, 0)
            mirror.write(record(0))
            stream.close()
            assert reader.read().count(b"\n") == 1


def test_one_pipe():
    """Eight processes on one pipe, each with noise of its own: not one mirrored line is torn, all journals are whole."""
    reading, writing = os.pipe()
    command = [sys.executable, "-c", CHILD]
    children = [
        subprocess.Popen([*command, str(rank), str(EVENTS)], stdout=writing, env={**os.environ, "PYTHONUNBUFFERED": ""})
        for rank in range(PROCESSES)
    ]
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        content = stream.read()
    assert [child.wait() for child in children] == [0] * PROCESSES
    catch = fish(content)
    assert catch.problems == ()
    assert [journal.records[0].process for journal in catch.journals] == [
        f"rank-{rank:05}" for rank in range(PROCESSES)
    ]
    for journal in catch.journals:
        assert journal.problems == ()
        assert [each.seq for each in journal.records] == list(range(EVENTS))
    assert catch.texts == content.count(b"startup_fsm|0|")
