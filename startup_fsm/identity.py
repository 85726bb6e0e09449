"""Who starts: run id, process, host, versions, fingerprint, and what must never reach a journal."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import orjson

#: The run that this process belongs to, and the pid of the process that made it.
RUN_VARIABLE: Final = "STARTUP_FSM_RUN"
OWNER_VARIABLE: Final = "STARTUP_FSM_RUN_OWNER"

#: Ids that launchers give a run, in the order they are believed.
_LAUNCHERS: Final = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")

#: The only environment that reaches a journal.
_ENVIRONMENT: Final = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MODULE_LOADING",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
)
_PACKAGES: Final = ("startup-fsm", "torch", "transformers", "vllm", "nvidia-ml-py", "cuda-python")
# Whole words: max_num_batched_tokens is no secret, hf_token is.
_SECRET: Final = re.compile(
    r"(?:^|[^a-z])(?:token|key|apikey|secret|password|passwd|credentials?)(?:$|[^a-z])", re.IGNORECASE
)
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")
WITHHELD: Final = "[withheld]"


def run_id(environment: Mapping[str, str] | None = None) -> tuple[str, bool]:
    """
    The id of the run that this process starts or joins, and whether another process made it.

    It sorts by time where we make it. A process that made one before makes another for its next start.
    """
    given = os.environ if environment is None else environment
    name = given.get(RUN_VARIABLE)
    if name and given.get(OWNER_VARIABLE) != str(os.getpid()):
        return _UNSAFE.sub("-", name)[:120], True
    for variable in _LAUNCHERS:
        # torchrun says "none" when nobody named the run.
        if (value := given.get(variable)) and value != "none":
            return f"{variable.split('_')[0].lower()}-{_UNSAFE.sub('-', value)[:100]}", False
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return f"{stamp}-{secrets.token_hex(4)}", False


def export_run(run: str) -> None:
    """Tell processes that we spawn which run they belong to."""
    os.environ[RUN_VARIABLE] = run
    os.environ[OWNER_VARIABLE] = str(os.getpid())


def rank_of(environment: Mapping[str, str] | None = None) -> int | None:
    """The rank that a launcher gave this process, or None."""
    value = (os.environ if environment is None else environment).get("RANK", "")
    return int(value) if value.isdigit() else None


def process_name(rank: int | None) -> str:
    """``rank-00003``, or ``engine-<pid>`` for a process that is no rank."""
    return f"engine-{os.getpid()}" if rank is None else f"rank-{rank:05d}"


def host_name() -> str:
    """This host's own name."""
    return socket.gethostname()


def boot_id() -> str | None:
    """Changes with every boot of the host; None where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def versions() -> dict[str, str]:
    """Versions of the packages that decide about memory, where they are installed."""
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment() -> dict[str, str]:
    """The variables that may be journaled, where they are set."""
    return {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values, with those withheld whose names say that they are secret."""
    return {
        str(name): WITHHELD
        if _SECRET.search(str(name))
        else without_secrets(value)
        if isinstance(value, Mapping)
        else value
        for name, value in values.items()
    }


def fingerprint(*parts: Any) -> str:
    """A short digest of plain data; equal wherever the data is."""
    body = orjson.dumps(parts, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS, default=str)
    return hashlib.sha256(body).hexdigest()[:16]
