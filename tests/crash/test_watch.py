"""Starts that are watched while they run: slow ones, killed ones, eight ranks; on a screen, in lines, through a pipe."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid

import pytest

from startup_fsm.reading import read_starts
from startup_fsm.testing import counting_start

RUN = "20300101T000000Z-00000000"
COMMAND = [sys.executable, "-m", "startup_fsm", "watch"]

#: Forks a start for each rank: slow where it loads shards and captures; a rank that is named waits for ever in the
#: middle of its captures, and says so.
SLOW = """
    import os, sys, time
    import startup_fsm.step
    from startup_fsm.bootstrap import Bootstrap
    from startup_fsm.devices.simulated import SimulatedDevice
    from startup_fsm.engines.counting import CountingEngine
    from startup_fsm.memory import GIB

    runs, ranks, pause, stuck = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    startup_fsm.step._NOTE_S = pause / 2

    class Slow(CountingEngine):
        def load_weights(self, step):
            super().load_weights(step)
            for shard in range(1, 5):
                time.sleep(pause)
                step.progress(shard, 4, "shards")

        def capture(self, step, size):
            super().capture(step, size)
            time.sleep(pause)
            if step.state == "capture_graphs" and size == 4 and stuck == os.environ["RANK"]:
                print(os.getpid(), flush=True)
                time.sleep(600)

    children = []
    for rank in range(ranks):
        children.append(os.fork())
        if children[-1] == 0:
            os.environ["RANK"] = str(rank)
            device = SimulatedDevice(4 * GIB)
            with Bootstrap(device=device, journal=runs, discover=False, progress=False) as boot:
                boot.run(Slow(device=device))
            os._exit(0)
    for child in children:
        os.waitpid(child, 0)
"""


@pytest.fixture
def slow(python, tmp_path):
    """Begin a slow start of so many ranks in ``tmp_path / "runs"``."""

    def begin(ranks=1, *, pause=0.1, stuck="none"):
        environment = {"STARTUP_FSM_RUN": RUN, "WORLD_SIZE": str(ranks)}
        return python(SLOW, tmp_path / "runs", ranks, pause, stuck, env=environment)

    return begin


@pytest.fixture
def watch(environment):
    """Watch a path in a process of its own."""
    started = []

    def begin(*arguments, **options):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment, **options}
        started.append(subprocess.Popen([*COMMAND, *map(str, arguments)], **options))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


class Terminal:
    """A process on a terminal of its own, and what is on its screen."""

    def __init__(self, command, environment, *, columns=80, rows=24, kind="xterm-256color"):
        pyte = pytest.importorskip("pyte", reason="pyte draws what is written to a terminal")
        self.raw = b""
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self._descriptor, there = pty.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            command, stdin=there, stdout=there, stderr=there, env={**environment, "TERM": kind}, start_new_session=True
        )
        os.close(there)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self._descriptor)

    @property
    def lines(self):
        return [line.rstrip() for line in self.screen.display]

    def read(self, seconds=0.05):
        """Take what was written; False at the end."""
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return True
        try:
            block = os.read(self._descriptor, 1 << 16)
        except OSError:
            # What Linux says when the last one that had it open is gone.
            return False
        self.raw += block
        self._stream.feed(block)
        return bool(block)

    def until(self, pattern, seconds=60):
        """The screen that first has a line like this."""
        end = time.monotonic() + seconds
        while not any(re.search(pattern, line) for line in self.lines):
            assert time.monotonic() < end, "\n".join(self.lines)
            assert self.read(), "\n".join(self.lines)
        return self.lines

    def end(self, seconds=60):
        """Read to the end; the exit code."""
        end = time.monotonic() + seconds
        while self.read():
            assert time.monotonic() < end, "\n".join(self.lines)
        return self.process.wait(timeout=seconds)


def rows(lines):
    """Rows of ranks without what changes with every moment: label and state, shards or captures, memory."""
    found = {}
    for line in lines:
        match = re.match(r"(rank \d+) (.*?)  ", f"{line}  ")
        if match:
            amounts = re.findall(r"\d+/\d+ \w+|[\d.]+/4\.0 GiB", line)
            found[match[1]] = (re.sub(r" [\d:]+( s)?( .*)?$", "", match[2]), *amounts)
    return found


def test_slow_start_in_lines(slow, watch, doctor, tmp_path):
    """Before it is there, while it runs, to its verdict: one line per change, then what the doctor says."""
    watcher = watch(tmp_path / "runs")
    assert watcher.stdout.readline() == f"waiting for {tmp_path / 'runs'}\n"
    slow()
    out, err = watcher.stdout.read(), watcher.stderr.read()
    happened = [line.split("rank 0  ")[1] for line in out.splitlines() if "  rank 0  " in line]
    told, _, verdict = out.partition("\nready\n")

    assert watcher.wait(timeout=60) == 0
    assert err == ""
    assert [line for line in happened if line.startswith("enters ")] == [
        f"enters {state}"
        for state in [visit.state for visit in read_starts(tmp_path / "runs")[0].processes[0].history.visits]
    ]
    assert any(re.fullmatch(r"load_weights: [1-4]/4 shards", line) for line in happened)
    assert any(re.fullmatch(r"capture_graphs: [1-5]/5 graphs", line) for line in happened)
    assert re.search(r"  ready after [\d.]+ s\n?$", told)
    assert verdict.startswith(f"  run      {RUN}, attempt 1\n")
    assert doctor(tmp_path / "runs")[0]["outcome"] == "ready"


def test_start_that_is_killed(slow, watch, tmp_path):
    """A start that is killed while it is watched: that it is gone is said, then the verdict; exit code 3."""
    start = slow(stuck="0")
    watcher = watch(tmp_path / "runs")
    os.kill(int(start.stdout.readline()), signal.SIGKILL)
    out, err = watcher.communicate(timeout=60)

    assert watcher.returncode == 3
    assert err == ""
    assert "        -  rank 0  error  gone in capture_graphs: nobody writes its journal any more\n" in out
    assert "\nincomplete in capture_graphs\n" in out
    assert "run.ended_without_trace in capture_graphs" in out


def test_eight_ranks_on_a_screen(slow, tmp_path, environment):
    """Eight ranks in one run: a row for each, with shards, captures and memory; the one that is killed is gone."""
    with Terminal([*COMMAND, str(tmp_path / "runs")], environment) as terminal:
        # The path may be longer than a line.
        assert str(tmp_path / "runs") in "".join(terminal.until("^waiting for"))
        start = slow(8, pause=0.2, stuck="3")
        # Whichever is slow enough to be seen at it: this machine may have less cores than there are ranks.
        lines = terminal.until(r"^rank \d load_weights +\d+ s .* [1-4]/4 shards")
        assert lines[0].startswith(f"run {RUN}, attempt 1")
        lines = terminal.until("^counting, on simulated 4 GiB, plan throwaway, 8 processes$")
        assert set(rows(lines)) == {f"rank {rank}" for rank in range(8)}
        os.kill(int(start.stdout.readline()), signal.SIGKILL)
        lines = terminal.until("^rank 3 gone in capture_graphs")
        assert rows(lines)["rank 3"] == ("gone in capture_graphs", "3/5 graphs", "3.4/4.0 GiB")
        assert any(line.startswith("so far (rank ") for line in lines)
        assert any("  note  reserve_for_graphs" in line for line in lines)
        assert terminal.end() == 3

    assert b"\x1b[?1049h" in terminal.raw
    assert terminal.raw.rindex(b"\x1b[?1049l") > terminal.raw.rindex(b"\x1b[?1049h")
    assert b"\x1b[?25h" in terminal.raw
    shown = terminal.raw.rpartition(b"\x1b[?1049l")[2].decode()
    assert "incomplete" in shown
    assert "run.ended_without_trace" in shown


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_under_tmux(slow, tmp_path, environment):
    """Under tmux, while a slow start runs: the screen is drawn, and at the end the terminal has the verdict."""
    tmux = ["tmux", "-L", f"startup-fsm-{uuid.uuid4().hex[:12]}", "-f", "/dev/null"]
    shell = " ".join([*COMMAND, str(tmp_path / "runs"), "; echo code $?; sleep 60"])

    def captured():
        ran = subprocess.run([*tmux, "capture-pane", "-p"], capture_output=True, text=True, env=environment, check=True)
        return [line.rstrip() for line in ran.stdout.splitlines()]

    def until(pattern):
        end = time.monotonic() + 60
        while not any(re.search(pattern, line) for line in captured()):
            assert time.monotonic() < end, "\n".join(captured())
            time.sleep(0.05)
        return captured()

    began = [*tmux, "new-session", "-d", "-x", "100", "-y", "30", shell]
    subprocess.run(began, env={**environment, "TERM": "xterm-256color"}, check=True)
    try:
        until("^waiting for")
        slow(2, pause=0.3)
        loading = rows(until(r"^rank 1 load_weights .*[1-4]/4 shards"))
        capturing = rows(until(r"^rank 1 capture_graphs .*[1-5]/5 graphs"))
        ended = until("^code 0$")
    finally:
        subprocess.run([*tmux, "kill-server"], env=environment, capture_output=True, check=False)

    assert loading["rank 1"][0] == "load_weights"
    assert loading["rank 1"][1].endswith("/4 shards")
    assert loading["rank 1"][2] == "0.6/4.0 GiB"
    assert capturing["rank 1"][1].endswith("/5 graphs")
    assert float(capturing["rank 1"][2].split("/")[0]) > 3
    assert not any(line.startswith("rank ") for line in ended)
    assert any("weights_bytes" in line for line in ended)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_watcher_that_is_ended(slow, tmp_path, environment, number):
    """A signal that ends the watcher gives the terminal back first, and the start goes on."""
    start = slow(stuck="0")
    with Terminal([*COMMAND, str(tmp_path / "runs")], environment) as terminal:
        terminal.until("^rank 0 capture_graphs .* 3/5 graphs")
        terminal.process.send_signal(number)
        assert terminal.end() in (128 + number, -number)

    assert terminal.raw.rindex(b"\x1b[?1049l") > terminal.raw.rindex(b"\x1b[?1049h")
    assert terminal.raw.rindex(b"\x1b[?25h") > terminal.raw.rindex(b"\x1b[?25l")
    assert b"Traceback" not in terminal.raw
    os.kill(int(start.stdout.readline()), signal.SIGKILL)


def test_dumb_terminal(slow, tmp_path, environment):
    """A terminal that cannot move its cursor gets lines."""
    slow()
    with Terminal([*COMMAND, str(tmp_path / "runs")], environment, kind="dumb") as terminal:
        assert terminal.end() == 0

    assert b"rank 0  enters load_weights" in terminal.raw
    assert b"\x1b[?1049h" not in terminal.raw


def test_json(slow, watch, tmp_path):
    """With --json stdout is the verdict as the doctor has it, and the lines are talk."""
    slow()
    out, err = watch(tmp_path / "runs", "--json").communicate(timeout=60)
    answer = json.loads(out)

    assert [run["outcome"] for run in answer["runs"]] == ["ready"]
    assert "rank 0  enters load_weights\n" in err


def test_through_a_pipe(watch, python, tmp_path):
    """Mirrored events come through a pipe; the writer goes on after the start is ready, and is not ended by us."""
    script = """
        import sys
        from startup_fsm.testing import counting_start
        boot, engine = counting_start(mirror=sys.stdout, progress=False)
        boot.run(engine)
        for _ in range(20_000):
            print("INFO: 200 OK " + "x" * 50)
        print("served", file=sys.stderr)
    """
    engine = python(script, text=False)
    watcher = watch("-", stdin=engine.stdout)
    engine.stdout.close()
    out, _ = watcher.communicate(timeout=60)

    assert engine.stderr.read() == b"served\n"
    assert engine.wait() == 0
    assert watcher.returncode == 0
    assert "  enters verify\n" in out
    assert "\nready\n" in out


def test_reader_that_has_seen_enough(slow, tmp_path, environment):
    """Whoever reads the lines may stop: no traceback, and the exit code that shells give to SIGPIPE."""
    slow()
    with subprocess.Popen([*COMMAND, str(tmp_path / "runs")], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watcher:  # fmt: skip
        watcher.stdout.readline()
        watcher.stdout.close()
        assert watcher.stderr.read() == b""
        assert watcher.wait(timeout=60) == 128 + signal.SIGPIPE


def test_watching_costs_little(slow, tmp_path, environment):
    """While nothing happens, watching a start on a screen takes few percent of one core."""
    start = slow(stuck="0")
    with Terminal([*COMMAND, str(tmp_path / "runs")], environment) as terminal:
        terminal.until("^rank 0 capture_graphs .* 3/5 graphs")
        before, began = cpu_seconds(terminal.process.pid), time.monotonic()
        while time.monotonic() - began < 2:
            terminal.read()
        spent = (cpu_seconds(terminal.process.pid) - before) / (time.monotonic() - began)
    os.kill(int(start.stdout.readline()), signal.SIGKILL)

    assert spent < 0.1


def cpu_seconds(pid):
    """Processor time of a process so far."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:  # noqa: PTH123 - one line
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_replaced_while_it_is_watched(watch, tmp_path, monkeypatch):
    """A journal that is torn, then replaced by that of another start, is followed to the other's end."""
    journals = []
    for number in range(2):
        monkeypatch.setenv("STARTUP_FSM_RUN", f"{RUN}-{number}")
        monkeypatch.setenv("STARTUP_FSM_RUN_OWNER", "0")
        boot, engine = counting_start(journal=tmp_path / "made", rank=0, progress=False)
        boot.run(engine)
        journals.append(boot.path.read_bytes())
    path = tmp_path / RUN / "rank-00000.1.jsonl"
    path.parent.mkdir()
    with path.open("wb", buffering=0) as file:
        # The lock is what says that it has a writer.
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(journals[0][: len(journals[0]) // 3])
        watcher = watch(path.parent)
        assert " begins on " in watcher.stdout.readline()
        time.sleep(1.5)
        assert watcher.poll() is None
        (tmp_path / "new").write_bytes(journals[1])
        (tmp_path / "new").replace(path)
        # Not communicate(), which would forget what readline() has taken too much.
        out, err = watcher.stdout.read(), watcher.stderr.read()

    assert (watcher.wait(timeout=60), err) == (0, "")
    assert out.count(" begins on ") == 1
    assert out.count(" enters init_device\n") == 2
    assert f"\nready\n  run      {RUN}-1, attempt 1\n" in out


def test_path_that_cannot_be(watch, tmp_path):
    """What is there and cannot be followed is an error with a hint, exit code 4; an option that does not exist is 1."""
    (tmp_path / "file").touch()
    _, err = (watcher := watch(tmp_path / "file" / "more")).communicate(timeout=60)
    assert (watcher.returncode, err.splitlines()[1].startswith("hint: ")) == (4, True)
    _, err = (watcher := watch("--none")).communicate(timeout=60)
    assert watcher.returncode == 1
    with contextlib.suppress(ProcessLookupError):
        watcher.send_signal(signal.SIGTERM)
