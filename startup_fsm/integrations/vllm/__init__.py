"""
A plugin for vLLM, without a fork: its own worker methods become states of a journal, and its KV cache is sized by what
a start took.

Loaded by vLLM itself in every process (entry point group ``vllm.general_plugins``). ``STARTUP_FSM_VLLM`` says what it
does: ``record`` writes a journal and changes nothing; ``enforce`` also corrects the size of the KV cache. Otherwise it
is silent, and free: nothing is imported. ``STARTUP_FSM_RUNS`` is the directory of runs (``runs``).
"""

from __future__ import annotations

import os
from typing import Final

#: What the plugin does: ``record`` or ``enforce``; anything else is nothing.
MODE_VARIABLE: Final = "STARTUP_FSM_VLLM"
#: Where run directories go.
RUNS_VARIABLE: Final = "STARTUP_FSM_RUNS"

MODES: Final = ("record", "enforce")


def install() -> None:
    """
    What vLLM calls in each of its processes; it never raises, since that would end the process.

    Calling it again in the same process changes nothing.
    """
    mode = os.environ.get(MODE_VARIABLE, "").strip().lower()
    if mode not in MODES:
        return
    try:
        from startup_fsm.integrations.vllm.plugin import begin

        begin(mode, os.environ.get(RUNS_VARIABLE) or "runs")
    except Exception as error:  # noqa: BLE001 - an engine must start with or without us
        import logging

        logging.getLogger("startup_fsm").warning("the vLLM plugin is off: %s: %s", type(error).__name__, error)
