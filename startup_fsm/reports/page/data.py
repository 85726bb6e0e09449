"""
All that the page shows of one start, as plain data: folded once, in Python; what a journal says goes through redaction.

Times are in microseconds and bytes in bytes. Everything has a bound, and what a bound cuts off is counted and said.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from startup_fsm.clocks import beginnings
from startup_fsm.reports.page.budget_table import FORMULA
from startup_fsm.reports.page.event_rows import text_of
from startup_fsm.reports.page.frames import KINDS, OWN, kind_of
from startup_fsm.reports.page.graph import graph_of
from startup_fsm.reports.page.judgements import check_rows, words_of
from startup_fsm.reports.page.ranks import LINE, NAME, rank_data
from startup_fsm.reports.page.redaction import Redactor
from startup_fsm.reports.page.sizings import of_log
from startup_fsm.starts import Process, Start
from startup_fsm.verdict import Verdict
from startup_fsm.verdicts import sizing

SCHEMA: Final = 1

#: Processes shown one by one.
MOST_RANKS: Final = 64

#: Longest text of any other kind, in characters.
TEXT: Final = 800
#: Longest texts by the name of what they stand in, and in what stands below it: names of all kinds, lines, cells.
_LIMITS: Final = {
    **dict.fromkeys(
        ("accounts", "category", "code", "device", "edge", "engine", "engine_version", "environment", "host", "label",
         "marks", "mode", "name", "part", "pid", "plan", "pools", "rank", "run", "setting", "severity", "source",
         "state", "steps", "target", "terms", "versions", "ledger", "choices", "charged", "kind", "outcome"),
        NAME,
    ),
    "checks": LINE,
    "frames": NAME,
    "line": 160,
    "texts": TEXT,
}  # fmt: skip

#: Beyond this a browser's numbers are not exact.
_LARGEST: Final = (1 << 53) - 1


def page_data(starts: Sequence[Start], verdicts: Sequence[Verdict], shown: int, redactor: Redactor) -> dict[str, Any]:
    """
    The data of the page.

    Args:
        starts: All that were read.
        verdicts: One for each of them.
        shown: Index of the one that the page is about; the others are named only.
        redactor: What says every text.
    """
    start, verdict = starts[shown], verdicts[shown]
    decides = _deciding(start, verdict)
    kept = _kept(start, decides)
    texts = [[text_of(record) for record in process.journal.records] for process in kept]
    _learn(start, redactor, texts)
    ranks = [rank_data(process, own, redactor, share=len(kept)) for process, own in zip(kept, texts, strict=True)]
    place = kept.index(start.processes[decides])
    if any(source.is_imported for source in start.sources):
        _add_log(ranks[place], start, verdict)
    rows, left = check_rows(start, verdict)
    data = {
        "schema": SCHEMA,
        "redacted": not redactor.keeps_all,
        "verdict": words_of(verdict),
        "about": _about(start, verdict, redactor),
        "starts": [
            {
                "run": _run_id(each.run, redactor),
                "attempt": each.attempt,
                "line": words_of(its)["line"],
                "shown": at == shown,
            }
            for at, (each, its) in enumerate(zip(starts, verdicts, strict=True))
        ][-40:],
        "ranks": ranks,
        "ranks_left": len(start.processes) - len(kept),
        "decides": place,
        "clock": _aligned(kept, ranks),
        "kinds": list(KINDS),
        "own_kinds": sorted(OWN),
        "graph": graph_of([process.history for process in kept], place),
        "checks": rows,
        "checks_left": left,
        "formula": [list(step) for step in FORMULA],
    }
    data["replaced"] = redactor.counts
    return dict(settled(data, redactor))


def _add_log(rank: dict[str, Any], start: Start, verdict: Verdict) -> None:
    """What only all processes of a log together tell: its sizing, and its ledger."""
    sized = sizing(start.sources)
    if sized is not None and rank["what_if"] is None:
        rank["what_if"] = of_log(sized)
    rows = [each for each in verdict.ledger if each.account != "free"]
    if rows:
        total = verdict.figures.get("total_bytes")
        rank["ledger"] = {
            "basis": "printed",
            "total": total if isinstance(total, int) else None,
            "free": next((each.bytes for each in verdict.ledger if each.account == "free"), None),
            "rows": [[each.account, kind_of(each.account), each.bytes, each.source] for each in rows[:40]],
        }


def settled(value: Any, redactor: Redactor, limit: int = TEXT, depth: int = 0) -> Any:
    """The same data with every text said and cut, every number exact in a browser, and nothing nested without end."""
    if isinstance(value, str):
        return redactor.say(value, limit)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return max(-_LARGEST, min(_LARGEST, value))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth > 12:
        return "..."
    if isinstance(value, Mapping):
        return {
            redactor.say(name, NAME): settled(each, redactor, _LIMITS.get(name, limit), depth + 1)
            for name, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [settled(each, redactor, limit, depth + 1) for each in value]
    return redactor.say(value, limit)


def _deciding(start: Start, verdict: Verdict) -> int:
    labels = [process.label for process in start.processes]
    if verdict.failed_rank in labels:
        return labels.index(verdict.failed_rank)
    # Lines of nobody's come before those of the process that a log is about.
    failed = [any(visit.failed for visit in process.history.visits) for process in start.processes]
    return max(range(len(labels)), key=lambda at: (failed[at], start.processes[at].history.records, -at))


def _kept(start: Start, decides: int) -> list[Process]:
    """The first processes, and the one that decides."""
    kept = list(start.processes[:MOST_RANKS])
    if decides >= MOST_RANKS:
        kept[-1] = start.processes[decides]
    return kept


def _learn(start: Start, redactor: Redactor, texts: Sequence[Sequence[str]]) -> None:
    for path in (_LINES.sub("", start.origin), *(process.journal.path for process in start.processes)):
        # A name alone, such as runs, is a word of many a sentence.
        redactor.learn("path", path if "/" in path else None)
    for process in start.processes:
        started = process.history.started
        if started is None:
            continue
        redactor.learn("host", started.host)
        redactor.learn("id", started.boot_id)
        redactor.learn("pid", None if started.pid is None else str(started.pid))
        redactor.learn_paths(started.knobs)
        for name, value in started.environment.items():
            # A short value, such as a device number, is a word of every second sentence.
            redactor.learn("value", value if len(value) > 6 else None)
            redactor.learn_users([f"{name}={value}"])
        redactor.learn_users(each for each in started.knobs.values() if isinstance(each, str))
        for visit in process.history.visits:
            for _, shot in visit.snapshots.values():
                for tenant in shot.tenants:
                    redactor.learn("pid", tenant.label if tenant.label.isdigit() else None)
    for own in texts:
        redactor.learn_users(own)


def _run_id(run: str | None, redactor: Redactor) -> str | None:
    """A run id of ours says a time; one that a launcher gave may say anything."""
    if run is None or redactor.keeps_all or (len(run) == 25 and run[8] == "T" and run[15:17] == "Z-"):
        return run
    return run if run.startswith("log-") and len(run) == 23 else redactor.token("run", run)


def _origin(origin: str | None, redactor: Redactor) -> str | None:
    """What was read, as a token, with its lines."""
    if origin is None or origin == "-" or redactor.keeps_all:
        return origin
    path = _LINES.sub("", origin)
    return f"{redactor.token('path', path)}{origin[len(path) :]}"


#: Lines of a text log behind its path.
_LINES: Final = re.compile(r":\d{1,12}-\d{1,12}$")


def _about(start: Start, verdict: Verdict, redactor: Redactor) -> dict[str, Any]:
    process = start.processes[_deciding(start, verdict)]
    started = process.history.started
    settings = {} if started is None else started.knobs
    environment = {} if started is None else started.environment
    plan = process.history.plan
    return {
        "engine": verdict.engine,
        "engine_version": verdict.engine_version,
        "source": verdict.source,
        "origin": _origin(verdict.origin, redactor),
        "run": _run_id(verdict.run, redactor),
        "attempt": verdict.attempt,
        "processes": len(start.processes),
        "device": None if started is None else started.device,
        "plan": None if plan is None else plan.name,
        "mode": None if started is None else started.mode,
        "began": None if started is None or started.wall_ns is None else started.wall_ns // 1_000_000,
        "settings": [[name, _setting(value)] for name, value in list(settings.items())[:80]],
        "environment": [
            [redactor.token("variable", name) if name not in _KNOWN else name, redactor.token("value", str(value))]
            for name, value in list(environment.items())[:40]
        ],
        "versions": [] if started is None else [list(pair) for pair in list(started.versions.items())[:40]],
    }


_KNOWN: Final = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_MODULE_LOADING",
        "CUBLAS_WORKSPACE_CONFIG",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
    }
)


def _setting(value: Any) -> str:
    if isinstance(value, (list, tuple)) and len(value) > 8:
        return f"{len(value)} values: {', '.join(str(each) for each in value[:3])} ... {value[-1]}"
    return ", ".join(str(each) for each in value) if isinstance(value, (list, tuple)) else str(value)


def _aligned(kept: Sequence[Process], ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Offsets between the clocks of processes, where all tell their wall clock; and of how many hosts."""
    if all(each.as_source().is_imported for each in kept):
        return {"is_aligned": True, "hosts": 0}
    began = [each.wall_ns for each in beginnings([each.as_source() for each in kept])]
    known = [each for each in began if each is not None]
    if len(known) < len(began) or max(known) - min(known) > 86_400_000_000_000:
        return {"is_aligned": False, "hosts": 0}
    first = min(known)
    for rank, wall in zip(ranks, known, strict=True):
        rank["offset"] = (wall - first) // 1_000
    hosts = {each.history.started.host for each in kept if each.history.started is not None}
    return {"is_aligned": True, "hosts": len(hosts)}
