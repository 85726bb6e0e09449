"""The bootstrap: both ways to embed, what is refused, what an engine's own exception stays, and what recording costs."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from startup_fsm import errors
from startup_fsm.bootstrap import Bootstrap
from startup_fsm.budget import Knobs
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.engine import LongestRequest, Step
from startup_fsm.engines.counting import CountingEngine
from startup_fsm.errors import BudgetError, EdgeRefused, HookFailed, PlanError
from startup_fsm.events import RunFinished
from startup_fsm.fold import fold
from startup_fsm.journal import read_journal
from startup_fsm.memory import GIB, MIB
from startup_fsm.plan import Edge, Plan, eager, observed, single_capture, throwaway
from startup_fsm.states import READY, State
from startup_fsm.testing import counting_start, verdict_of


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """A start collects garbage often; what is alive already need not be looked at each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start of these tests is nobody's child."""
    for variable in ("STARTUP_FSM_RUN", "STARTUP_FSM_RUN_OWNER", "RANK", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(variable, raising=False)


def embedded(boot: Bootstrap, device: SimulatedDevice, blocks: list[int]) -> None:
    """The default plan by hand, as in the documentation."""
    engine = CountingEngine(device=device)
    with boot.state("init_device"):
        pass
    with boot.state("load_weights") as step:
        engine.load_weights(step)
    with boot.state("profile_activations") as step:
        engine.profile_activations(step)
    with boot.state("bootstrap_kv") as step:
        engine.allocate_kv(step, 32)
    with boot.state("capture_throwaway") as step:
        for size in (4, 2, 1):
            engine.capture(step, size)
    with boot.state("teardown"):
        engine.release_graphs()
        engine.release_kv()
    budget = boot.kv_budget(engine.kv_block_bytes(), longest=LongestRequest(1024, 16))
    blocks.append(budget.blocks)
    with boot.state("allocate_kv") as step:
        engine.allocate_kv(step, budget.blocks)
    with boot.state("capture_graphs") as step:
        for size in (4, 2, 1):
            engine.capture(step, size)
    with boot.state("verify") as step:
        engine.verify(step)
    boot.finish()


def kinds(boot: Bootstrap) -> list[tuple[str, str | None]]:
    """Kind and state of what is in the journal, entries and ends only."""
    assert boot.path is not None
    wanted = ("run_started", "state_entered", "state_left", "state_failed", "run_finished")
    records = read_journal(boot.path).records
    return [(each.kind, getattr(each.event, "state", None)) for each in records if each.kind in wanted]


def test_a_program_that_keeps_control(tmp_path: Path) -> None:
    """States by hand: every edge is in the journal, in order, and the start is ready."""
    device = SimulatedDevice(4 * GIB)
    boot = Bootstrap(journal=tmp_path, device=device, discover=False)
    blocks: list[int] = []
    embedded(boot, device, blocks)
    assert blocks[0] > 1_000
    expected = [("run_started", None)]
    for state in boot.plan.states:
        if state.name != "recover_allocator":
            expected += [("state_entered", state.name), ("state_left", state.name)]
    assert kinds(boot) == [*expected, ("run_finished", "verify")]
    verdict = verdict_of(boot)
    assert (verdict.outcome, verdict.exit_code) == ("ready", 0)


def test_a_program_that_lets_us_drive(tmp_path: Path) -> None:
    """The same states in the same order, and the same KV cache."""
    device = SimulatedDevice(4 * GIB)
    boot = Bootstrap(journal=tmp_path / "a", device=device, discover=False)
    driven = boot.run(CountingEngine(device=device, sizes=(1, 2, 4)))
    other_device = SimulatedDevice(4 * GIB)
    other = Bootstrap(journal=tmp_path / "b", device=other_device, discover=False)
    blocks: list[int] = []
    embedded(other, other_device, blocks)
    assert kinds(boot) == kinds(other)
    assert driven.blocks == blocks[0]
    assert boot.engine == "counting"
    assert boot.history.started is not None
    assert boot.history.started.knobs["capture_sizes"] == [1, 2, 4]


def test_states_are_async_contexts_too() -> None:
    """``async with`` enters and leaves the same way, failures included."""

    async def start() -> Bootstrap:
        boot, _ = counting_start(plan=observed())
        async with boot.state("load_weights") as step:
            await asyncio.sleep(0)
            step.note(a=1)
        with pytest.raises(KeyError):  # noqa: PT012 - an async context cannot stand in the same line
            async with boot.state("verify"):
                await asyncio.sleep(0)
                raise KeyError("x")
        return boot

    boot = asyncio.run(start())
    assert [(visit.state, visit.failed is not None) for visit in boot.history.visits] == [
        ("load_weights", False),
        ("verify", True),
    ]
    assert boot.history.note("a") == 1


def test_a_cancelled_state_is_a_failed_one() -> None:
    """A task that is cancelled inside a state leaves no state open."""

    async def start() -> Bootstrap:
        boot, _ = counting_start(plan=observed())

        async def body() -> None:
            async with boot.state("load_weights"):
                await asyncio.sleep(60)

        task = asyncio.create_task(body())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return boot

    assert asyncio.run(start()).history.position == "failed"


class OutOfPatience(Exception):
    """An engine's own."""


def test_an_engines_own_exception_stays_what_it_is(tmp_path: Path) -> None:
    """The same object comes out, with the diagnosis as a note and its own traceback."""
    error = OutOfPatience("m")
    boot, engine = counting_start(journal=tmp_path)

    class Impatient(CountingEngine):
        def load_weights(self, step: Step) -> None:
            raise error

    with pytest.raises(OutOfPatience) as caught:
        boot.run(Impatient(device=engine.device))
    assert caught.value is error
    assert error.__cause__ is None
    assert error.__traceback__ is not None
    (note,) = error.__notes__
    assert "failed in state load_weights (raised)" in note
    assert str(boot.path) in note
    assert boot.history.position == "ended"
    assert kinds(boot)[-2:] == [("state_failed", "load_weights"), ("run_finished", "load_weights")]


def test_an_exception_that_cannot_be_read_does_not_hide_itself() -> None:
    """Neither a rude ``str`` nor a device that fails afterwards takes the place of the engine's exception."""

    class Rude(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    class Dead(SimulatedDevice):
        dead = False

        def snapshot(self, *, settled: bool = False) -> Any:
            if self.dead:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return super().snapshot(settled=settled)

    for error in (Rude(), OutOfPatience("x"), RuntimeError("CUDA out of memory")):
        device = Dead(4 * GIB)
        boot = Bootstrap(plan=observed(), journal=None, device=device, discover=False)
        with pytest.raises(type(error)) as caught, boot.state("capture_graphs"):  # noqa: PT012 - dies inside
            device.dead = True
            raise error
        assert caught.value is error
        assert boot.history.position == "failed"
        device.dead = False


def test_the_context_of_a_bootstrap_declares_failure() -> None:
    """An exception that leaves the outer ``with`` ends the run as failed, with its reason."""
    boot, _ = counting_start(plan=observed())
    with pytest.raises(ValueError, match="odd"), boot:
        raise ValueError("odd")
    assert boot.history.finished is not None
    assert boot.history.finished[1].end == "failed"
    assert boot.history.finished[1].reason == "ValueError: odd"
    with boot:
        pass


def test_what_is_refused_says_what_is_allowed(tmp_path: Path) -> None:
    """Out of order, undeclared, two at a time, after the end: EdgeRefused with its attributes, nothing written."""
    boot, _ = counting_start(journal=tmp_path)
    with pytest.raises(EdgeRefused) as caught:
        boot.state("verify").__enter__()
    assert (caught.value.source, caught.value.target, caught.value.allowed) == (None, "verify", ("init_device",))
    with boot.state("init_device"):
        before = kinds(boot)
        for name in ("load_weights", "init_device", "nonsense"):
            with pytest.raises(EdgeRefused, match="a state is open"):
                boot.state(name).__enter__()
        with pytest.raises(EdgeRefused):
            boot.finish()
        with pytest.raises(EdgeRefused):
            boot.kv_budget(MIB)
        assert kinds(boot) == before
    with pytest.raises(EdgeRefused, match="no such state"):
        boot.state("nonsense").__enter__()
    with pytest.raises(EdgeRefused) as caught:
        boot.state("verify").__enter__()
    assert caught.value.allowed == ("load_weights",)
    assert caught.value.hint is not None
    boot.fail("enough")
    boot.fail("again")
    before = kinds(boot)
    with pytest.raises(EdgeRefused, match="the start is over"):
        boot.state("load_weights").__enter__()
    with pytest.raises(EdgeRefused, match="the start is over"):
        boot.finish()
    assert kinds(boot) == before


def test_observe_writes_what_it_cannot_refuse() -> None:
    """In mode observe an edge that the plan does not have is taken, and is a violation of the history."""
    boot, _ = counting_start(mode="observe")
    for name in ("verify", "load_weights"):
        with boot.state(name):
            pass
    boot.finish()
    assert [violation.found for violation in boot.history.violations] == ["verify", "load_weights", "ready"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "lenient"}, "mode: 'lenient'"),
        ({"device": "tpu"}, "device: 'tpu'"),
        ({"hooks": [object()]}, "hook"),
    ],
)
def test_wrong_arguments_leave_no_file(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    """What cannot be started raises before a journal is made."""
    with pytest.raises((ValueError, TypeError), match=text):
        Bootstrap(journal=tmp_path, discover=False, **{"device": SimulatedDevice(GIB), **options})
    assert list(tmp_path.iterdir()) == []


def mine(*edges: Edge, names: tuple[str, ...] = ("a", "size_kv")) -> Plan:
    return Plan("mine", [State(name) for name in names], edges)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (observed(), "no order"),
        (mine(Edge("advance", "a", READY), names=("a",)), "sizes no KV cache"),
        (mine(Edge("retry", "size_kv", READY, "recover"), names=("size_kv",)), "leads on from 'size_kv'"),
        (mine(Edge("advance", "a", "size_kv"), Edge("advance", "size_kv", READY)), "no method of that name"),
    ],
)
def test_a_plan_that_cannot_be_driven_is_refused_before_the_start(plan: Plan, text: str) -> None:
    """The mistake is said before anything was recorded or allocated."""
    boot, engine = counting_start(plan=plan)
    with pytest.raises(PlanError, match=text):
        boot.run(engine)
    assert boot.history.records == 0


def test_a_state_of_the_engines_own_is_a_method() -> None:
    """An inserted state is driven by the method of its name."""

    class Tuned(CountingEngine):
        tuned: int = 0

        def autotune(self, step: Step) -> None:
            step.note(tuned=True)

    device = SimulatedDevice(4 * GIB)
    plan = throwaway().insert(State("autotune"), after="load_weights")
    boot = Bootstrap(plan=plan, journal=None, device=device, discover=False)
    boot.run(Tuned(device=device))
    assert boot.history.note("tuned") is True
    assert boot.history.violations == []


@pytest.mark.parametrize("plan", [throwaway, single_capture, eager])
def test_every_plan_is_driven_to_ready(plan: Any) -> None:
    """Every state of the plan in order, nothing against the plan, the pools of measuring closed."""
    boot, engine = counting_start(plan=plan())
    boot.run(engine)
    assert boot.history.violations == []
    assert boot.history.position == "ended"
    assert {life.purpose for life in boot.history.pools if life.released is None} <= {"kv", "graphs"}


def test_a_block_of_no_bytes_is_one_clear_error() -> None:
    """It is the engine's mistake, and is told as such."""

    class Blockless(CountingEngine):
        def kv_block_bytes(self) -> int:
            return 0

    boot, engine = counting_start()
    with pytest.raises(ValueError, match="block_bytes"):
        boot.run(Blockless(device=engine.device))
    assert boot.history.state == "size_kv"


def test_a_budget_that_fits_nothing_raises_with_its_terms() -> None:
    """The terms, what is missing, and what would fit."""
    boot, engine = counting_start(knobs=Knobs(utilization=0.25))
    with pytest.raises(BudgetError) as caught:
        boot.run(engine)
    assert caught.value.missing_bytes > 0
    assert caught.value.terms["requested"] == GIB
    assert "are missing" in caught.value.message


def test_two_starts_in_one_process_are_two_runs(tmp_path: Path) -> None:
    """Each start has a run and a file of its own."""
    starts = [counting_start(journal=tmp_path) for _ in range(2)]
    for boot, engine in starts:
        boot.run(engine)
    assert len({boot.recorder.run for boot, _ in starts}) == 2
    assert len(list(tmp_path.glob("*/rank-00000.1.jsonl"))) == 2


def test_a_second_process_of_a_run_takes_the_next_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher's id and rank lead to one directory; the second start of a rank is attempt 2 and says so."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    monkeypatch.setenv("RANK", "3")
    for _ in range(2):
        boot, engine = counting_start(journal=tmp_path)
        boot.run(engine)
    assert boot.path == tmp_path / "torchelastic-job7" / "rank-00003.2.jsonl"
    records = read_journal(boot.path).records
    assert {(record.rank, record.attempt) for record in records} == {(3, 2)}
    assert records[1].kind == "attempt_started"


class Watcher:
    """A hook that keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str | None]] = []

    def before_state(self, *, state: str, **future: Any) -> None:
        self.calls.append(("before", state))

    def after_state(self, *, state: str, **future: Any) -> None:
        self.calls.append(("after", state))

    def on_failure(self, *, state: str | None, error: BaseException, **future: Any) -> None:
        self.calls.append((type(error).__name__, state))


def test_hooks_run_at_the_edges() -> None:
    """Before and after every state, and at a failure."""
    watcher = Watcher()
    boot, _ = counting_start(plan=observed(), hooks=[watcher])
    with boot.state("load_weights"):
        watcher.calls.append(("body", None))
    with pytest.raises(KeyError), boot.state("verify"):
        raise KeyError
    assert watcher.calls == [
        ("before", "load_weights"),
        ("body", None),
        ("after", "load_weights"),
        ("before", "verify"),
        ("KeyError", "verify"),
    ]
    assert [ran.moment for _, ran in boot.history.hooks] == [
        "before_state",
        "after_state",
        "before_state",
        "on_failure",
    ]


@pytest.mark.parametrize(
    "kind", ["run_started", "state_entered", "snapshot_taken", "check_judged", "state_left", "run_finished"]
)
def test_a_hook_that_refuses_an_event_leaves_a_sound_history(kind: str) -> None:
    """Whatever event a strict hook refuses, the history has no violation and no state stays open."""

    class Strict:
        policy = "fail"

        def on_event(self, *, event: Any, **future: Any) -> None:
            if event.kind == kind:
                raise RuntimeError("refused")

    boot, engine = counting_start(hooks=[Strict()])
    try:
        boot.run(engine)
    except HookFailed:
        assert kind not in ("state_left", "run_finished")
    assert boot.history.violations == []
    assert boot.history.position == "ended"
    assert boot.course.open is None


def test_a_hook_does_not_take_the_place_of_the_engines_exception() -> None:
    """Of a strict hook that refuses everything at a failure, only the engine's exception comes out."""

    class Strict:
        policy = "fail"
        armed = False

        def on_event(self, *, event: Any, **future: Any) -> None:
            if self.armed:
                raise RuntimeError("refused")

        def on_failure(self, **future: Any) -> None:
            raise RuntimeError("refused")

    strict = Strict()

    class Impatient(CountingEngine):
        def verify(self, step: Step) -> None:
            strict.armed = True
            raise RuntimeError("CUDA out of memory")

    device = SimulatedDevice(4 * GIB)
    boot = Bootstrap(journal=None, device=device, discover=False, hooks=[strict])
    with pytest.raises(RuntimeError, match=r"^CUDA out of memory") as caught:
        boot.run(Impatient(device=device))
    assert type(caught.value) is RuntimeError
    assert boot.history.violations == []
    assert boot.history.position == "ended"


def test_the_mirror_takes_every_event() -> None:
    """Each event is also a line of text."""
    stream = io.StringIO()
    boot, _ = counting_start(plan=observed(), mirror=stream)
    with boot.state("load_weights"):
        pass
    boot.finish()
    assert len(stream.getvalue().splitlines()) >= boot.history.records


def test_a_forked_child_of_an_open_state_records_nothing(tmp_path: Path) -> None:
    """A child that leaves the block of its parent writes no end and keeps no state open for the parent."""
    boot, _ = counting_start(plan=observed(), journal=tmp_path)
    with boot.state("load_weights") as step:
        child = os.fork()
        if child == 0:
            try:
                step.note(who="child")
                boot.fail("child")
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        step.note(who="parent")
    boot.finish()
    assert boot.path is not None
    journal = read_journal(boot.path)
    assert journal.problems == ()
    history = fold(journal.records)
    assert history.violations == []
    assert history.note("who") == "parent"
    assert history.finished is not None
    assert history.finished[1].end == "ready"


def test_importing_and_embedding_leave_the_process_as_it_was() -> None:
    """No signal handler, no thread, no logging handler, no torch, no file, no environment by importing."""
    script = textwrap.dedent("""
        import logging, os, signal, sys, threading
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        environment, excepthook = dict(os.environ), sys.excepthook
        import startup_fsm
        from startup_fsm.bootstrap import Bootstrap
        from startup_fsm.devices.simulated import SimulatedDevice
        assert dict(os.environ) == environment
        assert threading.active_count() == 1
        assert "torch" not in sys.modules
        device = SimulatedDevice(1 << 32)
        boot = Bootstrap(journal=None, device=device, discover=False)
        with boot.state("init_device"):
            assert {number: signal.getsignal(number) for number in signal.valid_signals()} == handlers
        boot.fail("enough")
        assert {number: signal.getsignal(number) for number in signal.valid_signals()} == handlers
        assert sys.excepthook is excepthook
        assert logging.root.handlers == []
        assert threading.active_count() == 1
        assert "torch" not in sys.modules
        assert set(os.environ) - set(environment) == {"STARTUP_FSM_RUN", "STARTUP_FSM_RUN_OWNER"}
        assert os.listdir(".") == []
    """)
    environment = {**os.environ, "PYTHONPATH": str(Path(errors.__file__).parents[1])}
    import tempfile

    with tempfile.TemporaryDirectory() as empty:
        subprocess.run(
            [sys.executable, "-W", "error", "-c", script], check=True, cwd=empty, env=environment, timeout=60
        )


def test_ctrl_c_passes_through() -> None:
    """A KeyboardInterrupt inside a body stays one, and the state is failed by a signal."""
    boot, _ = counting_start(plan=observed())
    with pytest.raises(KeyboardInterrupt), boot.state("load_weights"):
        signal.raise_signal(signal.SIGINT)
    visit = boot.history.current
    assert visit is not None
    assert visit.failed is not None
    assert visit.failed.category == "signal"


@pytest.mark.parametrize("durability", ["disk", "process"])
def test_recording_syncs_as_often_as_it_says(
    tmp_path: Path, durability: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A start of 10 states and 51 graphs: at most two syncs a state on ``disk``, two a run in ``process``."""
    boot, engine = counting_start(
        journal=tmp_path, durability=durability, total_bytes=8 * GIB, engine={"sizes": range(1, 52), "row": 16384}
    )
    boot.run(engine)
    writer = boot.recorder.writer
    assert writer is not None
    states = len(boot.history.visits)
    assert states == 10
    assert sum(len(visit.captures) for visit in boot.history.visits) == 102
    assert 1 <= writer.syncs <= (2 * states if durability == "disk" else 2)
    finished = boot.history.finished
    assert finished is not None
    assert isinstance(finished[1], RunFinished)
    assert finished[1].bookkeeping_ns > 0
    assert finished[1].measuring_ns > 0
    costs = {
        name: f"{getattr(finished[1], name) / 1e6:.2f} ms" for name in ("bookkeeping_ns", "syncing_ns", "measuring_ns")
    }
    with capsys.disabled():
        if os.environ.get("STARTUP_FSM_TEST_COSTS"):
            print(f"\n{durability}: {writer.syncs} syncs, {costs}")


def test_costs_of_states_add_up_to_no_more_than_the_run() -> None:
    """What each state says of our own part is a part of what the run says."""
    boot, engine = counting_start()
    boot.run(engine)
    assert boot.history.finished is not None
    finished = boot.history.finished[1]
    for name in ("bookkeeping_ns", "syncing_ns", "measuring_ns"):
        parts = [getattr(visit.left, name) for visit in boot.history.visits]
        assert all(part >= 0 for part in parts)
        assert sum(parts) <= getattr(finished, name)
    assert sum(visit.left.duration_ns for visit in boot.history.visits if visit.left) <= finished.duration_ns
