"""
What says whose machine it was becomes stable tokens: paths, hosts, users, process numbers, environment. Pure.

People attach reports to public issues. The same thing has the same token wherever it stands in one page, so that what
belongs together can still be told. Learn everything first, then say it: a name that was met in a path is also replaced
where it stands alone. All patterns are bounded; a journal may be hostile.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from startup_fsm.reports.terminal import clean

#: Longest text that is looked at, in characters; what is cut from a text is said.
LONGEST: Final = 4_096

#: Names that say nothing of whose machine it is, and are words of our own sentences.
_PLAIN_NAMES: Final = frozenset(
    {
        "admin", "cluster", "container", "default", "engine", "gpu", "home", "host", "local", "localhost", "main",
        "master", "node", "nobody", "none", "process", "rank", "root", "runner", "server", "service", "sglang",
        "shared", "task", "tmp", "torch", "ubuntu", "unknown", "user", "vllm", "work", "worker"
    }
)  # fmt: skip
#: Tree of a distribution that everybody has: what follows is kept, so that a frame says which code it is.
_PUBLIC: Final = re.compile(
    r"/(?:(?:site|dist)-packages/(?=(?:vllm|sglang|torch|transformers|triton|flashinfer|ray|startup_fsm|uvicorn)/)"
    r"|pytorch/(?=c10/|aten/|torch/)|(?=startup_fsm/)|lib(?:64)?/python3\.\d{1,2}/(?!(?:site|dist)-packages))"
)
_ENDINGS: Final = (
    "py|pyc|so|cpp|cu|cuh|c|h|json|jsonl|log|txt|bin|pt|pth|gguf|safetensors|yaml|yml|toml|cfg|sh|md|html|gz"
)
_ENDING: Final = re.compile(rf"\.(?:{_ENDINGS})(?:\.\d{{1,3}})?$")
#: Hosts of public documentation, which error messages name.
_PUBLIC_HOSTS: Final = ("pytorch.org", "docs.vllm.ai", "docs.nvidia.com", "docs.sglang.ai")

_STEP: Final = r"[^\s/\\:'\"<>|,;()\[\]{}=*?`]"
_NAME: Final = r"[\w.+@%~-]"

_PATTERN: Final = re.compile(
    rf"""
      (?P<secret>\b(?:hf_|sk-|ghp_|github_pat_|glpat-|xox[abp]-|AKIA|nvapi-)[\w-]{{8,256}}+)
    | (?P<bearer>(?<=Bearer\ )[\w.~+/=-]{{8,1024}}+)
    | (?P<url>\b[A-Za-z][A-Za-z0-9+.-]{{1,15}}://[^\s'"<>()\[\]]{{1,2000}}+)
    | (?P<email>\b[\w.+-]{{1,64}}@[\w-]{{1,63}}(?:\.[\w-]{{1,63}}){{0,8}})
    | (?P<uuid>\b(?:GPU-|MIG-)?[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-[0-9a-fA-F]{{4}}-[0-9a-fA-F]{{4}}-[0-9a-fA-F]{{12}}\b)
    | (?P<quoted>(?<=["'])(?:/|~/|[A-Za-z]:\\)[^"'\n]{{1,1000}}+(?=["']))
    | (?P<frame>(?:^|(?<=\n))\ {{0,8}}/[^\n:"']{{1,1000}}?(?=:\d{{1,9}}\ \S))
    | (?P<windows>(?<![\w])(?:[A-Za-z]:\\|\\\\){_STEP}{{0,255}}+(?:\\{_STEP}{{0,255}}+){{0,64}})
    | (?P<path>(?<![\w.~/+-])(?:~[\w.-]{{0,32}}|\.{{1,2}})?/{_STEP}{{1,255}}+(?:/{_STEP}{{0,255}}+){{0,64}})
    | (?P<relative>(?<![\w./~+-])(?![\d/]{{1,64}}(?![\w/])){_NAME}{{1,255}}(?:/{_NAME}{{1,255}}){{2,64}}/?)
    | (?P<file>(?<![\w./~+-]){_NAME}{{1,255}}/{_NAME}{{1,255}}?\.(?:{_ENDINGS})\b)
    | (?P<address>(?<![\w.])(?:\d{{1,3}}\.){{3}}\d{{1,3}}(?![\w.])|\bip-\d{{1,3}}-\d{{1,3}}-\d{{1,3}}-\d{{1,3}}\b)
    | (?P<address6>(?<![\w:.])(?:[0-9a-fA-F]{{1,4}}:){{3,7}}(?::?[0-9a-fA-F]{{1,4}}){{1,4}}(?![\w:]))
    | (?P<named_pid>\b(?:(?:[Pp][Ii][Dd]s?|[Pp]rocess(?:\ [Ii][Dd])?)\s?[=:#]?\s?|engine-))(?P<pid>\d{{1,10}})\b
    | (?P<named_user>\b(?:[Uu][Ss][Ee][Rr](?:[Nn][Aa][Mm][Ee])?|[Ll]ogin)=["']?)(?P<user>[\w.-]{{1,64}})
    | (?P<named_host>\b(?:[Hh][Oo][Ss][Tt](?:[Nn][Aa][Mm][Ee])?|[Nn]ode(?:name)?|[Mm]aster_addr|MASTER_ADDR)=["']?)
      (?P<host>[A-Za-z][\w.-]{{0,255}})
    | (?P<domain>(?<![\w./-])[A-Za-z0-9][\w-]{{0,62}}(?:\.[\w-]{{1,63}}){{0,8}}
      \.(?:com|net|org|edu|gov|local|internal|intranet|lan|corp|cluster|svc|cloud)\b(?![\w(]))
    """,
    re.VERBOSE,
)
#: Without one of these no pattern can match.
_MAY: Final = re.compile(
    r"[/\\@=]|[Pp][Ii][Dd]|rocess|engine-\d|ip-\d|[0-9a-fA-F]{4}-|\d\.\d|[0-9a-fA-F]:|Bearer|hf_|gh[p_]|github_|AKIA"
    r"|(?:sk|glpat|xox[abp]|nvapi)-|\.(?:com|net|org|edu|gov|local|internal|intranet|lan|corp|cluster|svc|cloud)"
)
_USER_OF_PATH: Final = re.compile(r"(?:/home/|/Users/|[A-Za-z]:\\Users\\)([^\s/\\:'\"]{1,64})")
_UNIT: Final = r"(?!\s?(?:[KMGT]i?B|[num]?s|B|bytes|tokens|blocks|sizes|graphs|%)\b)"


class Redactor:
    """
    Stable tokens for one page.

    Args:
        keeps_all: Says everything as it is, cleaned and cut only.

    Attributes:
        counts: How many different things of each kind were replaced so far.
    """

    def __init__(self, *, keeps_all: bool = False) -> None:
        self.keeps_all = keeps_all
        self.counts: dict[str, int] = {}
        self._tokens: dict[tuple[str, str], str] = {}
        self._given: set[str] = set()
        self._literals: dict[str, tuple[str, str]] = {}
        self._literal: re.Pattern[str] | None = None
        self._said: dict[tuple[str, int], str] = {}

    def token(self, kind: str, value: str) -> str:
        """The token of one thing, such as ``path-3``; the thing itself where everything is kept."""
        if self.keeps_all:
            return value
        found = self._tokens.get((kind, value))
        if found is None:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            found = self._tokens[kind, value] = f"{kind}-{self.counts[kind]}"
            self._given.add(found)
        return found

    def learn(self, kind: str, name: str | None) -> None:
        """Replace this name wherever it stands alone; a plain word, or a very short one, only in its own field."""
        if not name or len(name) > LONGEST or name in self._literals:
            return
        if len(name) < 3 or name.lower() in _PLAIN_NAMES:
            return
        self._literals[name] = (kind, name)
        self._literal = None
        self._said.clear()
        short = name.partition(".")[0]
        if kind == "host" and short != name:
            # One machine, one token, whether its domain is said or not.
            self.learn("host", short)
            if short in self._literals:
                self._literals[short] = (kind, name)

    def learn_users(self, texts: Iterable[str]) -> None:
        """Find the users whose homes are in these texts."""
        for text in texts:
            head = text[:LONGEST]
            if "/home/" in head or "Users" in head:
                for user in _USER_OF_PATH.findall(head):
                    self.learn("user", user)

    def learn_paths(self, values: Mapping[str, object]) -> None:
        """Settings whose whole value is a path may have blanks in it."""
        for value in values.values():
            if isinstance(value, str) and value.startswith(("/", "~", "./", "../")) and "\n" not in value[:LONGEST]:
                self.learn("path", value)

    def say(self, value: object, limit: int = 2_000) -> str:
        """One line of safe text without the names of anybody's machine, at most ``limit`` characters of it."""
        text = value if isinstance(value, str) else str(value)
        if self.keeps_all:
            return clean(text, limit)
        key = (text, limit)
        found = self._said.get(key)
        if found is None:
            if len(text) > LONGEST:
                return self._cut(text, limit)
            found = self._said[key] = clean(self._replaced(text), limit)
        return found

    def _cut(self, text: str, limit: int) -> str:
        # No name may be cut in two: its half would be nobody's name any more.
        head = text[:LONGEST]
        last = max(head.rfind(" "), head.rfind("\n"))
        head = head[: last if last > LONGEST // 2 else 256]
        shown = clean(self._replaced(head)[:limit])
        return f"{shown}... ({len(text) - len(head)} more characters)"

    def _replaced(self, text: str) -> str:
        literal = self._known()
        if literal is not None:
            text = literal.sub(self._of_literal, text)
        return _PATTERN.sub(self._of_pattern, text) if _MAY.search(text) else text

    def _known(self) -> re.Pattern[str] | None:
        if self._literal is None and self._literals:
            longest = sorted(self._literals, key=lambda name: (-len(name), name))
            parts = [re.escape(name) + (_UNIT if name.isdigit() else "") for name in longest]
            self._literal = re.compile(rf"(?<![\w.])(?:{'|'.join(parts)})(?!\w)")
        return self._literal

    def _of_literal(self, found: re.Match[str]) -> str:
        kind, name = self._literals[found[0]]
        return self._path(name) if kind == "path" else self.token(kind, name)

    def _of_pattern(self, found: re.Match[str]) -> str:
        kind, text = found.lastgroup or "", found[0]
        if kind in ("pid", "user", "host"):
            if found[kind] in self._given:
                return text
            return found[f"named_{kind}"] + self.token(kind, found[kind])
        if kind == "url":
            return self._url(text)
        if kind in _PATHS:
            blanks = len(text) - len(text.lstrip(" "))
            return " " * blanks + self._path(text[blanks:])
        return self.token(_KINDS[kind], text)

    def _path(self, path: str) -> str:
        """A token for the tree; what is below a distribution that everybody has stays, and so does the ending."""
        place, dot = (path[:-1], ".") if path.endswith(".") else (path, "")
        public = max((found.end() for found in _PUBLIC.finditer(place)), default=None)
        if public is not None:
            return f"{self.token('path', place[:public].rstrip('/'))}/{place[public:]}{dot}"
        ending = _ENDING.search(place)
        return self.token("path", place) + (ending[0] if ending else "") + dot

    def _url(self, url: str) -> str:
        host = url.partition("://")[2].partition("/")[0].lower()
        return url if host in _PUBLIC_HOSTS else self.token("url", url)


_PATHS: Final = frozenset({"quoted", "frame", "windows", "path", "relative", "file"})
_KINDS: Final = {
    "secret": "secret",
    "bearer": "secret",
    "email": "user",
    "uuid": "id",
    "address": "address",
    "address6": "address",
    "domain": "host",
}
