"""Mirrored texts: short, wrapped, shuffled, repeated, torn; and the journals that come back."""

from __future__ import annotations

import io
import json
import random

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from startup_fsm.codec import CODEC
from startup_fsm.errors import UnknownSchema
from startup_fsm.events import NoteAdded, Record, StateEntered, UnknownEvent
from startup_fsm.fishing import Catch, fish
from startup_fsm.mirror import MARKER, TEXT_LIMIT, find_texts, holds_mirror, mirror_texts


def record(seq=0, *, note=None, process="rank-00000", run="r1", attempt=1, event=None, kind=None):
    event = event or NoteAdded(state="load_weights", note=note or {})
    return Record(
        run=run,
        process=process,
        attempt=attempt,
        seq=seq,
        t=min(seq, 9) * 10,
        kind=kind or type(event).kind,
        event=event,
    )


def start(count=6, **fields):
    first = record(0, event=StateEntered(state="init_device"), **fields)
    return [first, *(record(seq, note={"n": seq, "text": "x" * 40}, **fields) for seq in range(1, count))]


def lines(records):
    return [f'{{"event":"e","journal":"{text}"}}\n' for each in records for text in mirror_texts(each)]


def only(catch: Catch):
    assert catch.problems == ()
    (journal,) = catch.journals
    return journal


def written(each):
    """What a journal would give back: some values, such as lone surrogates, are written as text."""
    return CODEC.decode(CODEC.encode(each))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
    max_leaves=12,
)
records = st.builds(
    record,
    seq=st.integers(0, 2**62),
    note=st.dictionaries(st.text(max_size=30), json_values, max_size=5),
    process=st.text(max_size=300),
    run=st.text(max_size=300),
    attempt=st.integers(1, 2**31),
)
unknown = st.builds(
    record,
    event=st.builds(UnknownEvent, payload=st.dictionaries(st.text(max_size=9), json_values, max_size=3)),
    kind=st.text(min_size=1, max_size=300).filter(lambda kind: not kind.isascii()),
)


class TestTexts:
    @settings(max_examples=150, deadline=None)
    @given(records | unknown)
    def test_bound(self, each):
        """Every text is printable ASCII that JSON does not escape, and within its limit, whatever the event."""
        for text in mirror_texts(each):
            assert len(text) <= TEXT_LIMIT
            assert text.isascii()
            assert text.isprintable()
            assert json.dumps(text) == f'"{text}"'
            assert not set(text) & set("\"\\<>&'") - {"'"}

    @settings(max_examples=150, deadline=None)
    @given(records | unknown, st.booleans())
    def test_round_trip(self, each, given_line):
        """An event comes back as a journal would give it, also from the line that the journal got."""
        texts = mirror_texts(each, CODEC.encode(each) if given_line else None)
        (journal,) = fish("\n".join(texts)).journals
        assert journal.records == (written(each),)
        assert journal.size == len(CODEC.encode(each))

    def test_one_line(self):
        """An event of ordinary size is one text, readable by eye."""
        (text,) = mirror_texts(record(7, note={"checkpoint_bytes": 5, "path": "/models/a b"}))
        assert text.startswith("startup_fsm|0|r1|rank-00000|1|7|1|1|")
        assert "'note':{'checkpoint_bytes':5,'path':'/models/a b'}" in text

    def test_longest(self):
        """The longest line that a journal holds comes back, in parts."""
        each = record(0, note={"text": "é" * 400_000, "more": "'" * 100_000})
        texts = mirror_texts(each)
        assert max(map(len, texts)) <= TEXT_LIMIT
        assert only(fish("\n".join(texts))).records == (written(each),)

    def test_long_names(self):
        """Very long names of runs are cut in the text and still told apart."""
        one, other = record(0, run="r" * 5_000), record(0, run="r" * 5_000 + "x")
        catch = fish(lines([one, other]))
        assert [journal.records for journal in catch.journals] == [(one,), (other,)]

    def test_marker_in_a_note(self):
        """A note that holds a mirrored text is a note and nothing more."""
        each = record(0, note={"log": mirror_texts(record(3))[0]})
        assert only(fish(lines([each]))).records == (each,)


class TestFish:
    def test_mixed(self):
        """Prefixes, other text behind on the same line, and noise that is no text at all do no harm."""
        records = start()
        noise = random.Random(1)
        stream = b""
        for line in lines(records):
            stream += noise.randbytes(3_000).replace(b"startup", b"") + b"2026-10-30T12:00:00Z stdout F [rank0]: "
            stream += line.encode().rstrip() + b" and more | here | " + noise.randbytes(50) + b"\n"
        assert only(fish(io.BytesIO(stream))).records == tuple(records)

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_wrapped(self, depth):
        """Lines inside the JSON of a container runtime, and that again inside another, are found."""
        records = [*start(), record(6, note={"big": "a'\"\\<b>" * 2_000})]
        stream = ""
        for line in lines(records):
            text = line
            for _ in range(depth):
                text = json.dumps({"log": text, "stream": "stdout"}) + "\n"
            stream += text
        assert only(fish(stream.encode())).records == tuple(records)

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda line: line.replace("'", "\\u0027").replace('"', "\\u0022"),
            lambda line: json.dumps(line.replace("'", "\\u0027")),
            lambda line: repr(line.encode()),
            lambda line: repr({"line": line}),
            lambda line: line.replace("/", "\\/"),
        ],
    )
    def test_escapers(self, wrap):
        """Wrappers that escape single quotes and slashes, and Python's repr, are seen through."""
        records = start()
        assert only(fish([wrap(line) for line in lines(records)])).records == tuple(records)

    @settings(max_examples=60, deadline=None)
    @given(st.randoms(use_true_random=False), st.integers(0, 4))
    def test_any_order(self, rng, copies):
        """Parts of three processes shuffled and repeated: every journal is whole and in order."""
        starts = [start(process=f"rank-{rank:05}") for rank in range(3)]
        for each in starts:
            each.append(record(6, note={"big": "é" * rng.randrange(9_000)}, process=each[0].process))
        mirrored = [line for each in starts for line in lines(each)]
        mirrored += [rng.choice(mirrored) for _ in range(copies * 10)]
        rng.shuffle(mirrored)
        catch = fish(mirrored)
        assert [journal.records for journal in catch.journals] == [tuple(each) for each in starts]
        assert all(not journal.problems for journal in catch.journals)
        assert catch.texts == len(mirrored)

    def test_part_lost(self):
        """An event of which one part is missing is a problem that names the part, and a gap."""
        records = [*start(3), record(3, note={"big": "x" * 9_000}), record(4)]
        mirrored = lines(records)
        lost = [line for line in mirrored if "|3|2|3|" not in line]
        assert len(lost) == len(mirrored) - 1
        journal = only(fish(lost))
        assert [each.seq for each in journal.records] == [0, 1, 2, 4]
        assert [problem.kind for problem in journal.problems] == ["broken", "gap"]
        assert "seq 3 came in 3 parts, of which 1 are missing: 2" in journal.problems[0].message
        assert journal.problems[1].seq == 4

    def test_end_torn(self):
        """A last event that is torn is torn, as at the end of a file; whatever byte it is cut at."""
        records = start(4)
        whole = "".join(lines(records)).encode()
        last = len(whole) - len(lines(records)[-1])
        end = whole.rindex(b"|") + 1
        for cut in range(last, end):
            catch = fish(whole[:cut])
            (journal,) = catch.journals
            assert [each.seq for each in journal.records] == [0, 1, 2]
            assert {problem.kind for problem in journal.problems} <= {"torn"}
        assert only(fish(whole[:end])).records == tuple(records)

    def test_torn_in_the_middle(self):
        """A text that another line tore is a problem with its place; a whole copy of it heals it."""
        records = start(4)
        mirrored = lines(records)
        broken = mirrored[2][:150] + "NOISE" + mirrored[2][150:]
        journal = only(fish([mirrored[0], mirrored[1], broken, mirrored[3]]))
        assert [(problem.kind, problem.line) for problem in journal.problems] == [("broken", 3), ("gap", 4)]
        offset = journal.problems[0].offset
        assert len("".join(mirrored[:2])) <= offset < len("".join(mirrored[:3]))
        assert only(fish([*mirrored[:2], broken, *mirrored[2:]])).problems == ()

    def test_part_torn(self):
        """A torn part does not spoil the event when a whole copy of it comes later."""
        each = record(0, note={"big": "x" * 9_000})
        first, second, third = lines([each])
        torn = second.replace("xxx", "xNx", 1)
        assert only(fish([first, torn, second, third])).records == (each,)
        assert fish([first, torn, third]).journals == ()

    def test_interrupted_by_another(self):
        """A text cut short by another one on the same line loses itself only."""
        records = start(3)
        mirrored = lines(records)
        journal = only(fish([mirrored[0], mirrored[1][:90] + mirrored[2]]))
        assert [each.seq for each in journal.records] == [0, 2]

    def test_beginning_missing(self):
        """Rotated output that begins late is a gap."""
        journal = only(fish(lines(start(5)[2:])))
        assert [problem.kind for problem in journal.problems] == ["gap"]

    def test_started_again(self):
        """Two starts under one name, as in a container that restarts, are two journals."""
        first = start(5)
        second = [record(seq, note={"second": seq}) for seq in range(8)]
        catch = fish([*lines(first), *lines(second)])
        assert [journal.records for journal in catch.journals] == [tuple(first), tuple(second)]
        assert [journal.path for journal in catch.journals] == ["-#r1/rank-00000.1.jsonl", "-#r1/rank-00000.1.jsonl#2"]

    def test_newer_schema(self):
        """A whole event of a newer version is refused by name, as in a file."""
        body = orjson.loads(CODEC.encode(record()))
        body["v"] = 99
        with pytest.raises(UnknownSchema, match="schema 99"):
            fish(mirror_texts(record(), orjson.dumps(body)))

    def test_newer_format(self):
        """Texts of another format are said to be that."""
        (problem,) = fish(b"x startup_fsm|7|whatever|it|is|\n").problems
        assert "format 7" in problem.message

    def test_head_lies(self):
        """A text whose event belongs to somebody else is refused."""
        line = CODEC.encode(record(3, process="rank-00001"))
        catch = fish(mirror_texts(record(3), line))
        assert catch.journals == ()
        assert [problem.kind for problem in catch.problems] == ["broken"]

    def test_sources(self, tmp_path):
        """A binary file, a text file, bytes, text and lines with or without newlines give the same."""
        records = start()
        text = "".join(lines(records))
        path = tmp_path / "log"
        path.write_text(text)
        sources = [text.encode(), text, text.splitlines(), text.splitlines(keepends=True), io.BytesIO(text.encode())]
        sources += [io.StringIO(text), (line.encode() for line in text.splitlines())]
        for source in sources:
            assert only(fish(source)).records == tuple(records)
        with path.open("rb") as file:
            assert fish(file).size == len(text)

    def test_marker(self):
        """A stream without mirrored texts is told by plain bytes."""
        assert holds_mirror("".join(lines(start())).encode())
        assert not holds_mirror(b"INFO 10-30 startup_fsm: loading\n" * 100)
        assert fish(b"INFO 10-30 startup_fsm: loading\n" * 100) == Catch(journals=(), problems=(), texts=0, size=3_200)


class Blocks:
    """A stream that gives few bytes at a time and counts what is asked of it."""

    def __init__(self, content, size):
        self.content, self.size, self.at = content, size, 0

    def read(self, _):
        block = self.content[self.at : self.at + self.size]
        self.at += self.size
        return block


class TestGarbage:
    @settings(max_examples=200, deadline=None)
    @given(
        st.lists(st.binary(max_size=60) | st.sampled_from([MARKER, b"|", b"0|r|p|1|0|1|1|", b"\n", b"\\u0027", b"\\"]))
    )
    def test_never_raises(self, pieces):
        """Whatever the bytes, there is an answer."""
        fish(b"".join(pieces))

    @settings(max_examples=200, deadline=None)
    @given(st.data())
    def test_damaged(self, data):
        """Any byte changed, dropped or put in: no event comes back wrong, and what is lost is said."""
        records = start(4)
        stream = bytearray("".join(lines(records)).encode())
        at = data.draw(st.integers(0, len(stream) - 1))
        stream[at : at + data.draw(st.integers(0, 300))] = data.draw(st.binary(max_size=3))
        catch = fish(bytes(stream))
        for journal in catch.journals:
            assert all(each in records for each in journal.records)
            seqs = [each.seq for each in journal.records]
            # An end that is missing altogether leaves no trace in a stream, as in a file.
            assert journal.problems or seqs == list(range(len(seqs)))

    @pytest.mark.parametrize("size", [1, 7, 100, 4_096])
    def test_any_blocks(self, size):
        """Where the blocks of a stream end makes no difference, not even to lines and offsets."""
        records = [*start(), record(6, note={"big": "x" * 9_000})]
        content = ("noise\n" + "".join(lines(records[:2])) + "startup_fs\n" + "".join(lines(records[3:]))).encode()
        assert fish(Blocks(content, size)) == fish(content)

    def test_one_long_line(self):
        """A line of many megabytes, of whatever, is read in bounded memory and linear time."""
        piece = b"x" * 1_000 + b"startup_fsm|0|" + b"\\" * 1_000 + b"|" * 3 + b"u0027" * 100
        content = piece * 4_000
        texts = sum(1 for each in find_texts(Blocks(content, 1 << 16)) if not isinstance(each, int))
        assert texts == 4_000
        catch = fish(content)
        assert len(catch.problems) == 1_001
        assert "and 3000 more" in catch.problems[-1].message

    def test_parts_that_never_end(self):
        """Parts that wait for others are given up beyond a bound."""
        big = "x" * 900_000

        def stream():
            for seq in range(90):
                yield from mirror_texts(record(seq, note={"big": big}))[:-1]

        catch = fish(stream())
        assert catch.journals == ()
        assert len(catch.problems) == 90
