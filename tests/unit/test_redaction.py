"""What says whose machine it was never stands in a page; the rest stays as it is."""

from __future__ import annotations

import time

import pytest

from startup_fsm.reports.page.redaction import LONGEST, Redactor


@pytest.fixture
def redactor() -> Redactor:
    """One that knows a host, a user and a process."""
    made = Redactor()
    made.learn("host", "node17.example.com")
    made.learn("user", "mustermann")
    made.learn("pid", "48213")
    return made


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at /srv/models/secret/config.json", "at path-1.json"),
        ("/srv/engine/main.py:12 run: step()", "path-1.py:12 run: step()"),
        ('File "/home/mustermann/my engine/x.py", line 3, in f', 'File "path-1.py", line 3, in f'),
        ("/srv/my engine/x.py:3 capture", "path-1.py:3 capture"),
        ("/opt/v/lib/python3.12/site-packages/torch/cuda/graphs.py:88 f", "path-1/torch/cuda/graphs.py:88 f"),
        ("/opt/v/lib/python3.12/site-packages/secret/x.py:88 f", "path-1.py:88 f"),
        ("/usr/lib/python3.11/threading.py:324 wait", "path-1/threading.py:324 wait"),
        ('at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":2706', 'at "path-1/c10/cuda/CUDACachingAllocator.cpp":2706'),
        ("~/models/llama and ~mustermann/x", "path-1 and path-2"),
        ("runs/20260101/rank-00000.1.jsonl is torn", "path-1.jsonl is torn"),
        ("models/secret.safetensors is missing", "path-1.safetensors is missing"),
        (r"C:\Users\mustermann\x.log and \\share\x", "path-1.log and path-2"),
        ("node17.example.com said so, node17 too", "host-1 said so, host-1 too"),
        ("worker.cluster.internal:29500 refused", "host-1:29500 refused"),
        ("tcp://10.0.0.7:29500 and http://node17/x", "url-1 and url-2"),
        ("peer 10.0.0.7 port 29500", "peer address-1 port 29500"),
        ("fe80:0000:0000:0000:0202:b3ff:fe1e:8329 down", "address-1 down"),
        ("hostname=gpu-box-3 is up", "hostname=host-1 is up"),
        ("(Worker_TP0 pid=268) ERROR", "(Worker_TP0 pid=pid-1) ERROR"),
        ("Process 48213 has 30.00 GiB in use; 48213 (64 MiB)", "Process pid-1 has 30.00 GiB in use; pid-1 (64 MiB)"),
        ("engine-48213 failed", "engine-pid-1 failed"),
        ("mail somebody@example.com", "mail user-1"),
        ("user=mustermann started", "user=user-1 started"),
        ("token hf_abcdefghijklmnop", "token secret-1"),
        ("GPU-0b5c6a1e-6a0e-4d5e-9a55-3b1f8f3f0c11", "id-1"),
    ],
)
def test_replaced(redactor: Redactor, text: str, shown: str):
    """Paths, hosts, addresses, users, process numbers and secrets become tokens."""
    assert redactor.say(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "3.78 GiB are missing; 12 of 80 graphs, 35 tokens/s, and/or n/a",
        "gpu_memory_utilization 0.9, max_num_batched_tokens 48213 tokens",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 298.00 MiB.",
        "see https://pytorch.org/docs/stable/notes/cuda.html#environment-variables",
        "vllm 0.25.1 on 2025/07/02 10:00:01",
        "meta-llama/Llama-3.1-8B",
        "x.size() == 3 and self.malloc(nbytes)",
        "INTERNAL ASSERT FAILED: it->second->use_count > 0",
        "rank 3 of 8, DP0 TP3, size 256",
    ],
)
def test_kept(redactor: Redactor, text: str):
    """Numbers, names of settings, versions, public documents and code stay."""
    assert redactor.say(text) == text


def test_stable(redactor: Redactor):
    """The same thing has the same token everywhere, and another thing another one."""
    assert redactor.say("/a/b then /a/c then /a/b") == "path-1 then path-2 then path-1"
    assert redactor.say("again /a/c") == "again path-2"
    assert redactor.counts == {"path": 2}


def test_learned_late(redactor: Redactor):
    """What is learned after a text was said is replaced when it is said again."""
    assert redactor.say("box-9 is slow") == "box-9 is slow"
    redactor.learn("host", "box-9")

    assert redactor.say("box-9 is slow") == "host-1 is slow"


def test_users_of_paths():
    """A user is learned from a home directory, and replaced where the name stands alone."""
    redactor = Redactor()
    redactor.learn_users(["/home/mustermann/x", r"C:\Users\musterfrau\y", "/home/root/z"])

    assert redactor.say("mustermann and musterfrau, as root") == "user-1 and user-2, as root"


def test_settings_with_blanks():
    """A setting that is a path is replaced as a whole, blanks and all."""
    redactor = Redactor()
    redactor.learn_paths({"model": "/data/Big Customer/model v2", "shape": "8b"})

    assert redactor.say("loading /data/Big Customer/model v2 now") == "loading path-1 now"


@pytest.mark.parametrize("name", ["root", "host", "vm", "localhost", ""])
def test_plain_words(name: str):
    """A name that is a plain word would take our own sentences apart; only its own field is replaced."""
    redactor = Redactor()
    redactor.learn("host", name)

    assert redactor.say("root of host vm at localhost") == "root of host vm at localhost"


def test_whole_names_only():
    """A learned name is not found inside other words."""
    redactor = Redactor()
    redactor.learn("host", "vllm-box")

    assert redactor.say("my-vllm-boxes and vllm-box.") == "my-vllm-boxes and host-1."


def test_full():
    """With everything kept the text is only made safe and cut."""
    redactor = Redactor(keeps_all=True)

    assert redactor.say("/srv/x \x1b[31m pid 7") == "/srv/x \\x1b[31m pid 7"
    assert redactor.token("host", "node17") == "node17"
    assert redactor.counts == {}


def test_safe_text(redactor: Redactor):
    """Terminal escapes, overrides of direction and line breaks are shown, never obeyed."""
    assert redactor.say("a\x1b[2Jb\u202ec\nd\u2028e\ud800") == "a\\x1b[2Jb\\u202ec d\\u2028e\\ud800"


def test_cut_between_words(redactor: Redactor):
    """A long text is cut between two words, so that no half of a name is left to be read."""
    text = f"{'word ' * 819}node17.example.com {'x' * 9_000}"
    shown = redactor.say(text, LONGEST)

    assert "node17" not in shown
    assert shown.endswith("more characters)")


@pytest.mark.parametrize(
    "unit",
    [
        "/",
        "/a",
        "a/",
        "a.",
        "a-",
        "a@",
        "pid ",
        "1.",
        "f:",
        "\\a",
        "://",
        "a://a",
        "=",
        "'",
        '"/',
        "hf_",
        "ip-1-",
        "\n /a b",
    ],
)
def test_linear(unit: str):
    """No text takes long, whatever it is made of, nor one of ten million characters."""
    redactor = Redactor()
    redactor.learn("host", "node17.example.com")
    began = time.perf_counter()
    for size in (LONGEST, 10_000_000):
        redactor.say(unit * (size // len(unit)))

    assert time.perf_counter() - began < 1
