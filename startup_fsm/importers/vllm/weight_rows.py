"""Weights, the draft model's too (L20 to L39)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from startup_fsm.importers.facts import Fact, Heard, Row, Sign, Step
from startup_fsm.importers.vllm.wording import NUMBER, amount, figures_of, phrase, say

_BEGIN: Final = Step("load_weights", moment="begins")
_IN: Final = Step("load_weights")
_DRAFT: Final = Step("load_weights", "draft_worker_init")
_END: Final = Step("load_weights", moment="ends")

#: ``4.3752 GB`` or ``15.0 GiB memory``; the draft is counted from V1 on.
_TOOK: Final = rf"Model loading took {amount('weights_bytes')}"
_SECONDS: Final = rf"{NUMBER} sec"


def _took(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    """V0 loads a draft model after the model and measures each apart: what counts is the model's alone."""
    yield _END
    if heard.has("L28") and heard.has("drafts"):
        return
    figures = tuple(figures_of(found))
    yield from figures
    if all(figure.value == 0 for figure in figures):
        yield Sign("weights_not_measured")


ROWS: Final = (
    phrase("L20", "Starting to load model ", say(_BEGIN)),
    phrase("L20b", "Loading model from scratch...", say(_IN)),
    Row("L21", "checkpoint shards:", r"oading [\w ]{0,60}checkpoint shards:", say(_IN)),
    Row("L21", "Multi-thread loading ", r"Multi-thread loading [\w ]{0,20}shards:", say(_IN)),
    Row("L21", "Loading safetensors using ", r"Loading safetensors using [\w ]{1,60}:", say(_IN)),
    phrase("L22", "Time spent downloading weights for ", say(_IN)),
    phrase("L23", "Filesystem type for checkpoints: ", say(_IN)),
    Row("L24", "Loading weights took ", rf"Loading weights took {_SECONDS}", say(_IN)),
    phrase("L25", "Loading drafter model", say(_DRAFT)),
    phrase("L26", "Peak GPU memory after loading weights: ", say(_IN)),
    Row("L27", " of checkpoint page cache in ", rf"Released {NUMBER} GiB of checkpoint page cache", say(_IN)),
    phrase("drafts", "Configuring SpecDecodeWorker", say()),
    Row("L28", "Loading model weights took ", rf"Loading model weights took {amount('weights_bytes')}", _took),
    Row("L29", "Model loading took ", rf"Model loading took {NUMBER} GB and {_SECONDS}", say()),
    Row("L30", "Model loading took ", rf"Model loading took -?\d{{1,9}}\.\d{{4}} GiB and {_SECONDS}", say()),
    Row("L31", "Model loading took ", rf"Model loading took -?\d{{1,9}}\.\d{{4}} GiB memory and {_SECONDS}", say()),
    Row(
        "L32",
        "Model loading took ",
        rf"Model loading took -?\d{{1,9}}(?:\.\d{{1,2}})? GiB memory and {_SECONDS}",
        say(),
    ),
    Row("L33", "Model loading took ", rf"Model loading took -?\d{{1,9}}(?:\.\d{{1,2}})? GiB and {_SECONDS}", say()),
    Row("loaded", "Model loading took ", _TOOK, say(_END)),
    Row("L34", " as part of model loading took ", r"quantization as part of model loading took ", say(_IN)),
    Row("L34", "Initializing model took ", rf"Initializing model took {_SECONDS}", say(_IN)),
    Row("L35", "Weight cache ", r"Weight cache \S{1,60} daemon rank \d{1,6} loaded model", say(_IN)),
    phrase("L36", "of cached device memory under memory pressure", say(_IN, Sign("unified_memory"))),
    phrase("L37", "Failed to load model - not enough GPU memory", say(_IN, Sign("loader_failed_oom"))),
    phrase("L38", "[PrefetchOffloader] Initialized ", say(_IN)),
    Row("L39", "from cumem allocator", r"Allocated \d{1,20} bytes for .{1,80} from cumem allocator", say()),
)
