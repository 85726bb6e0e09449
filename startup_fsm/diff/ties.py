"""
What a fault of the worse of two starts may rest on: a setting, a term, a device that differs, with the numbers. Pure.

Every rule looks at one difference and says nothing where it does not make things worse. ``bytes`` is what the numbers
of both starts show of it; a rule that has no number for it says so by 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

import attrs

from startup_fsm.diff.sides import Side, shown
from startup_fsm.findings import Finding
from startup_fsm.memory import MIB, format_bytes

#: What another process moved by less than this explains nothing.
_OTHERS: Final = 16 * MIB


@attrs.frozen(kw_only=True)
class Tie:
    """
    A difference that the fault of the worse start rests on.

    Attributes:
        kind: What differs: a ``setting``, the ``version`` of the engine, a ``term`` of the budget, the ``device``, a
            ``figure``, or the ``course``, that is what one of them did and the other did not.
        name: Of the setting, term or figure.
        better, worse: What it was in each; None where nobody said.
        bytes: What it moves, by the numbers of both; 0 where no number shows it.
        text: One clause.
    """

    kind: Literal["setting", "version", "term", "device", "figure", "course"]
    name: str
    better: Any
    worse: Any
    bytes: int = 0
    text: str


#: Better, worse, and the finding that only the worse one has; None where what is worse is no finding.
Rule = Callable[[Side, Side, Finding | None], Iterator[Tie]]


def ties(better: Side, worse: Side, finding: Finding | None) -> tuple[Tie, ...]:
    """
    What differs and makes it worse, in the order in which it usually is the cause.

    What the numbers show comes first, and of that what moves as much as was missing; then what somebody set comes
    before what came of it.

    Args:
        better: The start that went well, or better.
        worse: The other.
        finding: The first that only the worse one has; None where its KV cache is smaller and no finding says why.
    """
    rules = _SMALLER_KV if finding is None else _RULES.get(finding.code, _by_area(finding.code))
    found = [tie for rule in rules for tie in rule(better, worse, finding)]
    missing = 0 if finding is None else worse.verdict.missing_bytes or finding.bytes
    return tuple(sorted(found, key=lambda tie: (not tie.bytes, tie.bytes < missing, tie.kind == "term")))


def _by_area(code: str) -> tuple[Rule, ...]:
    return _MEMORY if code.endswith("out_of_memory") else ()


def moved(name: str, was: Any, now: Any, worse: Side) -> str:
    """A change in words; as time goes where the worse one is the second."""
    before, after = shown(name, was), shown(name, now)
    if was is None or now is None:
        return f"{name} {after}, {before} in {'A' if worse.name == 'B' else 'B'}"
    if worse.name == "A":
        return f"{name} at {after} instead of {before}"
    is_ordered = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (was, now))
    verb = "changed" if not is_ordered else "raised" if now > was else "lowered"
    return f"{name} {verb} from {before} to {after}"


def _share_raised(better: Side, worse: Side, finding: Finding | None) -> Iterator[Tie]:
    name, was, now = worse.share_name, better.share, worse.share
    if name != better.share_name or was is None or now is None or now <= was:
        return
    text = moved(name, was, now, worse)
    base_was, base_now = better.base or worse.base, worse.base or better.base
    if base_was is None or base_now is None:
        yield Tie(kind="setting", name=name, better=was, worse=now, text=text)
        return
    room_was, room_now = (round(base * (1 - share)) for base, share in ((base_was, was), (base_now, now)))
    if room_now < room_was:
        text += f" leaves {format_bytes(room_was - room_now)} less of the device beside the request,"
        text += f" {format_bytes(room_now)} of {format_bytes(base_now)}{_lacking(better, worse, finding, room_now)}"
        yield Tie(kind="setting", name=name, better=was, worse=now, bytes=room_was - room_now, text=text)


def _lacking(better: Side, worse: Side, finding: Finding | None, room: int) -> str:
    """What did not fit into the room, where the numbers tell it."""
    took, kept = better.size("graph_actual_bytes"), better.reserved or 0
    is_graphs = finding is not None and finding.code.startswith(("graphs.", "capture."))
    if is_graphs and took is not None and took - kept > room:
        beside = "" if not kept else f", {format_bytes(kept)} of them reserved"
        return f", and the graphs took {format_bytes(took)} in {better.name}{beside}"
    missing = worse.verdict.missing_bytes
    return f"; {format_bytes(missing)} were missing" if missing else ""


def _share_lowered(better: Side, worse: Side, finding: Finding | None) -> Iterator[Tie]:
    name, was, now = worse.share_name, better.share, worse.share
    if name != better.share_name or was is None or now is None or now >= was:
        return
    text = moved(name, was, now, worse)
    base_was, base_now = better.base or worse.base, worse.base or better.base
    if base_was is None or base_now is None:
        yield Tie(kind="setting", name=name, better=was, worse=now, text=text)
        return
    less = round(base_was * was) - round(base_now * now)
    if less > 0:
        missing = worse.verdict.missing_bytes
        text += f" asks for {format_bytes(less)} less of the device, {format_bytes(round(base_now * now))}"
        text += f"; {format_bytes(missing)} are missing" if missing else ""
        yield Tie(kind="setting", name=name, better=was, worse=now, bytes=less, text=text)


def _pinned(better: Side, worse: Side, finding: Finding | None) -> Iterator[Tie]:
    name = "kv_cache_memory_bytes"
    was, now = better.settings.get(name), worse.settings.get(name)
    if not isinstance(now, int) or now == was:
        return
    had = was if isinstance(was, int) else better.size("kv_cache_bytes", "kv_available_bytes")
    more = None if had is None else now - had
    if finding is None:
        more = None if more is None else -more
    if more is None or more > 0:
        text = moved(name, was, now, worse)
        text += f", {format_bytes(more)} {'less' if finding is None else 'more'} than in {better.name}" if more else ""
        yield Tie(kind="setting", name=name, better=was, worse=now, bytes=more or 0, text=text)


def _reserved_less(better: Side, worse: Side, finding: Finding | None) -> Iterator[Tie]:
    was, now, measured = better.reserved, worse.reserved, worse.measured or 0
    if was is None or now is None:
        return
    text = f"{format_bytes(now)} reserved for the graphs, {format_bytes(was)} in {better.name}"
    if measured > was:
        # Whatever the other took off, it is less than this one had measured.
        was, text = (
            measured,
            f"{format_bytes(now)} reserved for the graphs, of {format_bytes(measured)} that were measured",
        )
    if now >= was:
        return
    for name in ("graph_estimate", "graph_share", "graph_method", "graph_sample"):
        before, after = better.settings.get(name), worse.settings.get(name)
        if before != after:
            text = f"{moved(name, before, after, worse)}: {text}"
            yield Tie(kind="setting", name=name, better=before, worse=after, bytes=was - now, text=text)
            return
    before, after = better.verdict.engine_version, worse.verdict.engine_version
    if before is not None and after is not None and before != after:
        text = f"{moved('engine_version', before, after, worse)}: {text}"
        yield Tie(kind="version", name="engine_version", better=before, worse=after, bytes=was - now, text=text)
    elif better.reserved == was:
        yield Tie(kind="term", name="graphs", better=was, worse=now, bytes=was - now, text=text)


def _graphs_at_all(better: Side, worse: Side, finding: Finding | None) -> Iterator[Tie]:
    captured = [bool(side.chosen.run.visits_of("capture_graphs")) for side in (better, worse)]
    name = "enforce_eager"
    before, after = better.settings.get(name), worse.settings.get(name)
    # A log that shows no capture may only be cut.
    if better.is_ready and captured == [False, True] and (before is True or not better.is_logged):
        text = f"{better.name} captured no graphs"
        if before != after:
            yield Tie(
                kind="setting", name=name, better=before, worse=after, text=f"{text} ({name} {shown('', before)})"
            )
        else:
            yield Tie(kind="course", name="capture_graphs", better="left out", worse="entered", text=text)


def _more_graphs(better: Side, worse: Side, finding: Finding | None) -> Iterator[Tie]:
    name = "capture_sizes"
    was, now = better.settings.get(name), worse.settings.get(name)
    if not (isinstance(was, list | tuple) and isinstance(now, list | tuple)) or not was or not now:
        return
    if not all(isinstance(each, int) for each in (*was, *now)) or (len(now), max(now)) == (len(was), max(was)):
        return
    if len(now) >= len(was) and max(now) >= max(was):
        yield Tie(kind="setting", name=name, better=was, worse=now, text=moved(name, was, now, worse))


def _raised(name: str, *figures: str, what: str = "") -> Rule:
    """A number that was raised, and the figure that grew with it."""

    def rule(better: Side, worse: Side, finding: Finding | None) -> Iterator[Tie]:
        was, now = better.settings.get(name), worse.settings.get(name)
        if isinstance(now, bool) or not isinstance(now, int | float):
            return
        if was is not None and (isinstance(was, bool) or not isinstance(was, int | float) or now <= was):
            return
        text, more = moved(name, was, now, worse), 0
        for figure in figures:
            before, after = better.size(figure), worse.size(figure)
            if before is not None and after is not None and after > before:
                more = after - before
                text += f": {what} {format_bytes(after)}, {format_bytes(before)} in {better.name}"
                break
            if figure == "kv_needed_bytes" and after is not None and was is not None:
                more = round(after * (1 - was / now))
                text += f": {what} {format_bytes(after)}"
        yield Tie(kind="setting", name=name, better=was, worse=now, bytes=more, text=text)

    return rule


def _weights(better: Side, worse: Side, finding: Finding | None) -> Iterator[Tie]:
    was, now, least = _weight(better), _weight(worse), ""
    if now is None and worse.verdict.failed_state == "load_weights":
        # What had been loaded when the device was full.
        now, least = worse.size("torch_allocated_bytes"), "at least "
    if was is None or now is None or now - was <= was // 100:
        return
    text = f"the weights have {least}{format_bytes(now)}, {format_bytes(was)} in {better.name}"
    for name in ("shape", "model", "checkpoint", "dtype", "quantization", "tensor_parallel_size", "speculative"):
        before, after = better.settings.get(name), worse.settings.get(name)
        if before != after:
            text = f"{moved(name, before, after, worse)}: {text}"
            yield Tie(kind="setting", name=name, better=before, worse=after, bytes=now - was, text=text)
            return
    yield Tie(kind="figure", name="weights_bytes", better=was, worse=now, bytes=now - was, text=text)


def _weight(side: Side) -> int | None:
    told = side.chosen.run.note("checkpoint_bytes")
    return told if isinstance(told, int) else side.size("weights_bytes")


def _smaller_device(better: Side, worse: Side, finding: Finding | None) -> Iterator[Tie]:
    was, now = better.size("total_bytes"), worse.size("total_bytes")
    if was is not None and now is not None and was - now > was // 100:
        text = f"the device has {format_bytes(now)}, {format_bytes(was)} in {better.name}"
        yield Tie(kind="device", name="total_bytes", better=was, worse=now, bytes=was - now, text=text)


def _others(better: Side, worse: Side, finding: Finding | None) -> Iterator[Tie]:
    was, now = better.others, worse.others
    if was is None or now is None:
        yield from _free(better, worse)
        return
    moved_by = max(abs(now[0] - was[0]), abs((now[1] - now[0]) - (was[1] - was[0])))
    if moved_by > _OTHERS:
        text = f"other processes held {_from_to(now)} in {worse.name}, {_from_to(was)} in {better.name}"
        yield Tie(kind="device", name="other processes", better=list(was), worse=list(now), bytes=moved_by, text=text)


def _free(better: Side, worse: Side) -> Iterator[Tie]:
    was, now, least = better.size("free_at_start_bytes"), worse.size("free_at_start_bytes"), ""
    base, share = better.base or worse.base, better.share
    if was is None and better.is_ready and base is not None and share is not None:
        # It would not have come to ready without what it asked for.
        was, least = round(base * share), "at least "
    if was is not None and now is not None and was - now > _OTHERS:
        text = f"{format_bytes(now)} were free at the start, {least}{format_bytes(was)} in {better.name}"
        yield Tie(kind="device", name="free_at_start_bytes", better=was, worse=now, bytes=was - now, text=text)


def _from_to(held: tuple[int, int]) -> str:
    if held[0] == held[1]:
        return f"{format_bytes(held[0])} throughout"
    return f"{format_bytes(held[0])} at the first reading and {format_bytes(held[1])} at the last"


def _not_profiled(better: Side, worse: Side, finding: Finding | None) -> Iterator[Tie]:
    for part in sorted(better.profiled - worse.profiled):
        was, now = better.size("activation_reserved_peak_bytes"), worse.size("activation_reserved_peak_bytes")
        text = f"{better.name} profiled the {part}, {worse.name} did not"
        more = 0 if finding is None or finding.code != "profile.incomplete" else finding.bytes
        if was is not None and now is not None and now < was:
            more = was - now
            text += f": {format_bytes(now)} kept for the largest step, {format_bytes(was)} in {better.name}"
        yield Tie(kind="course", name=part, better="profiled", worse="not profiled", bytes=more, text=text)


def _term(better: Side, worse: Side, finding: Finding | None) -> Iterator[Tie]:
    """The term of the budget that takes most more, where both were printed or computed."""
    was, now = better.terms, worse.terms
    grown = [(was[name] - now[name], name) for name in was.keys() & now.keys() if now[name] < was[name]]
    grown += [(-now[name], name) for name in now.keys() - was.keys() if now[name] < 0 and was and not worse.is_logged]
    if not grown:
        return
    more, name = max(grown)
    before, after = was.get(name, 0), now[name]
    if name == "requested":
        text = f"{format_bytes(after)} were requested, {format_bytes(before)} in {better.name}"
    else:
        text = (
            f"{name} takes {format_bytes(more)} more: {format_bytes(-after)}, {format_bytes(-before)} in {better.name}"
        )
    yield Tie(kind="term", name=name, better=before, worse=after, bytes=more, text=text)


_TAKES: Final = "the largest step takes"
_STEP_FIGURES: Final = ("activation_reserved_peak_bytes", "engine_activation_bytes")
_SEQUENCES: Final = _raised("max_num_seqs", *_STEP_FIGURES, what=_TAKES)
_TOKENS: Final = _raised("max_num_batched_tokens", *_STEP_FIGURES, what=_TAKES)
_CHUNK: Final = _raised("chunked_prefill_size", *_STEP_FIGURES, what=_TAKES)
_REQUESTS: Final = _raised("max_running_requests")
_LENGTH: Final = _raised("max_model_len", "kv_needed_bytes", what="one longest request needs")

#: What takes the room that something needs after the KV cache was sized.
_MEMORY: Final[tuple[Rule, ...]] = (
    _not_profiled,
    _reserved_less,
    _pinned,
    _graphs_at_all,
    _share_raised,
    _more_graphs,
    _SEQUENCES,
    _REQUESTS,
    _TOKENS,
    _others,
    _weights,
    _smaller_device,
)
_GRAPHS: Final[tuple[Rule, ...]] = tuple(rule for rule in _MEMORY if rule is not _not_profiled)
_STEP: Final[tuple[Rule, ...]] = (_TOKENS, _SEQUENCES, _CHUNK, _LENGTH, _weights, _others, _smaller_device)
#: What leaves less for the KV cache.
_LESS: Final[tuple[Rule, ...]] = (
    _share_lowered,
    _weights,
    _smaller_device,
    _TOKENS,
    _SEQUENCES,
    _CHUNK,
    _others,
    _term,
)
_SMALLER_KV: Final[tuple[Rule, ...]] = (_pinned, *_LESS)

_RULES: Final[dict[str, tuple[Rule, ...]]] = {
    "device.not_enough_free": (_others, _share_raised, _smaller_device, _weights),
    "device.neighbour_present": (_others,),
    "device.neighbour_grew": (_others,),
    "device.neighbour_shrank": (_others,),
    "device.drift": (_others,),
    "weights.exceed_device": (_weights, _smaller_device),
    "weights.exceed_request": (_share_lowered, _weights, _smaller_device),
    "profile.out_of_memory": _STEP,
    "profile.incomplete": _MEMORY,
    "graphs.not_reserved": _GRAPHS,
    "graphs.estimate_short": _GRAPHS,
    "graphs.estimate_negative": _GRAPHS,
    "graphs.estimate_absurd": (_more_graphs, _SEQUENCES),
    "graphs.estimate_long": (_more_graphs, _SEQUENCES),
    "budget.negative": _LESS,
    "budget.request_does_not_fit": (_LENGTH, *_LESS),
    "budget.sequences_do_not_fit": (_SEQUENCES, *_LESS),
    "budget.counted_twice": (_term,),
    "budget.overrun": _MEMORY,
    "budget.unused": _LESS,
    "budget.pinned_too_large": (_pinned, _smaller_device, _weights),
    "workspace.grew": (_raised("max_num_seqs"), _raised("max_model_len")),
}
