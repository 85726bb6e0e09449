"""Stacks out of faulthandler's dumps and out of frames."""

from __future__ import annotations

import faulthandler
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from startup_fsm.stacks import FRAME_LIMIT, LEFT, parse_stacks, read_stacks, side_file_name, stack_lines

DUMP = """\
Timeout (0:00:05)!
Thread 0x00007f10aa (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f20bb (most recent call first):
  File "/srv/my engine/capture.py", line 12 in capture
  File "/srv/my engine/main.py", line 3 in <module>
"""


def test_main_thread():
    """The main thread is the last of a dump; its outermost frame comes first."""
    assert parse_stacks(DUMP) == ("/srv/my engine/main.py:3 <module>", "/srv/my engine/capture.py:12 capture")


def test_chosen_thread():
    """A thread can be named by its identity."""
    assert parse_stacks(DUMP, thread=0x7F10AA)[-1] == "/usr/lib/python3.11/threading.py:324 wait"
    assert parse_stacks(DUMP, thread=1) == ()


def test_last_dump():
    """Of several dumps the last counts."""
    assert parse_stacks(DUMP + DUMP.replace("line 12", "line 99"))[-1].endswith(":99 capture")


def test_left():
    """A dump of a state that was left after all is nobody's; one behind it is."""
    left = f"{DUMP}{LEFT}capture_graphs, visit 1\n"
    assert parse_stacks(left) == ()
    assert len(parse_stacks(left + DUMP)) == 2


@pytest.mark.parametrize("head", ["Current thread 0x00007f20bb (most", "Thread 0x00007f20bb [MainThread] (most"])
def test_other_heads(head):
    """Heads of a crash, and of Pythons that name threads, are read."""
    assert len(parse_stacks(DUMP.replace("Thread 0x00007f20bb (most", head))) == 2


def test_real(tmp_path):
    """What faulthandler of this Python writes is read, with a second thread running."""
    path = tmp_path / side_file_name("rank-00000", 1)
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    with path.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    stop.set()
    other.join()
    innermost = read_stacks(path)[-1]
    assert innermost.startswith(f"{__file__}:")
    assert innermost.endswith(" test_real")


@pytest.mark.parametrize(
    "content", [b"", b"\xff\x00\n" * 99, b"Thread 0x", b"Thread 0x1 (most\n", b'  File "a", line 1 in f\n']
)
def test_garbage(tmp_path, content):
    """What is no dump has no stack."""
    path = tmp_path / "x.stacks"
    path.write_bytes(content)
    assert read_stacks(path) == ()


def test_missing(tmp_path):
    """Nor has a file that is not there, or is a directory."""
    assert read_stacks(tmp_path / "none") == ()
    assert read_stacks(tmp_path) == ()


@given(st.text())
def test_any_text(text):
    """Whatever the text, there is an answer."""
    parse_stacks(text)


def test_torn():
    """Of a dump cut at any byte the frames that are whole are given, never those of two threads together."""
    one, two = parse_stacks(DUMP, thread=0x7F10AA), parse_stacks(DUMP)
    for cut in range(len(DUMP)):
        lines = parse_stacks(DUMP[:cut])
        assert all(any(whole.startswith(line) for whole in one) for line in lines) or all(
            any(whole.startswith(line) for whole in two) for line in lines
        )
    assert parse_stacks(DUMP[: DUMP.index("bb (")])[-1].endswith(":324 wait")


def test_huge(tmp_path):
    """Of a huge side file the end is read."""
    path = tmp_path / "x.stacks"
    path.write_text("x" * (3 << 20) + "\n" + DUMP)
    assert len(read_stacks(path)) == 2


def test_frames():
    """A running frame gives its file, line, function and source, innermost last."""
    line = stack_lines(sys._getframe())[-1]
    assert line.startswith(f"{__file__}:")
    assert line.endswith("test_frames: line = stack_lines(sys._getframe())[-1]")


def test_deep():
    """Of a deep recursion the innermost frames stay, and the rest is counted."""

    def deep(levels):
        return stack_lines(sys._getframe()) if levels == 0 else deep(levels - 1)

    lines = deep(300)
    assert len(lines) == FRAME_LIMIT + 1
    assert lines[0].endswith("outer frames")
    assert " deep" in lines[-1]
