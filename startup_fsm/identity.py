"""Who starts: run id, process, host, versions, fingerprint, and what must never reach a journal."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.metadata
import os
import re
import secrets
import socket
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import orjson

from startup_fsm.codec import as_plain

#: The run that this process belongs to, and the pid of the process that made it.
RUN_VARIABLE: Final = "STARTUP_FSM_RUN"
OWNER_VARIABLE: Final = "STARTUP_FSM_RUN_OWNER"

#: What a process goes on with that takes the place of another one.
CONTINUED_VARIABLE: Final = "STARTUP_FSM_CONTINUED"
#: Where the ranks of a start meet, as ``host:port``, where no launcher keeps a store; rank 0 keeps one there then.
STORE_VARIABLE: Final = "STARTUP_FSM_STORE"
#: Seconds that a rank waits for the others wherever all meet.
DEADLINE_VARIABLE: Final = "STARTUP_FSM_RANKS_DEADLINE"

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
# Whole words: max_num_batched_tokens is no secret, hf_token and hfToken are; eos_token_id and key_value_heads are none.
_SECRET: Final = re.compile(
    r"(?:^|[^a-z])(?:(?:access|auth|api|private|secret)?(?:token(?!_?ids?(?:$|[^a-z]))|keys?(?!_?values?(?:$|[^a-z])))"
    r"|(?:pass|key)phrase|secrets?|passwords?|passwd|pwd|credentials?)(?:$|[^a-z])",
    re.IGNORECASE,
)
_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_DEEPEST: Final = 16
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
        return _UNSAFE.sub("-", name).lstrip(".")[:120] or "run", True
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


@attrs.frozen(kw_only=True)
class Continued:
    """
    A run that this process goes on with, after another one could not.

    Attributes:
        run, process, rank: Of that other process; this one takes its place.
        attempt: Which attempt of the run this is.
        restarts: How often the command has started itself again.
        reason: Why.
    """

    run: str
    process: str
    rank: int | None
    attempt: int
    restarts: int
    reason: str = ""


def continued() -> Continued | None:
    """What this process goes on with, taken out of the environment so that no other start does; None for a new run."""
    text = os.environ.pop(CONTINUED_VARIABLE, "")
    try:
        return Continued(**orjson.loads(text)) if text else None
    except (orjson.JSONDecodeError, TypeError):
        return None


def export_continued(continued: Continued) -> None:
    """Tell the program that takes this one's place what it goes on with."""
    os.environ[CONTINUED_VARIABLE] = orjson.dumps(attrs.asdict(continued)).decode()


def rank_of(environment: Mapping[str, str] | None = None) -> int | None:
    """The rank that a launcher gave this process, or None."""
    given = os.environ if environment is None else environment
    if (rank := _number(given.get("RANK"))) is not None:
        return rank
    return _number(given.get("SLURM_PROCID")) if world_size(given) > 1 else None


def world_size(environment: Mapping[str, str] | None = None) -> int:
    """How many ranks the launcher started; 1 where there is none."""
    given = os.environ if environment is None else environment
    if "RANK" in given:
        return _number(given.get("WORLD_SIZE")) or 1
    if "SLURM_PROCID" not in given:
        return 1
    # Of the step: a script of the job itself is one process, whatever the job has asked for.
    return _number(given.get("SLURM_STEP_NUM_TASKS")) or _number(given.get("SLURM_NTASKS")) or 1


def store_address(environment: Mapping[str, str] | None = None) -> tuple[str, int, bool] | None:
    """
    Host and port of the store that ranks meet in, and whether the launcher keeps it; None where there is none.

    ``MASTER_ADDR`` alone is none: that port belongs to the process group of the engine.
    """
    given = os.environ if environment is None else environment
    port = _number(given.get("MASTER_PORT"))
    if given.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and given.get("MASTER_ADDR") and port:
        return given["MASTER_ADDR"], port, True
    host, _, digits = given.get(STORE_VARIABLE, "").rpartition(":")
    port = _number(digits)
    return (host.strip("[]"), port, False) if host and port else None


def ranks_deadline_s(environment: Mapping[str, str] | None = None) -> float | None:
    """Seconds that a rank waits for the others, where the environment says so in whole seconds."""
    given = os.environ if environment is None else environment
    return _number(given.get(DEADLINE_VARIABLE)) or None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch("[0-9]{1,9}", text) else None


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
    """The same values, with those withheld whose names say that they are secret, at any depth."""
    return {str(name): WITHHELD if _is_secret(str(name)) else _open(value, 1) for name, value in values.items()}


def _is_secret(name: str) -> bool:
    return _SECRET.search(_HUMP.sub("_", name)) is not None


def _open(value: Any, depth: int) -> Any:
    """A value without the secrets inside it: containers, and objects that are nothing but their fields."""
    if isinstance(value, (type, str, int, float)) or value is None:
        return value
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, (list, tuple)):
        return [_open(each, depth + 1) for each in value]
    fields = _fields_of(value)
    if fields is None:
        return value
    return {
        str(name): WITHHELD if _is_secret(str(name)) else _open(each, depth + 1) for name, each in list(fields.items())
    }


def _fields_of(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return vars(value)
    # What orjson and the codec would write field by field.
    names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    names += [field.name for field in attrs.fields(type(value))] if attrs.has(type(value)) else []
    return {name: getattr(value, name, None) for name in names} if names else None


def fingerprint(*parts: Any) -> str:
    """A short digest of plain data; equal wherever the data is."""
    # An object shows its address, which no two ranks share.
    body = _ADDRESS.sub("", orjson.dumps(as_plain(parts), option=orjson.OPT_SORT_KEYS).decode()).encode()
    return hashlib.sha256(body).hexdigest()[:16]
