"""Hooks: when they run, what is recorded of them, and what their failures and deadlines do."""

from __future__ import annotations

import os
import threading
import time
from importlib import metadata
from types import SimpleNamespace

import pytest

from startup_fsm import errors, hooks
from startup_fsm.events import HookFailed, HookRan, NoteAdded, StateEntered, StateFailed
from startup_fsm.hooks import BrokenHook, Hooks, discovered


class Everything:
    """A hook that keeps what it is called with."""

    name = "everything"

    def __init__(self):
        self.calls = []

    def before_state(self, **facts):
        self.calls.append(("before_state", facts))

    def after_state(self, **facts):
        self.calls.append(("after_state", facts))

    def on_event(self, **facts):
        self.calls.append(("on_event", facts))

    def on_failure(self, **facts):
        self.calls.append(("on_failure", facts))


class Recorded(list):
    """What was recorded; with ``offer`` every event goes to the hooks again, as in a real start."""

    def __init__(self):
        super().__init__()
        self.hooks = None
        self.came = threading.Event()

    def __call__(self, event):
        self.append(event)
        self.came.set()
        if self.hooks is not None:
            self.hooks.on_event(event)

    def of(self, kind):
        return [event for event in self if isinstance(event, kind)]


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def hook(moment="before_state", body=lambda **_: None, **attributes):
    def method(**facts):
        return body(**facts)

    return SimpleNamespace(**{"name": "h", moment: method, **attributes})


def raises(**_):
    msg = "no lease"
    raise OSError(msg)


class TestRuns:
    def test_moments(self, recorded):
        """Every moment is called with keywords, timed, and recorded with its state."""
        everything = Everything()
        ran = Hooks([everything], recorded)
        error = ValueError("x")
        ran.before_state("verify", visit=2)
        ran.after_state("verify", visit=2, snapshot=None)
        ran.before_state("verify", visit=3)
        ran.on_failure("verify", error, visit=3)
        assert everything.calls == [
            ("before_state", {"state": "verify", "visit": 2}),
            ("after_state", {"state": "verify", "visit": 2, "snapshot": None}),
            ("before_state", {"state": "verify", "visit": 3}),
            ("on_failure", {"state": "verify", "error": error, "visit": 3}),
        ]
        assert [(event.hook, event.moment, event.state) for event in recorded] == [
            ("everything", "before_state", "verify"),
            ("everything", "after_state", "verify"),
            ("everything", "before_state", "verify"),
            ("everything", "on_failure", "verify"),
        ]
        assert all(event.duration_ns > 0 for event in recorded)
        assert ran.running_ns >= sum(event.duration_ns for event in recorded)

    def test_filter(self, recorded):
        """A filter on states holds for every moment, also for events by their own state."""
        everything = Everything()
        everything.states = ("verify",)
        ran = Hooks([everything], recorded)
        ran.before_state("load_weights")
        ran.on_event(NoteAdded(state="load_weights"))
        ran.on_event(NoteAdded(state="verify"))
        ran.after_state("load_weights")
        ran.before_state("verify")
        ran.on_event(NoteAdded())
        assert [(moment, facts["state"]) for moment, facts in everything.calls] == [
            ("on_event", "verify"),
            ("before_state", "verify"),
            ("on_event", "verify"),
        ]

    def test_on_event_summed(self, recorded):
        """Runs of on_event are one record a state, and what hooks did is no event for hooks: no recursion."""
        everything = Everything()
        ran = recorded.hooks = Hooks([everything], recorded)
        ran.before_state("verify")
        for _ in range(50):
            recorded(NoteAdded(state="verify"))
        ran.after_state("verify")
        (sum_,) = [event for event in recorded.of(HookRan) if event.moment == "on_event"]
        assert (sum_.count, sum_.state) == (50, "verify")
        assert sum_.duration_ns > 0
        assert sum(moment == "on_event" for moment, _ in everything.calls) == 50

    def test_event_in_event(self, recorded):
        """A hook that records while it looks at an event does not look at that; others do."""
        seen = []

        def chatty(event, **_):
            seen.append(("chatty", event.note))
            recorded(NoteAdded(note={"by": "chatty"}))

        def other(event, **_):
            seen.append(("other", event.note))

        recorded.hooks = Hooks([hook("on_event", chatty, name="a"), hook("on_event", other, name="b")], recorded)
        recorded(NoteAdded(note={"by": "engine"}))
        assert seen == [("chatty", {"by": "engine"}), ("other", {"by": "chatty"}), ("other", {"by": "engine"})]

    def test_close(self, recorded):
        """What was not recorded yet is recorded at the end."""
        ran = Hooks([hook("on_event")], recorded)
        ran.on_event(NoteAdded())
        ran.close()
        assert [(event.count, event.state) for event in recorded] == [(1, None)]

    def test_names(self, recorded):
        """Without a name a hook has that of its class; two of one name are told apart."""

        class Lease:
            def before_state(self, **future):
                pass

        Hooks([Lease(), Lease()], recorded).before_state("verify")
        assert [event.hook for event in recorded] == ["Lease", "Lease#2"]

    def test_forked_child(self, recorded):
        """In a forked child no hook runs."""
        everything = Everything()
        ran = Hooks([everything], recorded)
        child = os.fork()
        if child == 0:
            ran.before_state("verify")
            ran.on_event(NoteAdded())
            ran.close()
            os._exit(len(everything.calls) + len(recorded))
        assert os.waitpid(child, 0)[1] == 0


class TestPolicies:
    def test_fail(self, recorded):
        """Policy fail: recorded, and raised from the hook's own exception with a hint; hooks behind it do not run."""
        behind = Everything()
        ran = Hooks([hook(body=raises, policy="fail"), behind], recorded)
        with pytest.raises(
            errors.HookFailed, match="the hook h failed at before_state of verify: OSError: no lease"
        ) as caught:
            ran.before_state("verify")
        assert isinstance(caught.value.__cause__, OSError)
        assert "hint:" in str(caught.value)
        (failed,) = recorded
        assert (failed.hook, failed.moment, failed.policy, failed.error) == (
            "h",
            "before_state",
            "fail",
            "OSError: no lease",
        )
        assert failed.stack.splitlines()[-1].endswith("raises: raise OSError(msg)")
        assert "startup_fsm/hooks.py" not in failed.stack
        assert behind.calls == []

    def test_warn(self, recorded):
        """Policy warn, the default: recorded each time, and the start goes on."""
        ran = Hooks([hook(body=raises)], recorded)
        ran.before_state("load_weights")
        ran.before_state("verify")
        assert [(event.state, event.policy) for event in recorded] == [("load_weights", "warn"), ("verify", "warn")]

    def test_disable(self, recorded):
        """Policy disable: recorded once, and off from then on."""
        calls = []

        def body(**facts):
            calls.append(facts)
            raises()

        ran = Hooks([hook(body=body, policy="disable")], recorded)
        ran.before_state("load_weights")
        ran.before_state("verify")
        assert len(calls) == len(recorded) == 1

    def test_on_failure_never_raises(self, recorded):
        """The engine's own exception stays what it is, whatever the policy of a hook on failures."""
        ran = Hooks([hook("on_failure", raises, policy="fail"), hook("on_event", raises, policy="fail")], recorded)
        ran.on_event(StateFailed(state="verify", error_type="E", category="raised", message="m"))
        ran.on_failure("verify", ValueError())
        assert [event.moment for event in recorded] == ["on_event", "on_failure"]
        with pytest.raises(errors.HookFailed):
            ran.on_event(StateEntered(state="verify"))

    def test_on_event_fails_often(self, recorded):
        """One that fails on every event is recorded at once and then summed up, never one by one."""
        ran = Hooks([hook("on_event", raises)], recorded)
        ran.before_state("verify")
        for _ in range(40):
            ran.on_event(NoteAdded())
        assert len(recorded) == 1
        ran.after_state("verify")
        assert [event.error for event in recorded] == [
            "OSError: no lease",
            "failed 39 times more, last: OSError: no lease",
        ]

    @pytest.mark.parametrize("thread", [False, True])
    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
    def test_interrupt(self, recorded, kind, thread):
        """An interrupt is no failure of a hook: it passes through."""

        def body(**_):
            raise kind

        ran = Hooks([hook(body=body, policy="disable", thread=thread)], recorded)
        for _ in range(2):
            with pytest.raises(kind):
                ran.before_state("verify")
        assert recorded == []


class TestDeadlines:
    def test_overdue(self, recorded):
        """Past its deadline a hook is recorded with its stack while it is busy, runs to its end, and is off after."""
        calls = []

        def stuck(**_):
            calls.append(1)
            recorded.came.clear()
            assert recorded.came.wait(20)  # the hook is stuck here

        ran = Hooks([hook(body=stuck, deadline_s=0.05, policy="fail")], recorded)
        ran.before_state("allocate_kv")
        ran.before_state("verify")
        ran.close()
        failed, finished = recorded
        assert isinstance(failed, HookFailed)
        assert failed.error == "still busy at its deadline of 0.05 s"
        assert failed.duration_ns >= 50_000_000
        assert any(line.endswith("# the hook is stuck here") for line in failed.stack.splitlines())
        assert isinstance(finished, HookRan)
        assert finished.duration_ns >= failed.duration_ns
        assert calls == [1]

    def test_in_time(self, recorded):
        """Within its deadline there is nothing to tell, and thousands of runs need one thread."""
        ran = Hooks([hook("on_event", deadline_s=60)], recorded)
        for _ in range(5_000):
            ran.on_event(NoteAdded())
        assert sum(thread.name == "startup-fsm-hooks" for thread in threading.enumerate()) == 1
        ran.close()
        assert [event.count for event in recorded] == [5_000]

    def test_worker(self, recorded):
        """One that says so runs on a thread of its own, always the same."""
        seen = []
        ran = Hooks([hook(body=lambda **_: seen.append(threading.current_thread().name), thread=True)], recorded)
        ran.before_state("load_weights")
        ran.before_state("verify")
        ran.close()
        assert seen == ["startup-fsm-hook-h"] * 2
        assert len(recorded.of(HookRan)) == 2

    @pytest.mark.parametrize("policy", ["warn", "disable", "fail"])
    def test_abandoned(self, recorded, policy):
        """A worker past its deadline is left behind with its stack, and its policy decides what that means."""
        stop = threading.Event()

        def stuck(**_):
            stop.wait(20)  # the worker is stuck here

        ran = Hooks([hook(body=stuck, thread=True, deadline_s=0.05, policy=policy)], recorded)
        before = time.monotonic()
        if policy == "fail":
            with pytest.raises(errors.HookFailed, match="abandoned at its deadline"):
                ran.before_state("allocate_kv")
        else:
            ran.before_state("allocate_kv")
        ran.before_state("verify")
        assert time.monotonic() - before < 15
        stop.set()
        ran.close()
        (failed,) = recorded
        assert failed.error == "abandoned at its deadline of 0.05 s"
        assert "stop.wait(20)  # the worker is stuck here" in failed.stack

    def test_worker_raises(self, recorded):
        """What a worker raises counts as if it were raised here."""
        ran = Hooks([hook(body=raises, thread=True, policy="fail")], recorded)
        with pytest.raises(errors.HookFailed, match="no lease"):
            ran.before_state("verify")
        ran.close()


class Silent:
    """No hook."""


class Sealed:
    """Has no place for what later versions say."""

    def before_state(self, state):
        pass


class Awaited:
    """Would have to be awaited."""

    async def before_state(self, **future):
        pass


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (Silent(), TypeError, "Silent has none of before_state, after_state, on_event, on_failure"),
        (Everything, TypeError, "pass everything|a class, not an object"),
        (Sealed(), TypeError, r"takes no \*\*future"),
        (Awaited(), TypeError, "coroutine"),
        (hook(policy="ignore"), ValueError, "policy 'ignore'\nhint: one of fail, warn, disable"),
        (hook(policy=[]), ValueError, "policy"),
        (hook(states="verify"), TypeError, "states 'verify'"),
        (hook(states=[1]), TypeError, "states"),
        (hook(deadline_s=0), ValueError, "deadline_s 0\nhint: seconds"),
        (hook(deadline_s="5"), ValueError, "deadline_s"),
        (hook(deadline_s=True), ValueError, "deadline_s"),
    ],
)
def test_no_hook(recorded, given, error, text):
    """What is no hook is refused where it is given, with a hint."""
    with pytest.raises(error, match=text) as caught:
        Hooks([given], recorded)
    assert "hint:" in str(caught.value)


class TestDiscovery:
    @pytest.fixture
    def points(self, monkeypatch):
        found = []
        monkeypatch.setattr(
            hooks.metadata, "entry_points", lambda *, group: found if group == "startup_fsm.hooks" else []
        )

        def add(name, value):
            found.append(metadata.EntryPoint(name=name, value=value, group="startup_fsm.hooks"))

        return add

    @pytest.fixture
    def package(self, tmp_path, monkeypatch):
        (tmp_path / "platform_hooks.py").write_text(
            "class Lease:\n    name = 'lease'\n    def before_state(self, **future): pass\n"
            "metric = Lease()\nmetric.name = 'metric'\n"
            "class Bad:\n    policy = 'never'\n    def before_state(self, **future): pass\n"
        )
        monkeypatch.syspath_prepend(tmp_path)

    def test_none(self):
        """This distribution brings none."""
        assert discovered() == []

    def test_found(self, points, package, recorded):
        """An entry point is a hook, or a class that makes one."""
        points("lease", "platform_hooks:Lease")
        points("metric", "platform_hooks:metric")
        Hooks(discovered(), recorded).before_state("verify")
        assert [event.hook for event in recorded] == ["lease", "metric"]

    def test_broken(self, points, package, recorded):
        """One that does not import, or is no hook, is recorded when the first state begins, once; the others run."""
        points("gone", "no_such_module:Hook")
        points("bad", "platform_hooks:Bad")
        points("lease", "platform_hooks:Lease")
        found = discovered()
        assert [isinstance(each, BrokenHook) for each in found] == [True, True, False]
        ran = Hooks(found, recorded)
        assert recorded == []
        ran.before_state("init_device")
        ran.before_state("verify")
        failed = recorded.of(HookFailed)
        assert [(event.hook, event.moment, event.policy) for event in failed] == [
            ("gone", "load", "warn"),
            ("bad", "load", "warn"),
        ]
        assert "ModuleNotFoundError" in failed[0].error
        assert "policy 'never'" in failed[1].error
        assert [event.hook for event in recorded.of(HookRan)] == ["lease", "lease"]
