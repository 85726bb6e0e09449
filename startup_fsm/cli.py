"""
The door: ``startup-fsm VERB ...``. stdout is data, stderr is talk, and the exit code says the same in short.

The verbs are in ``verbs``. Here errors become two lines and an exit code, and nothing is imported before it is needed.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cyclopts import App

#: Module to verbs, each with a line for the overview; only the module of the verb that was asked for is loaded.
_VERBS: Final = {
    "starting": {
        "demo": "Start the reference engine on this machine.",
        "run": "Start your engine: MODULE:FACTORY.",
    },
    "reading": {
        "doctor": "The verdict: outcome, ranked causes, where every byte was, what would help.",
        "time": "How long each state took.",
        "blame": "What cost most, in time and in bytes.",
        "verify": "Replay against the plan, and judge again with today's checks.",
        "plan": "List plans, or draw one.",
    },
    "asking": {
        "what-if": "The budget again with other settings.",
    },
    "comparing": {
        "diff": "Two starts: what made one worse, and all that differs.",
        "chain": "What everybody waited for, and who is slower.",
    },
    "importing": {
        "import": "A text log as journals.",
    },
    "watching": {
        "watch": "Follow a start that is running, all its ranks, to its verdict.",
    },
    "tracing": {
        "trace": "A trace for Perfetto or chrome://tracing.",
    },
    "showing": {
        "report": "One HTML page that needs no network: every picture of a start.",
    },
}

#: Verbs that are words of Python, too, and the function that does them.
_FUNCTIONS: Final = {"import": "import_log"}


def main(tokens: Sequence[str] | None = None) -> int:
    """
    Run one verb and give its exit code.

    Args:
        tokens: The arguments; None takes those of the process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # Paths and journals may hold what the terminal's encoding has no letters for.
            stream.reconfigure(errors="backslashreplace")
    if tokens is None:
        # A process of our own, and a short one: what is imported stays to the end, so looking through it for garbage is
        # a fifth of the time of a verb that reads.
        gc.disable()
    try:
        return _run(tokens)
    except BrokenPipeError:
        # Whoever read us has seen enough; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return _die_by(signal.SIGINT)
    finally:
        if tokens is None:
            gc.freeze()


def _app() -> App:
    from cyclopts import App

    app = App(
        name="startup-fsm",
        help="The start of an LLM engine as an explicit state machine: start it, and ask what happened.",
        help_format="plaintext",
        version=_version,
        suppress_keyboard_interrupt=False,
    )
    for module, verbs in _VERBS.items():
        for verb, summary in verbs.items():
            app.command(
                f"startup_fsm.verbs.{module}:{_FUNCTIONS.get(verb, verb.replace('-', '_'))}", name=verb, help=summary
            )
    return app


def _version() -> str:
    import startup_fsm

    try:
        return f"startup-fsm {startup_fsm.__version__}"
    except ImportError:
        return "startup-fsm, not installed"


def _run(tokens: Sequence[str] | None) -> int:
    from cyclopts import CycloptsError

    from startup_fsm.errors import JournalError, PeerFailed, ReplayDivergence, StartupError
    from startup_fsm.reports.output import say_error
    from startup_fsm.verdict import EXIT_DIVERGED, EXIT_PEER, EXIT_READY, EXIT_UNREADABLE, EXIT_USAGE

    try:
        code = _app()(tokens, exit_on_error=False, print_error=False, result_action="return_value")
        return code if isinstance(code, int) else EXIT_READY
    except CycloptsError as error:
        verb = " ".join(["startup-fsm", *(error.command_chain or ())])
        say_error(StartupError(str(error).rstrip("."), hint=f"{verb} --help"))
        return EXIT_USAGE
    except StartupError as error:
        say_error(error)
        codes = ((JournalError, EXIT_UNREADABLE), (ReplayDivergence, EXIT_DIVERGED), (PeerFailed, EXIT_PEER))
        return next((code for kind, code in codes if isinstance(error, kind)), EXIT_USAGE)


def _die_by(number: signal.Signals) -> int:
    """End this process as the signal would have; the exit code that shells give to it, should it survive."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number
