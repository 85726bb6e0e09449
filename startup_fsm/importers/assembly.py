"""
Starts out of messages: which start, which process, which course.

One file may hold several starts, of many processes each, in any mixture. A banner after the end of a start begins the
next; so does a process that begins again with what it had done before. A line without a rank is nobody's, never
everybody's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import attrs

from startup_fsm.importers.anchors import Anchors
from startup_fsm.importers.course import ORDER, Course, Failure, failure_of
from startup_fsm.importers.facts import (
    NOBODY,
    Begin,
    Death,
    Fact,
    Figure,
    Frame,
    Grammar,
    Raised,
    Ready,
    Row,
    Said,
    Setting,
    Sign,
    Speaker,
    Stall,
    Step,
    Version,
)
from startup_fsm.importers.gathered import UNKNOWN, Gathered, ImportedStart, imported, set_knob
from startup_fsm.importers.general import FATAL
from startup_fsm.importers.tracebacks import SURVIVED, Tracebacks, with_calls

#: A crash loop may hold many thousands of starts; the last ones are kept, so many and with so many events.
STARTS: Final = 200
RECORDS: Final = 50_000
#: Processes of one start.
PROCESSES: Final = 1_024
#: How Python prints a frame.
_FRAME: Final = '  File "'
#: Exceptions whose meaning is kept for those that are raised from them: the chains of some ranks.
_DEATHS: Final = 256


#: Forms of a line that are one engine's own.
_ENGINES: Final = frozenset({"vllm", "sglang"})


@attrs.frozen(slots=True)
class _Ears:
    """What a grammar may know: the process's own words, or for nobody's line those of the whole start."""

    course: Course
    start: Gathered
    is_nobody: bool

    @property
    def state(self) -> str | None:
        return self.start.state if self.is_nobody and self.course.state is None else self.course.state

    def has(self, row: str) -> bool:
        return row in self.start.rows if self.is_nobody else self.course.has(row)


class Assembly:
    """Takes messages, gives starts."""

    def __init__(self, grammars: Sequence[Grammar], general: Sequence[Row], fallback: Grammar, run: str) -> None:
        """
        Begin with nothing.

        Args:
            grammars: The engines, tried in this order.
            general: Rows of what is no engine: shells, containers, the kernel.
            fallback: Judges exceptions where no engine is known.
            run: What the run ids begin with.
        """
        self._grammars = {grammar.source: grammar for grammar in grammars}
        rows = [(row, grammar.source) for grammar in grammars for row in grammar.rows] + [(row, "") for row in general]
        self._rows = Anchors([(row.anchor, (row, source)) for row, source in rows])
        self._fallback = fallback
        self._run = run
        self._tracebacks = Tracebacks()
        #: By what is printed and the identity of the frames, which holds as long as they are kept here.
        self._deaths: dict[tuple[Any, ...], tuple[tuple[Frame, ...], Grammar, Death]] = {}
        self._start: Gathered | None = None
        self._done: list[ImportedStart] = []
        self._count = 0
        self._records = 0
        self.left_out = 0

    @property
    def is_settled(self) -> bool:
        """Whether the start at hand is over, so that only a crash or another start is news."""
        return self._start is not None and self._start.is_over

    def take(self, said: Said) -> bool:
        """One message; True where it said anything."""
        told = False
        raised = self._tracebacks.take(said)
        if raised is not None:
            self._raised(*raised, said)
            # What the text of an exception says is said by whom it struck.
            said = attrs.evolve(said, speaker=raised[0])
            told = True
        text = said.text
        if text.startswith(_FRAME):
            # Whatever words are in a path.
            return told
        for row, source in self._rows.held_by(text):
            if row.form is None or row.form == said.form:
                found = row.search(text)
                if found is not None:
                    told = self._heard(row, source, found, said) or told
        return told

    def _heard(self, row: Row, source: str, found: Any, said: Said) -> bool:
        start = self._start or self._begin(said)
        of_another = source and start.is_sure and start.source != source
        if of_another or (source and said.form in _ENGINES and said.form != source):
            # The words of one engine in the log of another mean nothing.
            return False
        course = self._course(start, said.speaker)
        ears = _Ears(course, start, said.speaker.label is None and not said.speaker.name)
        facts = list(row.facts(found, ears))
        if source and facts:
            start.source = source
            # Bars and pasted texts look alike in all engines; a line with an engine's own prefix is its own.
            start.is_sure = said.form in _ENGINES
        for fact in facts:
            start, course = self._fact(fact, start, course, said)
        _met(course, said.speaker)
        course.heard(row.name)
        start.rows.add(row.name)
        start.hears(said)
        return bool(facts)

    def _fact(self, fact: Fact, start: Gathered, course: Course, said: Said) -> tuple[Gathered, Course]:
        if isinstance(fact, Begin):
            start = self._banner(fact, start, said)
            course = self._course(start, said.speaker)
        elif isinstance(fact, Step):
            if self._is_again(fact, start, course, said.speaker):
                start = self._begin(said, like=start)
                course = self._course(start, said.speaker)
            if course.step(fact, said):
                _goes_on(start, course, said)
        elif isinstance(fact, Figure):
            if abs(fact.value) < 1 << 62 and math.isfinite(fact.value):
                course.figure(fact, said)
        elif isinstance(fact, Sign):
            course.sign(fact, said)
        elif isinstance(fact, Setting):
            set_knob(start, fact)
        elif isinstance(fact, Version):
            start.engine, start.version = fact.engine or start.engine, fact.version or start.version
        elif isinstance(fact, Ready):
            self._ready(start, said)
        elif isinstance(fact, Stall):
            start.stalls = [*start.stalls[-2:], (said, fact.seconds)]
        else:
            self._died(fact, start, course, said)
        return start, course

    def _died(self, death: Death, start: Gathered, course: Course, said: Said) -> None:
        if said.level in SURVIVED and not death.is_final:
            return
        if start.closing is not None and death.category == "signal":
            # Whoever stops a server that is ready has had its start.
            return
        if death.is_final and start.shared.failing:
            # What is left is killed by those who clean up.
            death = attrs.evolve(death, category="peer", is_echo=True)
        course.was_ready = course.was_ready or start.closing is not None
        course.fails(Failure(death, said, "", said.text.strip()))

    def _ready(self, start: Gathered, said: Said) -> None:
        start.stalls.clear()
        for course in list(start.shared.failing.values()):
            course.survives(said)
        if start.closing is None:
            start.closing = said
            for course in start.courses.values():
                course.was_ready = True

    def _raised(self, speaker: Speaker, raised: Raised, said: Said) -> None:
        start = self._start or self._begin(said)
        course = self._course(start, speaker)
        ears = _Ears(course, start, speaker.label is None and not speaker.name)
        grammar = self._grammars.get(start.source) or self._grammar_of(raised, said, ears)
        if grammar is not None:
            start.source = grammar.source
        death = self._of_chain(raised, grammar or self._fallback, ears)
        _met(course, speaker)
        if start.source == UNKNOWN and death.category == "oom":
            start.source = self._fallback.source
        start.hears(said)
        if start.closing is not None and not (_ends_serving(death) or course.has(FATAL)):
            # An error of one request is no failure of the start.
            return
        course.was_ready = course.was_ready or start.closing is not None
        course.fails(failure_of(raised, death, said))

    def _of_chain(self, raised: Raised, grammar: Grammar, ears: _Ears) -> Death:
        chain = [raised]
        while (cause := chain[-1].cause) is not None:
            chain.append(cause)
        return _meaning([self._death(each, grammar, ears) for each in reversed(chain)])

    def _death(self, raised: Raised, grammar: Grammar, ears: _Ears) -> Death:
        """What one of a chain means: looked for once, when it is printed, and not for each that follows."""
        # A chain that was shortened has copies of its exceptions.
        key = (raised.line, raised.type, raised.message, id(raised.frames))
        known = self._deaths.get(key)
        if known is None or known[1] is not grammar:
            if len(self._deaths) >= _DEATHS:
                del self._deaths[next(iter(self._deaths))]
            # People leave lines out; what a source line calls stands for the frame that is missing.
            death = grammar.death(attrs.evolve(raised, frames=with_calls(raised.frames)), ears)
            known = self._deaths[key] = (raised.frames, grammar, death)
        return known[2]

    def _grammar_of(self, raised: Raised, said: Said, ears: _Ears) -> Grammar | None:
        """The engine by the form of the line, by the files of the frames, or whose own sentence it is."""
        if said.form in self._grammars:
            return self._grammars[said.form]
        for grammar in self._grammars.values():
            if any(f"/{grammar.source}/" in frame.file.replace("\\", "/") for frame in raised.frames):
                return grammar
        if raised.frames or self._fallback.death(raised, ears).reason:
            return None
        return next((each for each in self._grammars.values() if each.death(raised, ears).reason), None)

    def _banner(self, fact: Begin, start: Gathered, said: Said) -> Gathered:
        who, pid = (said.speaker.name, said.speaker.label), said.speaker.pid
        pids = start.banners.get(fact.kind, {}).get(who, set())
        if start.is_over or (pids and (pid not in pids or start.latest is not None)):
            start = self._begin(said, like=start)
        heard = start.banners.setdefault(fact.kind, {})
        if len(heard) < PROCESSES:
            heard.setdefault(who, set()).add(pid)
        return start

    def _is_again(self, step: Step, start: Gathered, course: Course, speaker: Speaker) -> bool:
        """Whether a process begins anew what it did before, after the start was over."""
        if step.moment != "begins" or not start.is_over or ORDER.get(step.state, 99) > ORDER["load_weights"]:
            return False
        if speaker.pid is not None and course.pids and speaker.pid not in course.pids:
            return True
        has_loaded = course.position >= ORDER["load_weights"]
        return has_loaded and (speaker.pid is None or start.closing is not None or course.failure is not None)

    def _begin(self, said: Said, *, like: Gathered | None = None) -> Gathered:
        """A new start; the one before it is done."""
        self._finish()
        self._start = Gathered(first=said)
        if like is not None:
            self._start.source, self._start.engine, self._start.version = like.source, like.engine, like.version
        return self._start

    def _course(self, start: Gathered, speaker: Speaker) -> Course:
        key = speaker.label or speaker.name
        course = start.courses.get(key)
        if course is None and len(start.courses) >= PROCESSES:
            # More than a start has: these are nobody's.
            key, speaker = "", NOBODY
            course = start.courses.get(key)
        if course is None:
            course = Course(
                name=key or "unnamed",
                source=start.source,
                label=speaker.label,
                rank=speaker.rank,
                shared=start.shared,
            )
            start.courses[key] = course
        return course

    def finish(self) -> tuple[ImportedStart, ...]:
        """The log is over: all its starts, oldest first."""
        self._finish()
        return tuple(self._done)

    def _finish(self) -> None:
        start, self._start = self._start, None
        if start is None:
            return
        if start.stalls:
            waiting = max(start.courses.values(), key=lambda course: course.entered_line)
            waiting.stalled(*start.stalls[-1])
        self._count += 1
        done = imported(start, f"{self._run}-{self._count:06d}")
        if done.processes:
            self._done.append(done)
            self._records += sum(len(process.records) for process in done.processes)
        while len(self._done) > STARTS or (len(self._done) > 1 and self._records > RECORDS):
            self._records -= sum(len(process.records) for process in self._done.pop(0).processes)
            self.left_out += 1


def _goes_on(start: Gathered, course: Course, said: Said) -> None:
    course.survives(said)
    start.stalls.clear()
    if start.latest is None or course.entered_line >= start.latest.entered_line:
        start.latest = course


def _met(course: Course, speaker: Speaker) -> None:
    """Under which pid a process speaks; after its words were judged, since another pid may begin another start."""
    if speaker.pid is not None and len(course.pids) < PROCESSES:
        course.pids.add(speaker.pid)


def _ends_serving(death: Death) -> bool:
    return death.category in ("oom", "host_oom") or death.is_final


def _meaning(deaths: list[Death]) -> Death:
    """What a chain of exceptions means: the cause says what, the latest that knows says where."""
    telling = [death for death in deaths if not death.is_echo] or deaths
    what = next((death for death in telling if death.reason or death.category != "raised"), telling[0])
    said = [death for death in telling if death.reason and death.category == what.category]
    where = next((death for death in reversed(telling) if death.state is not None), what)
    part = next((death.part for death in reversed(telling) if death.part and death.state == where.state), where.part)
    reason = said[-1].reason if said else what.reason
    is_final = any(death.is_final for death in deaths)
    return attrs.evolve(what, reason=reason, state=where.state, part=part, is_final=is_final)
