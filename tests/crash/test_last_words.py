"""What else may break while a start is failing or ending: the engine's exception stays, and the journal stays whole."""

from __future__ import annotations

import io
import signal
import sys

import pytest

from startup_fsm.engines.counting import CountingEngine
from startup_fsm.errors import HookFailed
from startup_fsm.events import SignalReceived
from startup_fsm.journal import read_journal
from startup_fsm.testing import counting_start, verdict_of


class Refuses:
    """Raises at the first event of a kind."""

    policy = "fail"

    def __init__(self, *kinds):
        self.kinds = kinds

    def on_event(self, *, event, **future):
        if event.kind in self.kinds:
            text = f"not this {event.kind}"
            raise PermissionError(text)


def gist(boot):
    """Outcome, failed state, first finding; and nothing that the fold finds out of order."""
    assert boot.history.violations == []
    verdict = verdict_of(boot)
    return verdict.outcome, verdict.failed_state, verdict.findings[0].finding.code if verdict.findings else None


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("run_started", "init_device"),
        ("state_entered", "init_device"),
        ("snapshot_taken", "init_device"),
        ("check_judged", "init_device"),
        ("part_entered", "profile_activations"),
        ("pool_opened", "bootstrap_kv"),
        ("graph_captured", "capture_throwaway"),
        ("pool_released", "teardown"),
        ("budget_computed", "size_kv"),
    ],
)
def test_hook_that_refuses_an_event(kind, state):
    """A hook may refuse at any event inside a state, or before the first: the state fails and says so."""
    boot, engine = counting_start(hooks=[Refuses(kind)])

    with pytest.raises(HookFailed, match=f"not this {kind}") as raised:
        boot.run(engine)

    assert gist(boot) == ("error", state, "state.raised")
    (note,) = raised.value.__notes__
    assert note.startswith(f"startup-fsm: failed in state {state}")
    assert note.endswith("(hook); journal: none")


@pytest.mark.parametrize("kind", ["state_left", "run_finished"])
def test_hook_that_refuses_too_late(kind):
    """Where no state is open there is nothing to refuse: it is recorded, and the start is ready."""
    boot, engine = counting_start(hooks=[Refuses(kind)])

    boot.run(engine)

    assert gist(boot) == ("ready", None, None)
    assert {failure.moment for _, failure in boot.history.hook_failures} == {"on_event"}


@pytest.mark.parametrize("kind", ["snapshot_taken", "check_judged", "oom_observed", "state_failed", "run_finished"])
def test_hook_that_fails_beside_the_engine(kind):
    """While an exception of the engine is recorded, no hook's takes its place."""

    class Late(Refuses):
        def on_failure(self, **future):
            text = "nor at the failure"
            raise PermissionError(text)

    class FailsFirst(CountingEngine):
        def load_weights(self, step):
            late.kinds = (kind,)
            raise ZeroDivisionError

    late = Late()
    boot, engine = counting_start(hooks=[late])

    with pytest.raises(ZeroDivisionError):
        boot.run(FailsFirst(device=engine.device))

    assert gist(boot) == ("error", "load_weights", "state.raised")


def test_device_that_can_no_longer_be_read():
    """After an illegal access every call of a device raises: the exception of the engine is the one that is seen."""

    class Breaks(CountingEngine):
        def load_weights(self, step):
            def snapshot(**_):
                text = "CUDA error: an illegal memory access was encountered"
                raise RuntimeError(text)

            self.device.snapshot = snapshot
            raise ZeroDivisionError

    boot, engine = counting_start()

    with pytest.raises(ZeroDivisionError):
        boot.run(Breaks(device=engine.device))

    assert gist(boot) == ("error", "load_weights", "state.raised")
    assert any("illegal memory access" in text for text in verdict_of(boot).unseen)


class Closed(io.StringIO):
    """A stream that nobody reads any more."""

    def write(self, text):
        raise BrokenPipeError


@pytest.mark.parametrize("stream", [None, Closed()], ids=["none", "closed"])
def test_no_stderr(tmp_path, monkeypatch, stream):
    """A daemon without stderr, whose journal and mirror cannot be written either, starts all the same."""
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setattr(sys, "stderr", stream)
    boot, engine = counting_start(journal=tmp_path / "file" / "runs", mirror=True, progress=True)

    boot.run(engine)

    assert boot.history.finished[1].end == "ready"


def test_signal_handler_that_records(tmp_path):
    """A handler may record at any time, also in the middle of another event: each has its line, and all are in order."""
    boot, _ = counting_start(journal=tmp_path)
    arrived = 0

    def handler(*_):
        nonlocal arrived
        arrived += 1
        boot.recorder.record(SignalReceived(signal="SIGALRM", state=boot.history.state))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with boot.state("init_device") as step:
            signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
            while arrived < 50:
                step.note(arrived=arrived)
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    boot.close()

    journal = read_journal(boot.path)
    assert journal.problems == ()
    assert sum(record.kind == "signal_received" for record in journal.records) == arrived


def test_last_event_of_a_handler_that_raises(tmp_path):
    """An event that a handler records before it raises is written when the start is closed, at the latest."""
    boot, _ = counting_start(journal=tmp_path)
    boot.state("init_device").__enter__()

    def mirror(record, line):
        # Where a handler would stand: in the middle of an event.
        boot.recorder.mirrors.clear()
        boot.recorder.record(SignalReceived(signal="SIGTERM", state="init_device"))
        raise SystemExit

    boot.recorder.mirrors.append(mirror)
    with pytest.raises(SystemExit):
        boot.course.open.step.note(about="to be interrupted")
    boot.close()

    journal = read_journal(boot.path)
    assert journal.problems == ()
    assert [record.kind for record in journal.records][-2:] == ["note_added", "signal_received"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_exception_between_states(error):
    """What is raised between two states fails neither of them."""
    boot, _ = counting_start()

    def start():
        with boot:
            with boot.state("init_device"):
                pass
            raise error

    with pytest.raises(error):
        start()

    assert boot.history.current.left is not None
    assert gist(boot)[:2] == ("error", "init_device")
