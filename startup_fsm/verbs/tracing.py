"""The verb that makes a trace: starts on a line of time, for a viewer of traces."""

from __future__ import annotations

import sys
from pathlib import Path as FilePath
from typing import Annotated, Final

import orjson
from cyclopts import Parameter

from startup_fsm.reading import read_starts
from startup_fsm.reports.output import SCHEMA, emit, emit_json, write_whole
from startup_fsm.reports.perfetto import trace_of
from startup_fsm.reports.terminal import say
from startup_fsm.verbs.arguments import Json, Path
from startup_fsm.verdict import EXIT_READY
from startup_fsm.verdicts import judge

Output = Annotated[
    str, Parameter(name=("--output", "-o"), allow_leading_hyphen=True, help="The file to write; - for standard output.")
]

#: Stands for standard output.
_STDOUT: Final = "-"


def trace(path: Path, /, *, output: Output = "trace.json", json: Json = False) -> int:
    """Write the starts of PATH as a trace that ui.perfetto.dev and chrome://tracing open."""
    starts = read_starts(path)
    verdicts = [judge(start.sources, source=start.source, origin=start.origin) for start in starts]
    made = trace_of(starts, verdicts)
    text = orjson.dumps(made, default=str, option=orjson.OPT_NON_STR_KEYS)
    if output == _STDOUT:
        emit(f"{text.decode()}\n")
        return EXIT_READY
    write_whole(FilePath(output), text)
    if json:
        emit_json({"schema": SCHEMA, "output": output, "bytes": len(text), "events": len(made["traceEvents"])})
    else:
        say("written", f"{output}, {len(made['traceEvents'])} events; open it at https://ui.perfetto.dev", sys.stderr)
    return EXIT_READY
