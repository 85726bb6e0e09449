"""Exceptions out of printed tracebacks: whose, what, where, from what."""

from __future__ import annotations

import pytest

from startup_fsm.importers.facts import NOBODY, Frame, Raised, Said, Speaker
from startup_fsm.importers.tracebacks import CHAIN, Tracebacks, with_calls

RANK_0 = Speaker("Worker_TP0", "TP0", 0, 11)
RANK_1 = Speaker("Worker_TP1", "TP1", 1, 12)

BEGIN = "Traceback (most recent call last):"


FILE = "/x/vllm/v1/worker/gpu_worker.py"


def frame(function, file=FILE):
    """The two lines that Python prints for a frame."""
    return [f'  File "{file}", line 7, in {function}', f"    {function}(...)"]


def found(messages):
    """All exceptions of messages, each a text, or a speaker and a text."""
    tracebacks = Tracebacks()
    raised = []
    for number, message in enumerate(messages, 1):
        speaker, text = message if isinstance(message, tuple) else (NOBODY, message)
        form = "plain" if speaker == NOBODY else "vllm"
        level = None if speaker == NOBODY else "ERROR"
        got = tracebacks.take(Said(number, text, speaker, form, level))
        if got is not None:
            raised.append(got)
    return raised


def test_frames_and_message():
    """A traceback gives its frames from the outermost, the name of its exception, and its text."""
    ((speaker, raised),) = found([BEGIN, *frame("outer"), *frame("inner"), "ValueError: no room: at all"])
    assert speaker == NOBODY
    assert raised.line == 6
    assert (raised.type, raised.message) == ("ValueError", "no room: at all")
    assert [each.function for each in raised.frames] == ["outer", "inner"]
    assert raised.cause is None


def test_interleaved_ranks():
    """Lines of two ranks that are mixed are two exceptions, each with its own frames."""
    first = [(RANK_0, line) for line in (BEGIN, *frame("load_model"), "KeyError: 'a'")]
    second = [(RANK_1, line) for line in (BEGIN, *frame("capture_model"), "RuntimeError: b")]
    mixed = [line for pair in zip(first, second, strict=True) for line in pair]
    got = {speaker.label: raised for speaker, raised in found(mixed)}
    assert [(each.file, each.function) for each in got["TP0"].frames] == [(FILE, "load_model")]
    assert [(each.file, each.function) for each in got["TP1"].frames] == [(FILE, "capture_model")]
    assert (got["TP0"].type, got["TP1"].message) == ("KeyError", "b")


def test_chain_has_both_stacks():
    """What was raised from a cause has its own frames and then those of the cause, which it keeps."""
    lines = [
        *(BEGIN, *frame("allocate"), "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        *("", "The above exception was the direct cause of the following exception:", ""),
        *(BEGIN, *frame("compile_or_warm_up_model"), "RuntimeError: warming up sampler"),
    ]
    (_, cause), (_, raised) = found(lines)
    assert raised.cause == cause
    assert [each.function for each in raised.frames] == ["compile_or_warm_up_model", "allocate"]


def test_two_tracebacks_are_no_chain():
    """Without the sentence between them two exceptions have nothing to do with each other."""
    _, (_, raised) = found([BEGIN, *frame("a"), "ValueError: 1", BEGIN, *frame("b"), "ValueError: 2"])
    assert raised.cause is None
    assert [each.function for each in raised.frames] == ["b"]


def test_nameless_lines_belong_to_who_announced_them():
    """A traceback without a prefix is that of the process whose error line said that one follows."""
    lines = [(RANK_1, "Scheduler hit an exception: " + BEGIN), *frame("init_memory_pool"), "RuntimeError: no memory"]
    ((speaker, raised),) = found(lines)
    assert speaker == RANK_1
    assert raised.frames[0].function == "init_memory_pool"


def test_another_rank_between_nameless_lines():
    """Lines of another rank between those of a traceback do not take it over."""
    lines = [(RANK_1, BEGIN), *frame("a"), (RANK_0, "Memory pool end. avail mem=3.36 GB"), "RuntimeError: mine"]
    ((speaker, _),) = found(lines)
    assert speaker == RANK_1


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.", "torch.OutOfMemoryError"),
        ("ValueError: No available memory for the cache blocks.", "ValueError"),
        ("torch.distributed.DistBackendError: NCCL error", "torch.distributed.DistBackendError"),
        ("INFO: Uvicorn running", None),
        ("Loading safetensors checkpoint shards: 50% Completed", None),
        ("note: this error is fine", None),
        ("Error", None),
    ],
)
def test_exception_without_traceback(text, name):
    """A line that begins with the name of an exception is one; other words before a colon are not."""
    assert [raised.type for _, raised in found([text])] == ([name] if name else [])


def test_survived_levels():
    """What an engine prints as a warning is no failure."""
    tracebacks = Tracebacks()
    text = "ImportError: no module named flash"
    assert tracebacks.take(Said(1, text, RANK_0, "vllm", "WARNING")) is None
    speaker, raised = tracebacks.take(Said(2, text, RANK_0, "vllm", "ERROR"))
    assert speaker == RANK_0
    assert raised == Raised(2, "ImportError", "no module named flash")


def test_bounded():
    """A traceback without end, and a message without end, are cut; the innermost frames stay."""
    lines = [BEGIN, *(line for at in range(5_000) for line in frame(f"f{at}")), "RecursionError: " + "x" * 100_000]
    ((_, raised),) = found(lines)
    assert len(raised.frames) <= 400
    assert raised.frames[-1].function == "f4999"
    assert len(raised.message) == 4_096


def test_calls_of_frames_that_are_left_out():
    """A source line names the function it calls: that stands for a frame which people cut out of what they paste."""
    lines = [BEGIN, f'  File "{FILE}", line 9, in compile_or_warm_up_model', "    used = self.runner.capture_model()"]
    ((_, raised),) = found([*lines, "RuntimeError: no"])
    assert [each.function for each in with_calls(raised.frames)] == ["compile_or_warm_up_model", "capture_model"]
    ((_, whole),) = found([*lines, frame("capture_model")[0], "    graph = 1", "RuntimeError: no"])
    functions = [each.function for each in with_calls(whole.frames)]
    assert functions == ["compile_or_warm_up_model", "capture_model"]
    assert with_calls(()) == ()


def test_windows_paths():
    """Files are written with forward slashes, whatever the machine."""
    ((_, raised),) = found([BEGIN, r'  File "C:\x\torch\cuda\graphs.py", line 84, in capture_end', "RuntimeError: no"])
    assert raised.frames == (Frame("C:/x/torch/cuda/graphs.py", "capture_end"),)


def test_a_long_chain():
    """Of a chain without end its first exception, its last ones and no more are kept."""
    lines = [BEGIN, *frame("first"), "RuntimeError: 0"]
    for at in range(1, 60):
        lines += ["The above exception was the direct cause of the following exception:", BEGIN, f"RuntimeError: {at}"]
    (_, last) = found(lines)[-1]
    messages = []
    while last is not None:
        messages.append(int(last.message))
        last = last.cause
    assert messages[0:2] == [59, 58]
    assert messages[-1] == 0
    assert len(messages) == CHAIN


def test_speakers_are_bounded():
    """Exceptions of processes without number take no more memory than those of a thousand."""
    tracebacks = Tracebacks()
    for pid in range(10_000):
        assert tracebacks.take(Said(pid + 1, "ValueError: no", Speaker("Worker", f"pid {pid}", None, pid))) is not None
    assert len(tracebacks._open) == 1_024
