"""Eight processes on one pipe, talking of other things too: what is fished out is what the journals say."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

#: Starts eight processes whose mirror is standard output; each makes noise of its own there all the while.
SCRIPT = """
import gc, os, random, sys, threading
from startup_fsm import Knobs
from startup_fsm.memory import GIB, MIB
from startup_fsm.testing import counting_start

#: What each process starts with: so many bytes, settings, attributes of the engine.
SCENES = {
    "ready": (4 * GIB, {}, {}),
    "retried": (4 * GIB, {"graph_estimate": "none", "utilization": 1.0, "retries": 2}, {"row": 8 * MIB}),
    "weights": (1 * GIB, {}, {"weights": 2 * GIB}),
    "graphs": (4 * GIB, {"graph_estimate": "none", "utilization": 1.0}, {"row": 8 * MIB}),
    "budget": (4 * GIB, {"utilization": 0.3}, {}),
    "request": (4 * GIB, {}, {"tokens": 10**6}),
}

def noise(number, over):
    words = random.Random(number)
    while not over.is_set():
        # Whole lines, lines that are left open, and lines so long that a pipe tears them.
        text = f"noise of {number} " + "x" * words.choice((0, 80, 3_000, {longest}))
        os.write(1, text.encode() + words.choice((b"\\n", b"\\n", {end!r})))
        over.wait(words.random() / 500)

def start(number, scene, journal):
    total, knobs, engine = SCENES[scene]
    over = threading.Event()
    thread = threading.Thread(target=noise, args=(number, over))
    thread.start()
    # Odd ones log a lot: an event of theirs takes several lines.
    engine = engine | {"name": "counting"}
    boot, engine = counting_start(
        total_bytes=total, engine=engine, journal=journal, mirror=sys.stdout, knobs=Knobs(**knobs),
        settings={"notes": "long " * 2_000} if number % 2 else {},
    )
    try:
        boot.run(engine)
    except Exception:
        pass
    over.set()
    thread.join()

# Settling collects garbage; what is there already need not be looked at again by every child.
gc.freeze()
journal, *scenes = sys.argv[1:]
pids = []
for number, scene in enumerate(scenes):
    pids.append(os.fork())
    if pids[-1] == 0:
        if "STARTUP_FSM_RUN" in os.environ:
            os.environ["RANK"] = str(number)
        start(number, scene, journal)
        os._exit(0)
for pid in pids:
    assert os.waitpid(pid, 0)[1] == 0
"""
LINE = re.compile(rb'\{"timestamp":[^\n]*\n')
READY = ["ready"] * 7 + ["retried"]
FAILING = ["weights", "graphs", "budget", "request", "graphs", "ready", "retried", "weights"]
ONE_RANK_FAILS = ["ready"] * 3 + ["graphs"] + ["ready"] * 4


def mixed_output(environment, runs, scenes, *, longest=200, end=b"\n", **more):
    """What eight processes wrote into one pipe."""
    script = SCRIPT.replace("{longest}", str(longest)).replace("{end!r}", repr(end))
    command = [sys.executable, "-c", script, str(runs), *scenes]
    ran = subprocess.run(command, env=environment | more, stdout=subprocess.PIPE, check=True, timeout=120)
    return ran.stdout


def told(verdicts):
    """Everything that verdicts say but where they were read, by run."""
    return {
        verdict["run"]: {name: value for name, value in verdict.items() if name not in ("source", "origin")}
        for verdict in verdicts
    }


@pytest.mark.parametrize("scenes", [READY, FAILING], ids=["ready", "failing"])
def test_eight_starts(tmp_path, environment, doctor, scenes):
    """Eight starts, ready or failing in several ways: the verdict from the pipe is the verdict from the journals."""
    output = mixed_output(environment, tmp_path, scenes)

    written, mirrored = doctor(*sorted(tmp_path.iterdir())), doctor(text=output)

    assert len(written) == 8
    assert {verdict["source"] for verdict in mirrored} == {"mirror"}
    assert told(mirrored) == told(written)
    outcomes = sorted(verdict["outcome"] for verdict in written)
    expected = {"ready": "ready", "retried": "ready", "weights": "oom", "graphs": "oom"}
    assert outcomes == sorted(expected.get(scene, "error") for scene in scenes)


def test_one_start_of_eight_ranks(tmp_path, environment, doctor, gist):
    """One start of eight ranks of which one fails: the same, and the rank is named."""
    output = mixed_output(environment, tmp_path, ONE_RANK_FAILS, STARTUP_FSM_RUN="r1")

    (written,), (mirrored,) = doctor(tmp_path / "r1"), doctor(text=output)

    assert told([mirrored]) == told([written])
    assert gist(mirrored) == ("oom", "capture_graphs", "graphs.not_reserved")
    assert (mirrored["ranks"], mirrored["failed_rank"]) == (8, "rank 3")
    assert set(mirrored["figures_by_rank"]) == {f"rank {number}" for number in range(8)}


def test_noise_that_tears(tmp_path, environment, doctor):
    """Noise of others that is torn itself, or lacks its newline, does no harm to lines of ours."""
    output = mixed_output(environment, tmp_path, FAILING, longest=20_000, end=b"")

    assert told(doctor(text=output)) == told(doctor(*sorted(tmp_path.iterdir())))


def test_length_of_lines(tmp_path, environment):
    """No mirrored line has more than 4,096 bytes with its newline, also of an event that takes several."""
    output = mixed_output(environment, tmp_path, READY)

    lengths = [len(line) for line in LINE.findall(output)]

    assert len(lengths) > 8 * 100
    assert 3_900 < max(lengths) <= 4_096


def test_reader_that_goes_away(tmp_path, python, doctor):
    """A reader that closes the pipe turns the mirror off, which is said once; the start and its journal go on."""
    script = """
        import sys
        from startup_fsm.testing import counting_start

        boot, engine = counting_start(journal=sys.argv[1], mirror=sys.stdout)
        sys.stdin.readline()
        boot.run(engine)
    """
    process = python(script, tmp_path, stdin=subprocess.PIPE)
    process.stdout.close()
    process.stdin.write("the pipe is closed now\n")
    process.stdin.close()
    said = process.stderr.read()

    assert process.wait() == 0, said
    assert said.count("events are no longer mirrored") == 1
    (verdict,) = doctor(tmp_path)
    assert (verdict["outcome"], verdict["findings"]) == ("ready", [])
