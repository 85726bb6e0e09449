"""
Whether a process has sized its KV cache, by what it said before.

The same words mean another state before and after sizing: graphs that are captured before it are thrown away, and what
is compiled after it is warm-up. A log that begins in the middle shows nothing of what came first; then a capture is the
real one.
"""

from __future__ import annotations

from typing import Final

from startup_fsm.importers.facts import Heard, Step

REAL: Final = "capture_graphs"
THROWAWAY: Final = "capture_throwaway"

#: States that come after sizing.
_LATE: Final = frozenset(
    {"size_kv", "reserve_kv", "allocate_kv", "warmup", "capture_graphs", "commit_kv", "verify", "serving"}
)

#: Rows that a process prints when its profile is over, or later.
_SIZED: Final = (
    *("L48", "L49", "L50", "L51", "L53", "L54", "L55", "L56", "L57", "L60"),
    *("L71", "L72", "L73", "L75", "L78", "L79", "L84"),
    *("L90", "L92", "L95", "L104", "L105"),
)

#: Rows of a runner, or of a version, that captures nothing before sizing but what L66 announces.
_NO_THROWAWAY: Final = ("L03", "L20", "L28", "L29", "L30", "L31", "L33")

#: Rows that come before sizing in a process that prints its sizing too.
_UNSIZED: Final = ("L09", "L32", "L40", "L41", "L42", "L43", "L44", "L45", "L46", "L47")


def is_sized(heard: Heard) -> bool:
    """Whether the KV cache of this process was sized already."""
    return heard.state in _LATE or any(map(heard.has, _SIZED))


def is_profiling_graphs(heard: Heard) -> bool:
    """Whether the throwaway graphs were announced and neither estimated nor dropped yet."""
    return heard.has("L66") and not (heard.has("L69") or heard.has("L70"))


def capture_state(heard: Heard) -> str:
    """The state that a captured graph belongs to, were this process to capture one now."""
    if is_sized(heard) or heard.has("L74") or heard.state == "teardown":
        return REAL
    if heard.state in ("bootstrap_kv", THROWAWAY) or is_profiling_graphs(heard):
        return THROWAWAY
    if heard.has("L70") or any(map(heard.has, _NO_THROWAWAY)):
        return REAL
    return THROWAWAY if any(map(heard.has, _UNSIZED)) else REAL


def bar_state(heard: Heard) -> str:
    """The same for the V1 runner, which shows nothing of a capture before sizing but between L66 and L70."""
    is_throwaway = heard.state in ("bootstrap_kv", THROWAWAY) or is_profiling_graphs(heard)
    return THROWAWAY if is_throwaway and not is_sized(heard) else REAL


def next_state(heard: Heard) -> str | None:
    """The state in which a process next asks for memory, where the one that it is in is over; None where it is not."""
    if heard.has("L107") or heard.has("ready"):
        return None
    if heard.state == "init_device":
        return "load_weights" if heard.has("L11") else None
    if heard.state == "load_weights":
        return "profile_activations" if heard.has("loaded") or heard.has("L28") else None
    if heard.state == REAL:
        return "verify" if _has_captured(heard) else None
    return "allocate_kv" if heard.state == "size_kv" else None


def _has_captured(heard: Heard) -> bool:
    """Whether the real graphs are all captured; L74 alone may have been said of those that were thrown away."""
    is_one = heard.has("L74") and any(map(heard.has, _NO_THROWAWAY))
    return is_one or heard.has("L104") or heard.has("L105")


def planning_state(heard: Heard) -> str:
    """Where blocks are planned: for the profiling KV cache once the profile run is over, else for the real one."""
    is_bootstrap = heard.state == "bootstrap_kv" or (heard.state == "profile_activations" and heard.has("L47"))
    return "bootstrap_kv" if is_bootstrap and not is_sized(heard) else "size_kv"


def compiling(heard: Heard) -> Step:
    """Where something is compiled."""
    return Step("warmup") if is_sized(heard) else Step("profile_activations", "compile")


def sampling(heard: Heard) -> tuple[str | None, str | None]:
    """State and part in which the sampler runs dry; nothing where nothing shows it."""
    if is_sized(heard):
        return "verify", "sampler_warmup"
    if heard.state in ("load_weights", "profile_activations"):
        return "profile_activations", "sampler"
    return None, None
