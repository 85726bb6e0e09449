"""Bytes of a dirty log to clean lines: encodings, line ends, colours, wrappers, limits; whatever the blocks are."""

from __future__ import annotations

import json
import time
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from startup_fsm.importers.physical import LIMIT, Line, Physical

INFO = "(EngineCore_DP0 pid=270) INFO 01-15 10:00:05 [gpu_worker.py:508] Available KV cache memory: 37.99 GiB"
FRAME = '  File "/opt/vllm/worker.py", line 300, in initialize_cache'


def lines(data, step=None):
    """The lines of some bytes, fed in blocks of ``step``."""
    physical = Physical()
    blocks = [data] if step is None else [data[at : at + step] for at in range(0, len(data), step)]
    return [line for block in blocks for line in physical.feed(block)] + list(physical.close())


def texts(data, step=None):
    """Their texts; a string is encoded first."""
    return [line.text for line in lines(data.encode() if isinstance(data, str) else data, step)]


class TestSplitting:
    def test_numbers_and_offsets(self):
        """Lines are numbered from 1, and know the byte that they begin at; what has no end is a line too."""
        assert lines("één\nzwei\n\nthree".encode()) == [
            Line(1, "één", 0),
            Line(2, "zwei", 6),
            Line(3, "", 11),
            Line(4, "three", 12),
        ]

    def test_first_number(self):
        """A reading that begins further down counts from there."""
        assert [line.number for line in Physical(41).feed(b"a\nb\n" + b"c" * 300)] == [41, 42]

    def test_nothing(self):
        """No bytes are no line, a line feed is one."""
        assert lines(b"") == []
        assert lines(b"\n") == [Line(1, "", 0)]

    @pytest.mark.parametrize("end", ["\r\n", "\r\r\n", "\n"])
    def test_line_ends(self, end):
        """Windows line ends leave no trace, not even vLLM's doubled ones."""
        assert texts(end.join([INFO, FRAME, "", "Killed", ""])) == [INFO, FRAME, "", "Killed"]

    def test_progress_bar(self):
        """A carriage return ends a part, parts share their line's number, and empty parts are none."""
        bar = "\r\rFetching:  50%|#  |\rFetching: 100%|###|\r\r\nnext\n"
        assert lines(bar.encode()) == [
            Line(1, "Fetching:  50%|#  |", 0),
            Line(1, "Fetching: 100%|###|", 0),
            Line(2, "next", len(bar) - 5),
        ]

    def test_bar_without_end(self):
        """A bar of a thousand states is longer than any line may be, and every one of them is given."""
        states = [f"Capturing batches (bs={n} avail_mem=3.10 GB): {'#' * 100}" for n in range(1_000)]
        physical = Physical()
        got = [*physical.feed("\r".join(states).encode() + b"\nnext\n"), *physical.close()]
        assert [line.text for line in got] == [*states, "next"]
        assert {line.number for line in got[:-1]} == {1}
        assert got[-1].offset == len("\r".join(states)) + 1
        assert physical.cut == 0

    def test_writer_of_a_bar(self):
        """The process is named once a line up to vLLM 0.30; each state of the bar behind it is that process's."""
        bar = "(Worker_TP0 pid=7) \rCapturing:   0%|\rCapturing:  50%|\rINFO 01-15 10:00:00 [a.py:1] done\n  plain\n"
        assert texts(bar) == [
            "(Worker_TP0 pid=7) Capturing:   0%|",
            "(Worker_TP0 pid=7) Capturing:  50%|",
            "INFO 01-15 10:00:00 [a.py:1] done",
            "  plain",
        ]

    def test_writer_alone(self):
        """A process prefix with nothing behind it is a line as any other."""
        assert texts("(Worker_TP0 pid=7) \r\n(Worker_TP0 pid=7)\n") == ["(Worker_TP0 pid=7)"] * 2


class TestLimits:
    def test_cut(self):
        """A line that is too long is cut and counted, and the next one is whole."""
        physical = Physical()
        got = [line for block in (b"x" * 50_000,) * 5 for line in physical.feed(block)]
        got += [*physical.feed(b"\nnext\n"), *physical.close()]
        assert [(line.number, len(line.text), line.offset) for line in got] == [(1, LIMIT, 0), (2, 4, 250_001)]
        assert physical.cut == 1

    def test_longest(self):
        """A line that just fits is not cut."""
        physical = Physical()
        assert [len(line.text) for line in physical.feed(b"x" * LIMIT + b"\n")] == [LIMIT]
        assert physical.cut == 0

    def test_cut_part(self):
        """Of a line in parts only the part that is too long is cut."""
        physical = Physical()
        got = list(physical.feed(b"a\r" + b"x" * (LIMIT + 5) + b"\rb\nc\n"))
        assert [(line.number, line.text[:1], len(line.text)) for line in got] == [
            (1, "a", 1),
            (1, "x", LIMIT),
            (1, "b", 1),
            (2, "c", 1),
        ]
        assert physical.cut == 1

    def test_memory(self):
        """A line without end is not kept."""
        physical = Physical()
        for _ in range(100):
            assert sum(len(line.text) for line in physical.feed(b"y" * 100_000)) <= LIMIT
        assert len(physical._tail) <= LIMIT

    @pytest.mark.parametrize(
        "piece",
        ["\x1b]", "\x1b[", "[0m", "(A pid=1) ", "│ ", "{", "a-b c ", "[2026-01-15 10:00:00", "INFO 01-15 ", "vllm | "],
    )
    def test_hostile(self, piece):
        """No line takes longer than its length warrants."""
        line = piece * (60_000 // len(piece))
        began = time.perf_counter()
        texts(f"{line}\n{line[:-1]}\n")
        assert time.perf_counter() - began < 2.0


class TestDecoding:
    CLEAN = f"{INFO}\n{FRAME}\nCapturing:  4%|▍  | Größe 😀\r\n"
    WANT = (INFO, FRAME, "Capturing:  4%|▍  | Größe 😀")

    @pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
    @pytest.mark.parametrize("step", [1, 3, 1_000])
    def test_encodings(self, encoding, step):
        """UTF-8 and UTF-16, with and without their mark."""
        assert texts(self.CLEAN.encode(encoding), step) == list(self.WANT)

    def test_big_endian_mark(self):
        """UTF-16 in network order by its mark."""
        assert texts(b"\xfe\xff" + self.CLEAN.encode("utf-16-be")) == list(self.WANT)

    @pytest.mark.parametrize(("mark", "encoding"), [(b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")])
    def test_offsets(self, mark, encoding):
        """Offsets count the bytes of the file, not those of the text."""
        text = "Größe 😀 and more\r\nnext\n" + "\r".join(["▍" * 1_000] * 70) + "\nlast"
        data = mark + text.encode(encoding)
        for line in lines(data, 777):
            begin = data[line.offset :].decode(encoding).splitlines()[0]
            assert begin.startswith(line.text[:4])

    def test_broken_bytes(self):
        """What is no UTF-8 is replaced, and NUL is dropped."""
        assert texts(b"\x00garbled \x80\xff\xfe bytes\n\xe2\x96") == ["garbled \ufffd\ufffd\ufffd bytes", "\ufffd"]

    def test_appended_utf16(self):
        """A shell that appends UTF-16 to a log in UTF-8: its Latin text survives."""
        assert texts(INFO.encode() + b"\n" + "Killed\r\nnext\r\n".encode("utf-16-le")) == [INFO, "Killed", "next", ""]

    def test_mark_inside(self):
        """Files with marks that were put behind each other."""
        assert texts(b"\xef\xbb\xbfINFO\n\xef\xbb\xbfINFO\n") == ["INFO", "INFO"]


class TestCleaning:
    @pytest.mark.parametrize(
        "soiled",
        [
            "\x1b[1;36m(Worker pid=1)\x1b[0;0m hello",
            "\x1b[36m(Worker pid=1) hello\x1b[0m",
            "\x1b[38;2;1;2;3m(Worker pid=1)\x1b[39m\x1b[K hello\x1b[",
            "(Worker pid=1) \x1b]0;title\x07hello",
            "(Worker pid=1) \x1b]8;;http://x/\x1b\\hello\x1b]8;;\x1b\\",
            "\x1b(B\x1b[m(Worker\x00 pid=1)\x07 hel\x08lo\x7f",
            "\x9b1m(Worker pid=1)\x9b0m hello\x85",
            "[1;36m(Worker pid=1)[0;0m hello",
            "^[[36m(Worker pid=1)^[[0m hello",
            "#033[36m(Worker pid=1)#033[0m hello",
            "\\x1b[36m(Worker pid=1)\\x1b[0m hello",
            "␛[36m(Worker pid=1)␛[0m hello",
            "(Worker\xa0pid=1)\xa0hello",
            "\ufeff(Worker pid=1) \u200bhello",
        ],
    )
    def test_colours_and_controls(self, soiled):
        """Escape sequences go, spelt out or broken too; so do control characters."""
        assert texts(soiled + "\n") == ["(Worker pid=1) hello"]

    def test_kept(self):
        """Tabs, brackets of other things and indentation stay."""
        kept = ["\tINFO x", "[0, 1, 2] [00:00<?, 3m]", "      ^^^^^^", "  | exception group"]
        assert texts("\n".join(kept)) == kept

    def test_open_string(self):
        """A terminal title without its end does not swallow the line."""
        assert texts("\x1b]0;a line\n") == ["0;a line"]


#: A wrapper by name; ``{}`` is the line.
WRAPPERS = {
    "compose": "vllm-1  | {}",
    "compose, coloured": "\x1b[36mvllm-1  | \x1b[0m{}",
    "compose, colours without escape": "[36mvllm-1  | [0m{}",
    "container": "name  | {}",
    "foreman": "10:00:00 web.1   | {}",
    "runtime interface": "2026-01-15T10:00:00.123456789Z stdout F {}",
    "runtime interface, zone": "2026-01-15T10:00:00.123456789+01:00 stderr F {}",
    "docker": "2026-01-15T10:00:00.123456789Z {}",
    "actions": "2026-01-15T10:00:00.1234567Z {}",
    "gitlab": "2026-01-15T10:00:00.123456Z 00O {}",
    "view of a job": "build\tRun it\t2026-01-15T10:00:00.1234567Z {}",
    "jenkins": "[2026-01-15T10:00:00.123Z] {}",
    "shipper": "2026-01-15 10:00:00.123  {}",
    "shipper, one space": "2026-01-15 10:00:00 {}",
    "shipper, slashes": "2026/01/15 10:00:00 {}",
    "time alone": "10:00:00.123 {}",
    "time in brackets": "[10:00:00] {}",
    "shell": "Jan 15 10:00:02 {}",
    "syslog": "Jan 15 10:00:02 node7 python3[4242]: {}",
    "syslog, padded day": "Jan  5 10:00:02.123456 node7 vllm: {}",
    "journal, ISO": "2026-01-15T10:00:02+0000 node7 python3[4242]: {}",
    "systemd": "python3[4242]: {}",
    "RFC 5424": "<134>1 2026-01-15T10:00:00.123Z node7 vllm 4242 - - {}",
    "RFC 5424, data": '<134>1 2026-01-15T10:00:00.123Z node7 vllm 4242 ID47 [ex@1 a="b"][x@2 c="d"] {}',
    "RFC 3164": "<134>Jan 15 10:00:02 node7 vllm[42]: {}",
    "kubectl": "[pod/vllm-0/vllm] {}",
    "stage": "[Stage-1] {}",
    "kernel": "[12345.678901] {}",
    "kernel, date": "[Thu Jan 15 10:00:02 2026] {}",
    "mpirun": "[1,3]<stderr>:{}",
    "mpirun, spaced": "[1,3]<stderr>: {}",
    "box": "│ {}      │",
    "heavy box": "┃ {} ┃",
    "torchserve": "2026-01-15T22:54:54,595 [INFO ] W-9000-model_1.0-stdout MODEL_LOG - {}",
    "coloured": "\x1b[32m{}\x1b[0m",
}
#: Wrappers that hold a JSON string.
OBJECTS = {
    "docker": lambda text: {"log": text + "\n", "stream": "stdout", "time": "2026-01-15T10:00:00.000000000Z"},
    "shipper": lambda text: {"@timestamp": "2026-01-15T10:00:00Z", "log": {"level": "info"}, "message": text},
    "short": lambda text: {"level": "info", "msg": text},
    "cloud, text": lambda text: {"textPayload": text, "severity": "INFO"},
    "cloud, object": lambda text: {"jsonPayload": {"message": text}, "severity": "INFO"},
    "line": lambda text: {"line": text},
    "body": lambda text: {"body": text},
    "body, object": lambda text: {"body": {"stringValue": text}},
    "journal": lambda text: {"MESSAGE": text, "PRIORITY": "6"},
    "journal, bytes": lambda text: {"MESSAGE": list(f"\x1b[36m{text}\x1b[0m".encode())},
    "search": lambda text: {"_source": {"message": text}},
}
#: Shapes that are believed once an engine's line stood behind them.
LOOSE = {
    "stern": "vllm-7d9f-abc vllm {}",
    "stern, namespace": "ml vllm-7d9f-abc vllm {}",
    "kubetail": "[vllm-7d9f-abc vllm] {}",
    "kail": "ml/vllm-0[vllm]: {}",
    "srun": "3: {}",
    "aws": "ecs/vllm/0123abc {}",
}
LINES = [
    INFO,
    FRAME,
    "    raise ValueError(",
    "Killed",
    "[2026-01-15 10:00:00 TP0] Load weight end.",
    "",
    "INFO:     Up",
]


class TestWrappers:
    @pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
    def test_around_text(self, wrapper):
        """A wrapper goes and the line stays, with its indentation."""
        assert texts("\n".join(wrapper.replace("{}", line) for line in LINES)) == LINES

    @pytest.mark.parametrize("wrapper", OBJECTS.values(), ids=OBJECTS)
    @pytest.mark.parametrize("ensure_ascii", [True, False])
    def test_objects(self, wrapper, ensure_ascii):
        """A JSON object goes and the line stays."""
        dumped = (json.dumps(wrapper(line), ensure_ascii=ensure_ascii) for line in LINES)
        assert texts("\n".join(dumped)) == LINES

    @pytest.mark.parametrize("wrapper", LOOSE.values(), ids=LOOSE)
    def test_proven(self, wrapper):
        """What could be words of an engine is a wrapper once an engine's line stands behind the same words."""
        assert texts("\n".join(wrapper.replace("{}", line) for line in LINES)) == LINES

    @pytest.mark.parametrize("wrapper", LOOSE.values(), ids=LOOSE)
    def test_unproven(self, wrapper):
        """Without an engine's line they stay."""
        assert texts(wrapper.replace("{}", "some words")) == [wrapper.replace("{}", "some words")]

    def test_four_deep(self):
        """Wrappers stand around each other."""
        line = f"2026-01-15T10:00:00.1Z stderr F vllm-1  | Jan 15 10:00:02 node7 python3[4242]: [pod/a/b] {FRAME}"
        assert texts(json.dumps({"log": line + "\n"})) == [FRAME]

    def test_objects_in_objects(self):
        """A shipper's object in another's string, and an array of them written line by line."""
        inner = json.dumps({"message": FRAME})
        assert texts(json.dumps({"log": inner}) + ",") == [FRAME]

    def test_several_lines(self):
        """One string may hold several lines, with bars among them; they share the number."""
        text = json.dumps({"log": f"{INFO}\n{FRAME}\n\nbar 1%\rbar 2%\n"})
        assert [(line.number, line.text) for line in lines(f"x\n{text}\ny\n".encode())] == [
            (1, "x"),
            (2, INFO),
            (2, FRAME),
            (2, ""),
            (2, "bar 1%"),
            (2, "bar 2%"),
            (3, "y"),
        ]

    @pytest.mark.parametrize(
        "line",
        [
            "[2026-01-15 10:00:00 TP0] Load weight end.",
            "[2026-01-15 10:00:00] INFO server.py:12: up",
            "2026-03-08 16:44:29,692 - INFO - autotuner.py:262 - flashinfer.jit: [Autotuner]: done",
            "2026-01-15 10:00:00,123\tINFO worker.py:1841 -- Started a local Ray instance.",
            "2026-01-15T10:00:00.123456Z  INFO text_generation_launcher: Args",
            "2026-01-15 10:00:00.123 | INFO     | module:function:12 - hello",
            '[rank0]:   File "x.py", line 1, in f',
            "[rank0]:[W1130 15:49:15.854816101 ProcessGroupNCCL.cpp:1575] Warning: destroy",
            "Capturing batches (bs=512 avail_mem=3.10 GB):   0%|          | 0/52 [00:04<?, ?it/s]",
            "|   0  NVIDIA H200                    On  |   00000000:18:00.0 Off |                    0 |",
            "node7:4242:4300 [0] NCCL INFO comm 0x1",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.74 GiB.",
            '{"a": 1}',
            '{"message": 3, "log": null}',
            "{not json}",
            "<class 'int'> | x",
            "ERROR    | x",
            "May be slow",
            "vllm-1 exited with code 137",
        ],
    )  # fmt: skip
    def test_left_alone(self, line):
        """What engines and foreign loggers print themselves is no wrapper."""
        assert texts(line) == [line]


class TestHalves:
    def test_runtime_interface(self):
        """Halves are joined by stream, across what the other stream says meanwhile; the number is the last half's."""
        stamp = "2026-01-15T10:00:00.123456789Z"
        log = f"{stamp} stdout P (Worker pid=1) \n{stamp} stderr F oops\n{stamp} stdout P hel\n{stamp} stdout F lo\n"
        assert [(line.number, line.text) for line in lines(log.encode())] == [(2, "oops"), (4, "(Worker pid=1) hello")]

    def test_last_half(self):
        """A half whose other half never came is given at the end."""
        assert lines(b"2026-01-15T10:00:00.1Z stdout P half\nnext\n") == [Line(2, "next", 37), Line(2, "half", 42)]

    def test_docker(self):
        """Docker cuts after 16 KiB, without a line feed."""
        first, second = "x" * (16 << 10), "y\n"
        log = "\n".join(json.dumps({"log": part, "stream": "stdout"}) for part in (first, second))
        assert texts(log) == [first + "y"]

    def test_collector(self):
        """A collector's tag for a half."""
        parts = [{"log": "a", "stream": "stderr", "logtag": "P"}, {"log": "b", "stream": "stderr", "logtag": "F"}]
        assert texts("\n".join(map(json.dumps, parts))) == ["ab"]

    def test_too_long(self):
        """Joined lines have the limit of all others."""
        physical = Physical()
        for _ in range(10):
            assert list(physical.feed(b"2026-01-15T10:00:00.1Z stdout P " + b"x" * 16_000 + b"\n")) == []
        (line,) = physical.feed(b"2026-01-15T10:00:00.1Z stdout F end\n")
        assert len(line.text) == LIMIT
        assert physical.cut == 1


class TestJsonMode:
    def test_rebuilt(self):
        """A line of vLLM's JSON mode becomes that of its text mode, with its prefix before every line of a traceback."""
        fields = {
            "asctime": "01-15 10:00:00",
            "levelname": "ERROR",
            "name": "vllm.v1.engine.core",
            "processName": "EngineCore_DP0",
            "process": 270,
            "message": "EngineCore failed to start.",
            "exc_info": f"Traceback (most recent call last):\n{FRAME}",
        }
        prefix = "(EngineCore_DP0 pid=270) ERROR 01-15 10:00:00 [vllm.v1.engine.core] "
        assert texts(json.dumps(fields)) == [
            f"{prefix}EngineCore failed to start.",
            f"{prefix}Traceback (most recent call last):",
            f"{prefix}{FRAME}",
        ]

    def test_inside_a_shipper(self):
        """Also where a shipper has taken the object for its own."""
        fields = {"asctime": "2026-01-15 10:00:00,123", "levelname": "INFO", "name": "vllm.worker", "message": "hi"}
        assert texts(json.dumps({"jsonPayload": fields})) == ["INFO 01-15 10:00:00,123 [vllm.worker] hi"]

    def test_other_loggers(self):
        """A logger that is not vLLM's gives its message alone."""
        fields = {"timestamp": "2026-01-15T10:00:00Z", "level": "INFO", "logger": "http", "message": "hi"}
        assert texts(json.dumps(fields)) == ["hi"]


#: Pieces that real logs are made of, and those that break readers.
PIECES = st.sampled_from(
    [
        *(f"{wrapper.replace('{}', line)}\n".encode() for wrapper in WRAPPERS.values() for line in (INFO, FRAME)),
        *(f"{wrapper.replace('{}', INFO)}\n".encode() for wrapper in LOOSE.values()),
        *(json.dumps(wrapper(INFO)).encode() + b"\n" for wrapper in OBJECTS.values()),
        *(b"2026-01-15T10:00:00.1Z stdout P ", b"\r", b"\n", b"\r\n", b"\x00", b"\x1b[", b"\x1b]", b"[0m", b"\xe2\x96"),
        *(b"(Worker_TP0 pid=7) \r", b"{", b"}", b"\xff\xfe", b"\xc2\x9b", b"x" * 40_000, b"\r" + b"y" * 70_000),
    ]
)
SOUP = st.lists(st.one_of(PIECES, st.binary(max_size=40)), max_size=30).map(b"".join)


class TestAnything:
    @settings(max_examples=150, deadline=None)
    @given(data=st.one_of(st.binary(max_size=2_000), SOUP))
    def test_any_bytes(self, data):
        """Any bytes give lines: numbers and offsets never fall, and no text has control characters but tab."""
        got = lines(data)
        assert [line.number for line in got] == sorted(line.number for line in got)
        assert [line.offset for line in got] == sorted(line.offset for line in got)
        assert all(0 <= line.offset <= len(data) for line in got)
        for line in got:
            controls = {each for each in line.text if unicodedata.category(each) == "Cc"}
            assert controls <= {"\t"}
            assert len(line.text) <= LIMIT + 100

    @settings(max_examples=100, deadline=None)
    @given(data=SOUP, encoding=st.sampled_from([None, "utf-16"]), step=st.integers(1, 5_000))
    def test_any_blocks(self, data, encoding, step):
        """Where the blocks were cut makes no difference."""
        if encoding is not None:
            data = data.decode("utf-8", "replace").encode(encoding)
        assert lines(data, step if len(data) < 5_000 else max(step, 500)) == lines(data)
