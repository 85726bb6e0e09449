"""The verb that draws: one start as a page for a browser, which needs no network and names nobody's machine."""

from __future__ import annotations

import sys
from pathlib import Path as FilePath
from typing import Annotated, Final

from cyclopts import Parameter

from startup_fsm.errors import StartupError
from startup_fsm.reading import read_starts
from startup_fsm.reports.output import emit, emit_json, write_whole
from startup_fsm.reports.terminal import say
from startup_fsm.verbs.arguments import SWITCH, Json, Path
from startup_fsm.verdict import EXIT_READY, Verdict
from startup_fsm.verdict import report as answer_of
from startup_fsm.verdicts import judge

Output = Annotated[
    str, Parameter(name=("--output", "-o"), allow_leading_hyphen=True, help="The file to write; - for standard output.")
]
Full = Annotated[
    bool,
    SWITCH,
    Parameter(help="Keep paths, host names, user names, process numbers and environment: not for a public issue."),
]
Which = Annotated[
    int | None,
    Parameter(name="--start", help="Which start to show where there are several, from 1; else the one that matters."),
]

#: Stands for standard output.
_STDOUT: Final = "-"


def report(
    path: Path, /, *, output: Output = "report.html", full: Full = False, start: Which = None, json: Json = False
) -> int:
    """Draw a start as one HTML file: verdict, memory, time, checks, ledger, plan, time travel, what-if, events."""
    starts = read_starts(path)
    verdicts = [judge(each.sources, source=each.source, origin=each.origin) for each in starts]
    shown = _shown(start, verdicts)
    if json:
        from startup_fsm.reports.page.data import page_data
        from startup_fsm.reports.page.redaction import Redactor

        emit_json(page_data(starts, verdicts, shown, Redactor(keeps_all=full)))
        return EXIT_READY
    from startup_fsm.reports.page.render import page

    text = page(starts, verdicts, shown, full=full)
    if output == _STDOUT:
        emit(text)
        return EXIT_READY
    content = text.encode()
    write_whole(FilePath(output), content)
    kept = "" if full else "; paths, hosts, users and process numbers are replaced, --full keeps them"
    say("written", f"{output}, {len(content) // 1024} KiB{kept}", sys.stderr)
    return EXIT_READY


def _shown(start: int | None, verdicts: list[Verdict]) -> int:
    if start is None:
        main = answer_of(verdicts)["main"]
        return len(verdicts) - 1 if main is None else int(main)
    if not 1 <= start <= len(verdicts):
        count = len(verdicts)
        raise StartupError(f"--start {start}: there {'is' if count == 1 else 'are'} {count}", hint="count from 1")
    return start - 1
