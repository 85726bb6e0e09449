"""
Starts over several processes, one of which dies: all others end within seconds, and each journal names rank and state.

``RANKS_ROUNDS=50 pytest tests/crash/test_ranks.py -k long`` kills in every state fifty times over.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter, defaultdict
from pathlib import Path

import attrs
import pytest

from startup_fsm.journal import read_journal
from startup_fsm.plan import PLANS
from startup_fsm.reading import read_starts
from startup_fsm.verdict import EXIT_PEER

DRIVER = Path(__file__).with_name("ranks_driver.py")
SIZE = 4
#: What a killed rank may take the others, in seconds.
LONGEST_S = 5.0
ROUNDS = int(os.environ.get("RANKS_ROUNDS", "1"))


@attrs.frozen
class Ending:
    """What came of the ranks of one start: exit codes, seconds since the kill, what is on record, and the journals."""

    codes: dict[int, int]
    seconds: dict[int, float]
    peers: dict[int, tuple[str, str | None, str]]
    runs: Path


def free_port():
    """A port that nobody listens at now, and that no connection gets."""
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", random.randrange(10_000, 30_000))) as free,
        ):
            return free.getsockname()[1]


@pytest.fixture
def killed(tmp_path, environment):
    """Start ranks for each of these states of a plan side by side, and kill one of them where it waits."""

    def kill(plan, victim, way, states):
        command = [sys.executable, str(DRIVER), str(tmp_path), plan, str(SIZE), str(victim), way, *states]
        pids, at, busy = {}, {}, Counter()
        codes, ends = defaultdict(dict), defaultdict(dict)
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as driver:
            for line in driver.stdout:
                words = line.split()
                if len(words) == 5 and words[2] == "ended":
                    codes[words[0]][int(words[1])] = int(words[3])
                    ends[words[0]][int(words[1])] = float(words[4])
                    continue
                if len(words) != 3 or words[1] not in ("victim", "busy"):
                    continue
                state = words[0]
                busy[state] += 1
                if words[1] == "victim":
                    pids[state] = int(words[2])
                if state in pids and busy[state] == (SIZE if way == "busy" else 1):
                    at[state] = time.time()
                    os.kill(pids[state], signal.SIGKILL)
        return {
            state: Ending(
                codes=codes[state],
                seconds={rank: end - at.get(state, end) for rank, end in ends[state].items()},
                peers=recorded(tmp_path / state),
                runs=tmp_path / state,
            )
            for state in states
        }

    return kill


def recorded(runs):
    """By rank, what its journal says of another one."""
    found = {}
    for path in runs.glob("*/*.jsonl"):
        for record in read_journal(path).records:
            if record.kind == "peer_failed":
                found[record.rank] = (record.event.peer, record.event.state, record.event.reason)
    return found


def states_of(plan):
    """Every state of a shipped plan."""
    return [state.name for state in PLANS[plan]().states]


def judge(endings, victim):
    """All others ended in time, with 75, and name the rank and the state that it died in."""
    others = set(range(SIZE)) - {victim}
    for state, ending in endings.items():
        assert ending.codes == {victim: -signal.SIGKILL} | dict.fromkeys(others, EXIT_PEER), state
        word = (f"rank {victim}", state, "its process ended without a word")
        assert ending.peers == dict.fromkeys(others, word), state
        assert max(ending.seconds.values()) < LONGEST_S, state


@pytest.mark.parametrize(
    ("plan", "victim", "way"),
    [
        ("throwaway", 0, "meeting"),
        ("throwaway", 2, "busy"),
        ("single_capture", 0, "busy"),
        ("single_capture", 3, "meeting"),
        ("eager", 1, "meeting"),
    ],
)
def test_sigkill_in_every_state(killed, doctor, plan, victim, way):
    """Whichever rank dies in whichever state, at a meeting or in the middle of work that never ends."""
    endings = killed(plan, victim, way, states_of(plan))

    judge(endings, victim)
    verdicts = doctor(*(ending.runs for ending in endings.values()))
    for state, verdict in zip(endings, verdicts, strict=True):
        assert (verdict["failed_rank"], verdict["failed_state"]) == (f"rank {victim}", state)
        assert (verdict["outcome"], verdict["ranks"]) == ("incomplete", SIZE)
        assert verdict["findings"][0]["code"] == "run.ended_without_trace"


@pytest.mark.skipif(ROUNDS < 2, reason="RANKS_ROUNDS says how often")
def test_sigkill_for_long(killed):
    """The same, as often as it was asked for, with every rank of every plan in its turn."""
    turns = itertools.cycle(
        itertools.product(("throwaway", "single_capture", "eager"), ("meeting", "busy"), range(SIZE))
    )
    slowest = 0.0
    for plan, way, victim in itertools.islice(turns, ROUNDS):
        endings = killed(plan, victim, way, states_of(plan))
        judge(endings, victim)
        slowest = max(slowest, *(max(ending.seconds.values()) for ending in endings.values()))
        for ending in endings.values():
            shutil.rmtree(ending.runs)
    print(f"{ROUNDS} of {ROUNDS} rounds; the slowest rank ended {slowest:.2f} s after the kill")


def test_all_become_ready(killed):
    """Four processes with devices of different sizes: one run, and the KV blocks of the smallest."""
    (ending,) = killed("throwaway", -1, "meeting", ["ready"]).values()

    assert ending.codes == dict.fromkeys(range(SIZE), 0)
    (start,) = read_starts(ending.runs)
    histories = [process.history for process in start.processes]
    assert {history.budgets[-1][1].blocks for history in histories} == {2163}
    offers = {f"rank {rank}": blocks for rank, blocks in enumerate((2163, 3085, 4006, 4928))}
    for history in histories:
        (blocks,) = (event for _, event in history.agreements if event.topic == "blocks")
        assert (blocks.agreed, blocks.decided_by, dict(blocks.offers)) == (2163, "rank 0", offers)


FACTORY = """
    import gc, os, signal, time
    from startup_fsm.devices.base import Repair
    from startup_fsm.devices.simulated import SimulatedDevice
    from startup_fsm.engines.counting import CountingEngine

    RANK = int(os.environ.get("RANK", "0"))
    if "WORLD_SIZE" in os.environ:
        # Settling collects garbage; all of torch need not be looked at each time.
        import torch.distributed
        gc.freeze()

    class Device(SimulatedDevice):
        def repair(self, pool):
            done = super().repair(pool)
            return Repair(proven=RANK != 0, evidence=done.evidence)

    class Engine(CountingEngine):
        fails = False

        def capture(self, step, size):
            if self.fails and step.state == "capture_graphs":
                self.fails = False
                step.capture(size, self.device.forbid_in_capture)
            super().capture(step, size)

    def crippled():
        device = Device(4 << 30)
        engine = Engine(device=device)
        engine.fails = RANK == 0 and "STARTUP_FSM_CONTINUED" not in os.environ
        return engine, {"device": device, "progress": False}

    def forks():
        class Engine(CountingEngine):
            def load_weights(self, step):
                if RANK == 1:
                    if os.fork() == 0:
                        time.sleep(20)
                        os._exit(0)
                    os.kill(os.getpid(), signal.SIGKILL)
                super().load_weights(step)

        device = SimulatedDevice(4 << 30)
        return Engine(device=device), {"device": device, "progress": False}

    def plain():
        device = SimulatedDevice((4 + RANK) << 30)
        return CountingEngine(device=device), {"device": device, "progress": False}
"""


@pytest.fixture
def made(tmp_path, environment):
    """Run ``startup-fsm run made:FACTORY`` in so many processes; gives them when they have ended."""
    (tmp_path / "made.py").write_text(textwrap.dedent(FACTORY), encoding="utf-8")

    def run(factory, *options, size=1):
        port = free_port()
        command = [sys.executable, "-m", "startup_fsm", "run", f"made:{factory}", "--runs", "runs", *options]
        running = []
        for rank in range(size):
            given = {"RANK": str(rank), "WORLD_SIZE": str(size), "STARTUP_FSM_STORE": f"127.0.0.1:{port}"}
            output = (tmp_path / f"{rank}.txt").open("w")
            process = subprocess.Popen(
                command,
                cwd=tmp_path,
                env=environment | (given if size > 1 else {}),
                stdout=subprocess.DEVNULL,
                stderr=output,
            )
            running.append(process)
            output.close()
        return [process.wait(timeout=120) for process in running]

    return run


@pytest.mark.parametrize("size", [1, 3])
def test_a_new_process_goes_on(tmp_path, made, doctor, size):
    """After a capture that left the allocator crippled all ranks start again, in the same run, one rung further."""
    codes = made("crippled", "--allow-eager", "--restart", "1", size=size)

    assert codes == [0] * size
    first, second = read_starts(tmp_path / "runs")
    assert (first.run, first.attempt, second.attempt) == (second.run, 1, 2)
    assert len(first.processes) == len(second.processes) == size
    assert first.processes[0].history.state == "recover_allocator"
    for process in second.processes:
        assert "could not be repaired" in process.history.attempts[0].reason
        assert process.history.finished[1].end == "ready"
        assert process.history.last("capture_graphs") is None
    verdicts = doctor(tmp_path / "runs")
    assert [verdict["outcome"] for verdict in verdicts] == ["error", "ready"]
    assert "startup-fsm: starting again, attempt 2: " in (tmp_path / "0.txt").read_text(encoding="utf-8")


def test_restarts_are_bounded(tmp_path, made):
    """Without --restart the start ends as it did, and says that a new process is needed."""
    assert made("crippled", "--allow-eager") == [3]

    (start,) = read_starts(tmp_path / "runs")
    assert start.processes[0].history.current.failed.category == "restart"


def test_a_forked_child_that_stays_hides_no_death(tmp_path, made):
    """The connections of a killed rank end although a child of it lives on."""
    began = time.monotonic()
    codes = made("forks", size=3)

    assert codes == [EXIT_PEER, -signal.SIGKILL, EXIT_PEER]
    assert time.monotonic() - began < 20
    assert {peer[:2] for peer in recorded(tmp_path / "runs").values()} == {("rank 1", "load_weights")}


@pytest.mark.slow
def test_torchrun(tmp_path, environment, made):
    """Under torchrun the ranks meet in the store of its agent, and the run has its id."""
    assert made("plain") == [0]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--rdzv-id", "mine",
        "-m", "startup_fsm", "run", "made:plain", "--runs", "torchrun",
    ]  # fmt: skip
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
    )

    assert ran.returncode == 0, ran.stderr
    (start,) = read_starts(tmp_path / "torchrun")
    assert start.run.startswith("torchelastic-")
    assert [process.label for process in start.processes] == ["rank 0", "rank 1"]
    assert {process.history.budgets[-1][1].blocks for process in start.processes} == {2163}


@pytest.mark.slow
def test_a_collective_that_lost_its_other_side(tmp_path, environment):
    """Four ranks with a gloo group: one is killed while the others wait for it in a sum; they name it, and are ended."""
    script = Path(__file__).parents[1] / "gpu" / "ranks_script.py"
    shared = environment | {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"STARTUP_FSM_STORE": f"127.0.0.1:{free_port()}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "runs"), "killed"],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(4)
    ]
    codes = [process.wait(timeout=180) for process in running]

    assert codes == [EXIT_PEER, -signal.SIGKILL, EXIT_PEER, EXIT_PEER]
    peers = recorded(tmp_path / "runs")
    assert {rank: peer[:2] for rank, peer in peers.items()} == dict.fromkeys((0, 2, 3), ("rank 1", "verify"))
    (start,) = read_starts(tmp_path / "runs")
    for process in start.processes:
        failed = process.history.current.failed
        assert failed is None or failed.category == "peer"
