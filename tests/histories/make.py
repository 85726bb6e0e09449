"""
Makes the journals of this folder again, with what is expected of them. Look at the difference before you keep it.

    python tests/histories/make.py

They are starts of the engine that only counts bytes; host, process and paths are taken out.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson

from startup_fsm.budget import Knobs
from startup_fsm.codec import CODEC
from startup_fsm.diagnose import diagnose
from startup_fsm.fold import fold
from startup_fsm.journal import read_journal
from startup_fsm.memory import MIB
from startup_fsm.sources import Source
from startup_fsm.testing import counting_start
from startup_fsm.verdict import Verdict

HERE = Path(__file__).parent
STARTS: dict[str, dict[str, Any]] = {
    "ready": {"knobs": Knobs(utilization=0.9)},
    "oom_in_capture": {"knobs": Knobs(utilization=1.0, graph_estimate="none"), "engine": {"row": 16 * MIB}},
    "killed": {"knobs": Knobs(utilization=0.9)},
}
#: Facts of the machine that made it.
_OURS = {
    "host": "host",
    "pid": 4711,
    "boot_id": None,
    "wall_ns": 1_790_000_000_000_000_000,
    "versions": {},
    "environment": {},
}


def expected_of(verdict: Verdict) -> dict[str, Any]:
    """What a replay must say again: facts and judgements, not words."""
    return {
        "outcome": verdict.outcome,
        "failed_state": verdict.failed_state,
        "part": verdict.part,
        "exit_code": verdict.exit_code,
        "missing_bytes": verdict.missing_bytes,
        "figures": dict(verdict.figures),
        "durations_ns": dict(verdict.durations_ns),
        "ledger": {each.account: each.bytes for each in verdict.ledger},
        "findings": [
            [each.finding.code, each.finding.severity, each.finding.state, list(each.finding.evidence)]
            for each in verdict.findings
        ],
        "advice": [
            [change.setting, change.direction, change.before, change.to]
            for advice in verdict.advice
            for change in advice.changes
        ],
    }


def replayed(path: Path) -> Verdict:
    """The verdict on a journal file, by itself."""
    journal = read_journal(path)
    problems = tuple((each.kind, each.message, each.seq) for each in journal.problems)
    return diagnose([Source(run=fold(journal.records), problems=problems)])


def main() -> None:
    """Write every journal and its expectation."""
    for name, options in STARTS.items():
        with tempfile.TemporaryDirectory() as directory:
            boot, engine = counting_start(journal=directory, progress=False, **options)
            engine.sizes = (1, 2, 4)
            try:
                boot.run(engine)
            except RuntimeError as error:
                print(f"{name}: {type(error).__name__}")
            if boot.path is None:
                sys.exit("a start with a journal has a path")
            lines = boot.path.read_bytes().splitlines(keepends=True)
        path = HERE / f"{name}.jsonl"
        path.write_bytes(b"".join(_cut(name, [_anonymous(line) for line in lines])))
        text = orjson.dumps(expected_of(replayed(path)), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
        path.with_suffix(".expected.json").write_bytes(text + b"\n")


def _anonymous(line: bytes) -> bytes:
    body = orjson.loads(line)
    body["run"] = "20260101T000000Z-00000000"
    payload = body["payload"]
    if body["kind"] == "run_started":
        payload |= _OURS
    if "where" in payload:
        payload["where"] = [re.sub(r"^\S*/(?=startup_fsm/|tests/)", "", frame) for frame in payload["where"]]
    return CODEC.encode(CODEC.decode(orjson.dumps(body)))


def _cut(name: str, lines: list[bytes]) -> list[bytes]:
    """A process that was killed while it wrote the event after it entered ``allocate_kv``."""
    if name != "killed":
        return lines
    at = next(at for at, line in enumerate(lines) if b'"state_entered"' in line and b'"allocate_kv"' in line)
    return [*lines[: at + 1], lines[at + 1][:100]]


if __name__ == "__main__":
    main()
