"""
The two ways out: pages and JSON to stdout, errors to stderr.

Only what stdout gets is data; whoever reads it may be a program.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import orjson
from rich.console import RenderableType

from startup_fsm.errors import StartupError
from startup_fsm.reports.terminal import page, say
from startup_fsm.starts import Start

#: Of what the verbs give with ``--json``; ``doctor`` has a schema of its own.
SCHEMA: Final = 1


def rows_by_start(starts: Iterable[tuple[Start, list[dict[str, Any]]]]) -> dict[str, Any]:
    """The JSON form of a view: its rows by process, under the start that they belong to."""
    return {
        "schema": SCHEMA,
        "starts": [
            {
                "run": start.run,
                "attempt": start.attempt,
                "source": start.source,
                "origin": start.origin,
                "processes": rows,
                "unseen": list(start.unseen),
            }
            for start, rows in starts
        ],
    }


def emit_pages(pages: Iterable[Iterable[RenderableType]]) -> None:
    """Pages to stdout, an empty line between two."""
    emit("\n".join(page(content) for content in pages))


def emit_json(data: Any) -> None:
    """One JSON value to stdout."""
    try:
        text = orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:
        # A path that is no text, or a number beyond 64 bits.
        from json import dumps

        text = dumps(data, indent=2, default=str)
    emit(f"{text}\n")


def emit(text: str) -> None:
    """Text to stdout as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


def say_error(error: StartupError) -> None:
    """An error of ours to stderr: what happened, and what can be done about it."""
    say("error", error.message, sys.stderr)
    if error.hint:
        say("hint", error.hint, sys.stderr)


def write_whole(path: Path, content: bytes) -> None:
    """
    Write the whole file or none of it: nobody finds half of one.

    Raises:
        StartupError: It cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            # A pipe or a device, such as /dev/stdout, has no name to be replaced.
            path.write_bytes(content)
            return
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with unfinished.open("xb") as file:
                file.write(content)
            unfinished.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
    except OSError as error:
        hint = "name a file that can be written with --output"
        raise StartupError(f"{path}: {error.strerror or error}", hint=hint) from None
