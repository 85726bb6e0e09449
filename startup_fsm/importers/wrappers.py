"""
What runtimes, shippers and terminals put around a line, taken off again.

A wrapper is told by its own shape and nothing else; where a shape could as well be the engine's own words (``pod
container ...`` of stern), it is believed once an engine's line has stood behind the very same words. Indentation is the
engine's: of what separates a wrapper from its line exactly one separator goes.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

#: Longest text that is joined from the halves of a line, in characters.
LIMIT: Final = 64 << 10
#: How many wrappers may stand around each other; journalctl's ISO form counts as two.
_DEPTH: Final = 6
#: Lines that begin so are nobody's wrapper: engines' prefixes, and indentation.
OWN: Final = ("(", " ", "INFO ", "WARNING ", "ERROR ", "DEBUG ", "CRITICAL ")

_ESCAPES: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]{0,64}+[ -/]{0,8}+[@-~]?+"  # CSI, also one that the end of the line cut
    r"|\x1b[\]PX^_][^\x07\x1b\x9c\r\n]{0,4096}+(?:\x07|\x1b\\|\x9c)"  # OSC and other strings
    r"|\x1b[ -/]{0,4}+[0-~]?+"
)
#: Colours whose escape character was spelt out or lost on the way.
_PAINT: Final = re.compile(
    r"(?:\^\[|\u241b|#033|\\x1b|\\u001b|\\033|\\e)?\[\d{1,3}(?:;\d{1,3})?(?:;\d{1,3})?(?:;\d{1,3})?m", re.ASCII
)
_PAINTED: Final = ("[0m", "[0;0m", "[1;3")
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b\ufeff]+")
#: Bytes that a clean block has none of: control characters but tab and line feed.
_SOIL: Final = bytes(byte for byte in [*range(0x20), 0x7F] if byte not in b"\t\n")
#: Begin of what is soil in two or more bytes (C1, no-break space, a byte order mark), and colours without their escape.
_SOILED: Final = (b"\xc2", b"\xef\xbb\xbf", b"\xe2\x80\x8b", *(each.encode() for each in _PAINTED))

_LEVELS: Final = "DEBUG|INFO|WARNING|ERROR|CRITICAL"
_STAMP: Final = re.compile(
    r"(?:\d{4}[-/]\d\d[-/]\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z| ?[+-]\d\d:?\d\d(?= |$))?", re.ASCII
)
#: Behind a time stamp: the stream of the container runtime interface, GitLab's, or TorchServe's.
_STREAM: Final = re.compile(
    r" (?:(stdout|stderr) ([PF])(?::\S{0,64})?(?: |$)|\d\d[OE][ +]|\[[A-Z]{4,8} {0,3}\] \S{1,128} MODEL_LOG - )",
    re.ASCII,
)
#: Behind a time stamp that a logger printed itself, which is no wrapper; ``INFO 01-15 10:00:00`` is vLLM's behind one.
_LOGGER: Final = re.compile(
    rf"\s{{1,3}}(?:[-|] |\[?(?:{_LEVELS}|TRACE|WARN|FATAL)\b\]?(?!:| {{1,2}}(?:\d{{4}}-)?\d\d-\d\d ))", re.ASCII
)
_COMPOSE: Final = re.compile(
    rf"(?!{_LEVELS})(?:\d{{1,4}}\|)?"
    r"(?:[A-Za-z0-9][\w.-]{0,127}|\[[^\]]{1,80}\]) {1,80}\|(?: |$)",
    re.ASCII,
)
_MONTHS: Final = ("Jan ", "Feb ", "Mar ", "Apr ", "May ", "Jun ", "Jul ", "Aug ", "Sep ", "Oct ", "Nov ", "Dec ")
#: Host and program are missing where a shell put the date before each line.
_SYSLOG: Final = re.compile(
    r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,6})?(?: |$)"
    r"(?:[\w.:-]{0,254}\w [\w./@()-]{1,128}(?:\[\d{1,10}\])?:(?: |$))?",
    re.ASCII,
)
_SYSLOG_5424: Final = re.compile(
    r"<\d{1,3}>1 \S{1,64} \S{1,255} \S{1,48} \S{1,128} \S{1,32} (?:-|(?:\[[^\]]{0,512}\]){1,8})(?: |$)", re.ASCII
)
_PRIORITY: Final = re.compile(r"<\d{1,3}>(?=[A-Z\[])", re.ASCII)
_TAG: Final = re.compile(
    r"(?:[\w.-]{1,255} )?[A-Za-z][\w./@-]{0,127}\[\d{2,10}\]:(?: |$)"
    r"|[\w.-]{1,255} kernel: (?=Out of memory|Memory cgroup|oom|NVRM|\[)",
    re.ASCII,
)
#: ``gh run view --log``: job, step, and a time stamp behind them.
_JOB: Final = re.compile(r"[^\t]{1,200}\t[^\t]{1,200}\t(?=\d{4}-\d\d-\d\dT)", re.ASCII)
_BRACKETED: Final = re.compile(
    r"\[(?:pod/[^\]\s]{1,400}|[Ss]tage[- ]\d{1,4}|\d{4}-\d\d-\d\dT[\d:.,]{8,20}(?:Z|[+-]\d\d:?\d\d)?"
    r"|[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}|\d\d:\d\d:\d\d| {0,12}\d{1,9}\.\d{6})\](?: |$)"
    r"|\[\d{1,6},\d{1,6}\]<std(?:out|err)>:(?: (?=\S| {2}\S| {4}\S| {6}\S))?",
    re.ASCII,
)
#: Shapes that an engine's own words may have too: stern, kubetail and kail, ``srun --label``, ``aws logs tail``, a pod
#: with two spaces behind it.
_LOOSE: Final = (
    re.compile(r"[a-z0-9]{1,63}-[a-z0-9.-]{0,252} {2}", re.ASCII),
    re.compile(r"[a-z0-9]{1,63}-[a-z0-9.-]{0,252} [a-z0-9][a-z0-9-]{0,62} ", re.ASCII),
    re.compile(r"[a-z0-9][a-z0-9-]{0,62} [a-z0-9]{1,63}-[a-z0-9.-]{0,252} [a-z0-9][a-z0-9-]{0,62} ", re.ASCII),
    re.compile(r"\[[a-z0-9][a-z0-9. /-]{1,252}\] ", re.ASCII),
    re.compile(r"[a-z0-9-]{1,63}/[a-z0-9.-]{1,253}\[[a-z0-9-]{1,63}\]: ", re.ASCII),
    re.compile(r"\d{1,6}: ", re.ASCII),
    re.compile(r"[\w.-]{1,128}/[\w./-]{1,400} ", re.ASCII),
)
_PROOF: Final = re.compile(
    rf"\([^()\s]{{1,120}} [^()]{{0,60}}pid=\d|(?:{_LEVELS}) (?:\d{{4}}-)?\d\d-\d\d |\[\d{{4}}-\d\d-\d\d \d\d:"
    r'|\[rank\d{1,6}\]:|Traceback \(most recent|  File "|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d|\{"',
    re.ASCII,
)
_BOXES: Final = "│┃║"

#: Where a shipper keeps the line, first match first; an object there is looked into.
_KEYS: Final = (
    *("log", "message", "msg", "textPayload", "jsonPayload", "line", "body", "MESSAGE"),
    *("stringValue", "_raw", "result", "_source", "event"),
)
#: Docker cuts a line there and leaves out the line feed.
_DOCKER_CHUNK: Final = 16 << 10
_CLOCK: Final = re.compile(r"(\d\d-\d\d)[ T](\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)", re.ASCII)
_WORD: Final = re.compile(r"[\w.-]{1,128}", re.ASCII)


def is_soiled(block: bytes) -> bool:
    """Whether a block of UTF-8 may need :func:`scrubbed`; cheap, and never wrongly false."""
    return len(block.translate(None, _SOIL)) != len(block) or any(mark in block for mark in _SOILED)


def scrubbed(text: str) -> str:
    r"""The text without colours, other escape sequences and control characters; tab, ``\r`` and ``\n`` stay."""
    if text.isprintable() and not any(mark in text for mark in _PAINTED):
        return text
    if "\x1b" in text or "\x9b" in text:
        text = _ESCAPES.sub("", text)
    if text[:1] != "{" and any(mark in text for mark in _PAINTED):
        text = _PAINT.sub("", text)
    return text if text.isprintable() else _CONTROLS.sub("", text).replace("\xa0", " ")


class Wrappers:
    """
    Takes wrappers off the lines of one stream; holds the halves of a line until it is whole.

    Attributes:
        cut: Joined lines that were longer than :data:`LIMIT`.
    """

    def __init__(self) -> None:
        self.cut = 0
        self._halves: dict[str, str] = {}
        self._proven: set[str] = set()

    def unwrap(self, text: str, depth: int = _DEPTH) -> list[str]:
        """The lines in a line: mostly one, none where it is a first half, several where one string held them."""
        while depth and text and not text.startswith(OWN):
            inner = self._peeled(text)
            if inner is None:
                break
            depth -= 1
            if isinstance(inner, list):
                return [each for line in inner for each in self.unwrap(line, depth)]
            text = inner
        return [text]

    def close(self) -> list[str]:
        """Halves whose other half never came."""
        halves, self._halves = self._halves, {}
        return [each for half in halves.values() for each in self.unwrap(half[:LIMIT])]

    def _peeled(self, text: str) -> str | list[str] | None:
        first = text[0]
        if first == "{":
            return self._from_json(text)
        if first in _BOXES:
            return _unboxed(text)
        if first == "[" and (found := _BRACKETED.match(text)):
            return text[found.end() :]
        if text.startswith("[20"):
            return None
        if first == "<" and (found := _SYSLOG_5424.match(text) or _PRIORITY.match(text)):
            return text[found.end() :]
        if "0" <= first <= "9" and (found := _STAMP.match(text)):
            return self._unstamped(text, found.end())
        return self._unnamed(text)

    def _unnamed(self, text: str) -> str | None:
        """Without a name in front: a service, a host and program, a job, a pod."""
        found = None
        if text.find(" |", 0, 260) > 0:
            found = _COMPOSE.match(text)
        if found is None and text.startswith(_MONTHS):
            found = _SYSLOG.match(text)
        if found is None and ("]:" in text or "kernel:" in text):
            found = _TAG.match(text)
        if found is None and "\t2" in text:
            found = _JOB.match(text)
        return text[found.end() :] if found else self._unproven(text)

    def _unproven(self, text: str) -> str | None:
        first = text[0]
        if not ("a" <= first <= "z" or "0" <= first <= "9" or first == "["):
            return None
        for shape in _LOOSE:
            found = shape.match(text)
            if found is None:
                continue
            if found[0] not in self._proven:
                if _PROOF.match(text, found.end()) is None:
                    continue
                if len(self._proven) < 256:
                    self._proven.add(found[0])
            return text[found.end() :]
        return None

    def _unstamped(self, text: str, end: int) -> str | list[str] | None:
        stream = _STREAM.match(text, end)
        if stream is not None:
            inner = text[stream.end() :]
            return self._joined(stream[1], inner, half=stream[2] == "P") if stream[1] else inner
        if _LOGGER.match(text, end):
            return None
        rest = text[end:]
        if rest[:1] not in {" ", "\t", ""}:
            return None
        inner = rest.lstrip(" ")
        # Tracebacks are indented by twos, so an even number of spaces holds a separator of two.
        spaces = len(rest) - len(inner)
        return rest[min(spaces, 2 - spaces % 2) :] if spaces else rest[1:]

    def _joined(self, stream: str, text: str, *, half: bool) -> list[str]:
        before = self._halves.pop(stream, "")
        whole = before + text
        if len(before) <= LIMIT < len(whole):
            self.cut += 1
        if half:
            # One character more than a line may have remembers that it was counted.
            self._halves[stream] = whole[: LIMIT + 1]
            return []
        return [whole[:LIMIT]]

    def _from_json(self, text: str) -> list[str] | None:
        text = text.rstrip(", ")
        if text[-1] != "}":
            return None
        try:
            fields = orjson.loads(text)
        except orjson.JSONDecodeError:
            return None
        message = _message(fields)
        if message is None:
            return None
        lines = scrubbed(message.removesuffix("\n")).split("\n")
        stream = fields.get("stream")
        if stream not in {"stdout", "stderr"}:
            return lines
        half = fields.get("logtag") == "P" or (message[-1:] != "\n" and len(message.encode()) >= _DOCKER_CHUNK)
        return lines[:-1] + self._joined(f"json {stream}", lines[-1], half=half)


def _unboxed(text: str) -> str:
    inner = text[1:].rstrip()
    return (inner[:-1] if inner[-1:] and inner[-1] in _BOXES else inner).removeprefix(" ").rstrip()


def _message(fields: dict[str, Any], depth: int = 3) -> str | None:
    """What an object of a shipper or a JSON logger wraps; None where it is no wrapper."""
    rebuilt = _rebuilt(fields)
    if rebuilt is not None:
        return rebuilt
    for key in _KEYS:
        value = fields.get(key)
        if isinstance(value, str):
            return value
        if isinstance(value, dict) and depth and (inner := _message(value, depth - 1)) is not None:
            return inner
        if isinstance(value, list) and value and all(isinstance(each, int) and 0 <= each < 256 for each in value):
            # journald writes a message with colours as a list of bytes.
            return bytes(value).decode("utf-8", "replace")
    return None


def _rebuilt(fields: dict[str, Any]) -> str | None:
    """The line that vLLM's JSON mode stands for, as its text mode prints it; None for other objects."""
    level, message = fields.get("levelname", fields.get("level")), fields.get("message")
    name = fields.get("name", fields.get("logger"))
    clock = _CLOCK.search(str(fields.get("asctime", fields.get("timestamp"))))
    if not isinstance(message, str) or level not in _LEVELS.split("|") or clock is None:
        return None
    if not isinstance(name, str) or not _WORD.fullmatch(name):
        return None
    if "levelname" not in fields and not name.startswith("vllm"):
        return None
    process, pid = fields.get("processName"), fields.get("process")
    who = f"({process} pid={pid}) " if _WORD.fullmatch(str(process)) and isinstance(pid, int) else ""
    trace = fields.get("exc_info")
    lines = message.split("\n") + (trace.split("\n") if isinstance(trace, str) else [])
    # Of an empty line a prefix would be all there is, a hundred times as long.
    said = [line for line in lines if line] or [""]
    return "\n".join(f"{who}{level} {clock[1]} {clock[2]} [{name}] {line}" for line in said)
