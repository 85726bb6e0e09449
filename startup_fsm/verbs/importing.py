"""The verb that makes journals of a text log, so that everything that works on a journal works on it."""

from __future__ import annotations

import re
from pathlib import Path as FilePath
from typing import Annotated

from cyclopts import Parameter

from startup_fsm.codec import CODEC
from startup_fsm.errors import JournalError
from startup_fsm.journal import file_name
from startup_fsm.reading import read_starts
from startup_fsm.reports.output import SCHEMA, emit_json, emit_pages
from startup_fsm.reports.terminal import pairs
from startup_fsm.starts import Start
from startup_fsm.verbs.arguments import Json, Path
from startup_fsm.verdict import EXIT_READY

Output = Annotated[str, Parameter(name=("--output", "-o"), help="Directory for the run directories of its starts.")]


def import_log(path: Path, /, *, output: Output = "runs", json: Json = False) -> int:
    """Write a text log, or mirrored lines, as journals: a run directory for each of its starts."""
    starts = read_starts(path)
    written = [(start, _write(start, FilePath(output))) for start in starts]
    if json:
        rows = [
            {
                "run": start.run,
                "source": start.source,
                "origin": start.origin,
                "journals": [str(each) for each in files],
            }
            for start, files in written
        ]
        emit_json({"schema": SCHEMA, "starts": rows})
    else:
        emit_pages(
            [pairs([("run", start.run), (start.source, start.origin), *(("journal", each) for each in files)])]
            for start, files in written
        )
    return EXIT_READY


def _write(start: Start, output: FilePath) -> list[FilePath]:
    directory = output / _safe(start.run or "unknown")
    files = []
    for process in start.processes:
        records = process.journal.records
        if not records:
            continue
        path = directory / file_name(_safe(records[0].process), start.attempt)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.writelines(CODEC.encode(record) for record in records)
        except FileExistsError:
            hint = "name another directory with --output, or delete this run"
            raise JournalError(f"{path}: this start was imported already", path=str(path), hint=hint) from None
        except OSError as error:
            raise JournalError(
                f"{path}: {error.strerror or error}", path=str(path), hint="name a directory that can be written"
            ) from None
        files.append(path)
    return files


def _safe(name: str) -> str:
    """A name that is one step of a path, whatever a log or a journal calls itself."""
    return re.sub(r"[^\w.-]", "_", name).lstrip(".")[:200] or "unnamed"
