"""Identity: whose run a process belongs to, and what never reaches a journal."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import types
from typing import Any

import attrs
import pytest

from startup_fsm import identity
from startup_fsm.codec import CODEC
from startup_fsm.identity import WITHHELD, export_run, fingerprint, process_name, rank_of, run_id, without_secrets
from startup_fsm.testing import counting_start


def test_a_run_of_our_own_sorts_by_time() -> None:
    """A stamp and eight digits; two are never the same."""
    ids = [run_id({}) for _ in range(20)]
    assert all(re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{8}", run) and not joined for run, joined in ids)
    assert len({run for run, _ in ids}) == 20


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"STARTUP_FSM_RUN": "mine"}, ("mine", True)),
        ({"STARTUP_FSM_RUN": "mine", "STARTUP_FSM_RUN_OWNER": "1"}, ("mine", True)),
        ({"STARTUP_FSM_RUN": "a/b c\n", "SLURM_JOB_ID": "7"}, ("a-b-c-", True)),
        ({"STARTUP_FSM_RUN": "../../etc"}, ("-..-etc", True)),
        ({"STARTUP_FSM_RUN": ".."}, ("run", True)),
        ({"STARTUP_FSM_RUN": "."}, ("run", True)),
        ({"STARTUP_FSM_RUN": "x" * 500}, ("x" * 120, True)),
        ({"TORCHELASTIC_RUN_ID": "job", "SLURM_JOB_ID": "7"}, ("torchelastic-job", False)),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7"}, ("slurm-7", False)),
    ],
)
def test_a_given_run_is_joined(environment: dict[str, str], expected: tuple[str, bool]) -> None:
    """Ours first, then the launcher's; whatever the name holds, it is one folder below the directory of runs."""
    assert run_id(environment) == expected


def test_what_we_made_ourselves_is_not_joined() -> None:
    """The process that exported a run makes another for its next start."""
    mine = {"STARTUP_FSM_RUN": "mine", "STARTUP_FSM_RUN_OWNER": str(os.getpid())}
    run, joined = run_id(mine)
    assert run != "mine"
    assert not joined


def test_export_tells_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children find the run and its owner in their environment."""
    monkeypatch.setenv("STARTUP_FSM_RUN", "")
    monkeypatch.setenv("STARTUP_FSM_RUN_OWNER", "")
    export_run("mine")
    assert run_id({**os.environ, "STARTUP_FSM_RUN_OWNER": "0"}) == ("mine", True)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("0", 0), ("12", 12), ("", None), ("-1", None), ("²", None), ("1.0", None), ("9" * 50, None)],
)
def test_a_rank_is_a_plain_number(value: str, expected: int | None) -> None:
    """Anything else is no rank, and no exception."""
    assert rank_of({"RANK": value}) == expected
    assert rank_of({}) is None


def test_process_names() -> None:
    """Ranks by number, others by pid."""
    assert process_name(3) == "rank-00003"
    assert process_name(None) == f"engine-{os.getpid()}"


SECRET = [
    "hf_token", "HF_TOKEN", "token", "hfToken", "HFToken", "authToken", "api_key", "api-key", "apiKey", "apikey",
    "API_KEY", "aws_secret_access_key", "aws_access_key_id", "secret", "secrets", "client_secret", "secretKey",
    "password", "db.password", "passwords", "passwd", "credentials", "key", "private_key", "ssh_passphrase", "token2",
]  # fmt: skip
OPEN = [
    "max_num_batched_tokens", "max_tokens", "eos_token_id", "eosTokenId", "pad_token_ids", "num_key_value_heads",
    "tokenizer", "tokenizer_mode", "keyboard", "monkey", "utilization", "kv_cache_dtype", "max_model_len",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRET)
def test_secrets_are_withheld_by_name(name: str) -> None:
    """Names that say token, key, secret or password, in any spelling."""
    assert without_secrets({name: "s3cret"}) == {name: WITHHELD}
    assert without_secrets({name: {"inner": "s3cret"}}) == {name: WITHHELD}


@pytest.mark.parametrize("name", OPEN)
def test_what_is_no_secret_is_kept(name: str) -> None:
    """Words that only contain such a word, and ids of tokens, stay."""
    assert without_secrets({name: 7}) == {name: 7}


@dataclasses.dataclass
class _Arguments:
    model: str = "m"
    hf_token: str = "s3cret"


@attrs.define
class _Settings:
    model: str = "m"
    api_key: str = "s3cret"


def test_secrets_are_withheld_at_any_depth() -> None:
    """Inside lists, mappings and objects that are nothing but their fields."""
    values: dict[Any, Any] = {
        "list": [{"hf_token": "s3cret", "a": 1}, ({"password": "s3cret"},)],
        "deep": {"er": {"api_key": "s3cret", "b": 2}},
        "dataclass": _Arguments(),
        "attrs": _Settings(),
        "namespace": argparse.Namespace(hf_token="s3cret", c=3),
        "simple": types.SimpleNamespace(secret="s3cret"),
        3: {"token": "s3cret"},
    }
    kept = without_secrets(values)
    assert "s3cret" not in repr(kept)
    assert kept["list"][0]["a"] == 1
    assert kept["deep"]["er"]["b"] == 2
    assert kept["dataclass"] == {"model": "m", "hf_token": WITHHELD}
    assert kept["namespace"]["c"] == 3
    assert values["list"][0]["hf_token"] == "s3cret"


def test_a_circle_of_settings_ends() -> None:
    """What contains itself is cut, not followed for ever."""
    circle: dict[str, Any] = {"a": 1}
    circle["self"] = circle
    assert without_secrets(circle)["self"]["a"] == 1


def test_no_secret_reaches_a_journal(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings, notes and the environment of a real start: only what may be known is in the file."""
    monkeypatch.setenv("HF_TOKEN", "s3cret-environment")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    settings = {
        "hf_token": "s3cret-knob",
        "engine_args": _Arguments(hf_token="s3cret-field"),
        "max_num_batched_tokens": 9,
    }
    boot, engine = counting_start(journal=tmp_path, settings=settings)
    with boot.state("init_device") as step:
        step.note(api_key="s3cret-note", extra=[{"password": "s3cret-list"}])
    boot.fail("enough")
    assert engine is not None
    assert boot.path is not None
    text = boot.path.read_bytes()
    assert b"s3cret" not in text
    started = CODEC.decode(text.splitlines()[0]).event
    assert started.knobs["max_num_batched_tokens"] == 9  # type: ignore[attr-defined]
    assert started.environment["CUDA_VISIBLE_DEVICES"] == "3"  # type: ignore[attr-defined]


def test_a_fingerprint_is_the_same_wherever_the_data_is() -> None:
    """The order of keys and the addresses of objects do not matter; values do; nothing raises."""
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
    assert fingerprint({"a": object()}) == fingerprint({"a": object()})
    circle: list[Any] = []
    circle.append(circle)
    for odd in ({"a": 2**90}, {"a": "\ud800"}, {1: {None: 2}}, circle, float("nan")):
        assert re.fullmatch("[0-9a-f]{16}", fingerprint(odd))


def test_versions_and_environment_are_plain() -> None:
    """What is installed of a short list, what is set of a short list."""
    assert set(identity.versions()) <= set(identity._PACKAGES)
    assert all(isinstance(each, str) for each in identity.versions().values())
    assert set(identity.environment()) <= set(identity._ENVIRONMENT)
