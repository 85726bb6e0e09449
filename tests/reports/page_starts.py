"""Starts for the tests of the page: made of records in memory, plain ones and hostile ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from startup_fsm.events import EVENT_TYPES, BudgetTerm, Event, Origin, Record, RunStarted, StateEntered, UnknownEvent
from startup_fsm.findings import Finding
from startup_fsm.journal import Journal, Problem
from startup_fsm.memory import PoolUsage, Snapshot, Tenant
from startup_fsm.reports.page.data import page_data
from startup_fsm.reports.page.redaction import Redactor
from startup_fsm.reports.page.render import page
from startup_fsm.starts import Found, Start, grouped
from startup_fsm.verdict import Verdict
from startup_fsm.verdicts import judge

RUN = "20260101T000000Z-00000000"

#: What would do harm if anything of it were obeyed.
HOSTILE = (
    "</script><script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>"
    "<!-- {{script}} ${window.harmed = 1} javascript:window.harmed=1 ]]> &lt;b&gt; &amp;"
    "<style>body{display:none}</style><base href='//x.example'><svg onload=window.harmed=1>"
    "\x1b[2J\x1b]0;title\x07\x9b31m\x00\u202edesrever\u2066\u200b\ufeff\u2028\u2029\ud800\r\n\t"
    "e\u0301\u0300\u0302\u0303\u0304\u0306\u0307\u0308\u030a ﷽ \U0001f469\u200d\U0001f4bb 'quoted\" \\ back`tick"
)
HUGE = "W" * 10_000_000
LARGE = (1 << 62) + 1


#: A start as an engine's log tells it.
LOG = """\
INFO 01-15 10:00:01 [gpu_worker.py:100] Free memory on device cuda:0 (78.00/79.10 GiB)
INFO 01-15 10:00:09 [gpu_model_runner.py:2007] Model loading took 14.99 GiB and 10.679101 seconds
INFO 01-15 10:00:31 [gpu_worker.py:298] Available KV cache memory: 50.21 GiB
INFO 01-15 10:00:31 [kv_cache_utils.py:864] GPU KV cache size: 411,312 tokens
INFO 01-15 10:00:31 [kv_cache_utils.py:868] Maximum concurrency for 8,192 tokens per request: 50.21x
INFO 01-15 10:00:44 [gpu_model_runner.py:2600] Graph capturing finished in 13 secs, took 0.62 GiB
INFO 01-15 10:00:45 [core.py:193] init engine (profile, create kv cache, warmup model) took 36.01 seconds
"""


def start_of(*processes: Iterable[Event], origin: str = "runs/x", alive: bool = False, **facts: Any) -> Start:
    """One start of processes, each as its events; ``facts`` go into every ``run_started``."""
    found = []
    for rank, happened in enumerate(processes):
        events = list(happened)
        if facts and isinstance(events[0], RunStarted):
            events[0] = attrs.evolve(events[0], **facts)
        found.append(
            Found(journal=Journal(f"{origin}/rank-{rank:05}.1.jsonl", tuple(records(events, rank))), is_alive=alive)
        )
    return next(iter(grouped(found, source="journal", origin=origin, is_whole=True)))


def records(events: Iterable[Event], rank: int = 0, origin: Origin | None = None) -> Iterator[Record]:
    """Events with an envelope; one millisecond apart."""
    for seq, event in enumerate(events):
        kind = getattr(event, "kind", "made_up")
        yield Record(
            run=RUN,
            process=f"rank-{rank:05}",
            rank=rank,
            seq=seq,
            t=seq * 1_000_000,
            kind=kind,
            origin=origin,
            event=event,
        )


def verdict_of(start: Start) -> Verdict:
    """As the verbs have it."""
    return judge(start.sources, source=start.source, origin=start.origin)


def data_of(start: Start, *, full: bool = False) -> dict[str, Any]:
    """What the page is made of."""
    return page_data([start], [verdict_of(start)], 0, Redactor(keeps_all=full))


def page_of(start: Start, *, full: bool = False) -> str:
    """The page."""
    return page([start], [verdict_of(start)], 0, full=full)


def hostile_start(*, text: str = HOSTILE, rounds: int = 6) -> Start:
    """Every event there is, with ``text`` in every field that takes one, and numbers that nobody expects."""
    events: list[Event] = [_filled(RunStarted, text)]
    for number in range(rounds):
        state = f"{number}{text}"
        events.append(StateEntered(state=state, edge=text, source=text))
        events += [
            _filled(kind, text, state=state)
            for kind in EVENT_TYPES.values()
            if kind not in (RunStarted, StateEntered)
            and kind.kind not in ("state_left", "state_failed", "run_finished")
        ]
        events.append(UnknownEvent(payload={text: text, "n": LARGE, "deep": _deep(text)}))
        events.append(_filled(EVENT_TYPES["state_left" if number % 2 else "state_failed"], text, state=state))
    events.append(_filled(EVENT_TYPES["run_finished"], text, end=text))
    journal = Journal(
        text[:4_000], tuple(records(events, origin=Origin(source=text, line=1, text=text))),
        (Problem(kind="broken", offset=0, line=1, message=text, seq=1),),
    )  # fmt: skip
    found = [Found(journal=journal, stacks=(text, text))]
    return next(iter(grouped(found, source="journal", origin=text, is_whole=True)))


def _deep(text: str) -> Any:
    value: Any = text
    for _ in range(40):
        value = {text[:10]: [value]}
    return value


def _filled(kind: type[Event], text: str, **given: Any) -> Event:
    values = {
        field.name: _value(str(field.type), field.name, text)
        for field in attrs.fields(kind)  # type: ignore[arg-type]
        if field.name not in given
    }
    known = {field.name for field in attrs.fields(kind)}  # type: ignore[arg-type]
    return kind(**values, **{name: value for name, value in given.items() if name in known})


def _value(annotation: str, name: str, text: str) -> Any:
    made: dict[str, Any] = {
        "Snapshot": Snapshot(
            total_bytes=-LARGE, free_bytes=LARGE, process_bytes=LARGE, reserved_bytes=-5,
            pools=(PoolUsage(pool=text, purpose=text, reserved_bytes=LARGE, active_bytes=1),),
            tenants=(Tenant(label=text, bytes=7),), sources={text: text, "torch": text},
        ),
        "tuple[Finding": (
            Finding(code=text, severity=text, message=text, state=text, part=text, observed=[text, LARGE],  # type: ignore[arg-type]
                    expected=float("nan"), tolerance={text: text}, scope=text, reason=text),
        ),
        "tuple[BudgetTerm": (BudgetTerm(term=text, bytes=LARGE, source=text),),
        "tuple[Mapping": ({text: text, "bytes": LARGE},),
        "tuple[str": (text, text),
    }  # fmt: skip
    # Of resolved types the name has its module before it.
    plain = re.sub(r"[\w.]+\.(?=\w)", "", annotation)
    for begin, value in made.items():
        if begin in plain:
            return value
    if name == "plan":
        return {"name": text, "states": [{"name": text}], "edges": [{"name": text, "source": text, "target": text}]}
    if name in ("rank", "visit", "attempt"):
        return 1
    if "Mapping[" in annotation:
        return {text: text, f"{text}2": LARGE if "int" in annotation else text}
    # Types are names until somebody resolves them: "int | None", or "<class 'int'>".
    word = annotation.removeprefix("<class '").partition("'")[0].partition(" ")[0]
    return {"int": LARGE, "bool": True}.get(word, text)
