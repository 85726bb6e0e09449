"""Engines as data: spellings, bounds, budgets and known faults by version."""

from __future__ import annotations

import re

import pytest

from startup_fsm.dialects import Span, dialect, parse
from startup_fsm.dialects.vllm import VLLM
from startup_fsm.findings import CODES, SETTINGS
from startup_fsm.states import VOCABULARY


class TestVersions:
    @pytest.mark.parametrize(
        ("text", "version"),
        [
            ("0.25.1", (0, 25, 1)),
            ("v0.9.1rc1.dev126+g1234", (0, 9, 1)),
            ("0.6.4.post1", (0, 6, 4)),
            ("0.29", (0, 29, 0)),
            ("main", None),
            ("", None),
            (None, None),
        ],
    )
    def test_parse(self, text, version):
        """Three numbers, whatever follows them; a word is no version."""
        assert parse(text) == version

    def test_bounds(self):
        """The first bound belongs to a span, the last does not."""
        span = Span.of("0.25.1", "0.29.0")

        assert Span.exactly("0.25.1").is_within(span)
        assert Span.exactly("0.28.9").is_within(span)
        assert not Span.exactly("0.29.0").is_within(span)
        assert not Span.exactly("0.25.0").touches(span)
        assert Span.of("0.28.0", None).touches(span)
        assert not Span.of("0.28.0", None).is_within(span)
        assert Span().touches(span)

    def test_two_bounds_together(self):
        """What two sentences tell is what both allow; where they exclude each other the first stands."""
        assert Span.of("0.9.0", None).and_also(Span.of(None, "0.20.0")) == Span.of("0.9.0", "0.20.0")
        assert Span.of("0.30.0", None).and_also(Span.of(None, "0.20.0")) == Span.of("0.30.0", None)


class TestFlags:
    @pytest.mark.parametrize(
        ("engine", "version", "setting", "value", "spelled"),
        [
            ("vllm", "0.25.1", "gpu_memory_utilization", 0.87, "--gpu-memory-utilization 0.870"),
            ("vllm", "0.25.1", "kv_cache_memory_bytes", 1828800984, "--kv-cache-memory 1828800984"),
            ("vllm", "0.9.2", "kv_cache_memory_bytes", 1828800984, None),
            ("vllm", "0.25.1", "max_model_len", 26032, "--max-model-len 26032"),
            ("vllm", "0.25.1", "graph_estimate", 0, "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0"),
            ("vllm", "0.17.1", "graph_estimate", 0, None),
            ("vllm", "0.25.1", "enforce_eager", True, "--enforce-eager"),
            ("vllm", "0.6.3", "cpu_kv_space", 0, "--swap-space 0"),
            ("vllm", "0.25.1", "gpu_memory_utilization", 1.2, None),
            ("vllm", "0.25.1", "max_num_seqs", 0, None),
            ("sglang", "0.5.4", "mem_fraction_static", 0.8, "--mem-fraction-static 0.800"),
            ("sglang", "0.5.4", "capture_sizes", 16, "--cuda-graph-max-bs 16"),
            ("sglang", "0.5.4", "enforce_eager", None, "--disable-cuda-graph"),
            ("sglang", "0.5.4", "gpu_memory_utilization", 0.8, None),
            ("vllm-ascend", "0.13.0", "gpu_memory_utilization", 0.7, "--gpu-memory-utilization 0.700"),
            ("vllm-ascend", "0.13.0", "graph_estimate", 0, None),
            ("of nobody", None, "gpu_memory_utilization", 0.7, None),
        ],
    )
    def test_spelling(self, engine, version, setting, value, spelled):
        """A setting in the engine's words, where the version has it and takes the value."""
        assert dialect(engine, version).write(setting, value) == spelled

    @pytest.mark.parametrize("engine", ["vllm", "vllm-ascend", "sglang"])
    def test_settings_are_ours(self, engine):
        """Every flag belongs to a setting of the list."""
        assert set(dialect(engine).flags) <= set(SETTINGS)


class TestReserving:
    @pytest.mark.parametrize(
        ("version", "runner", "how"),
        [
            ("0.6.3", None, "no"),
            ("0.10.2", "V0", "no"),
            ("0.17.1", None, "no"),
            ("0.18.1", None, "opt_in"),
            ("0.19.1", None, "opt_in"),
            ("0.20.2", None, "yes"),
            ("0.25.1", "V1", "yes"),
            ("0.25.1", None, "no"),
            ("0.28.0", "V2", "no"),
            ("0.29.0", None, "yes"),
            (None, "V0", "no"),
            (None, "V1", None),
            (None, None, None),
        ],
    )
    def test_vllm(self, version, runner, how):
        """V0 never, V1 from 0.18 on if asked and from 0.20 on by itself, V2 from 0.29 on."""
        assert dialect("vllm", version).reserves(runner) == how

    def test_charges(self):
        """0.27.1 sums what was consumed and no longer names its terms."""
        assert "engine_outside_torch_bytes" in dialect("vllm", "0.26.0").charges
        assert dialect("vllm", "0.27.1").charges == ("weights_and_non_torch_bytes", "engine_activation_bytes")


class TestKnownFaults:
    def test_range(self):
        """A fault is named in the versions that have it only."""
        named = {version: _references(version) for version in ("0.25.0", "0.25.1", "0.28.0", "0.29.0", None)}

        assert "F01" in named["0.25.1"]
        assert "F01" in named["0.28.0"]
        assert "F01" not in named["0.25.0"] | named["0.29.0"] | named[None]

    @pytest.mark.parametrize("fault", VLLM.known + dialect("sglang").known, ids=lambda fault: fault.issue)
    def test_words(self, fault):
        """Codes, states and settings are those of the lists; words are in lower case; the issue can be found."""
        assert fault.codes <= set(CODES)
        assert fault.states <= set(VOCABULARY)
        assert {cure.setting for cure in fault.cures} <= set(SETTINGS)
        assert all(word == word.lower() for word in fault.words)
        assert re.fullmatch(r"[\w-]+#\d+(, [\w-]+#\d+)*", fault.issue)
        assert fault.sentence.startswith("known fault (")

    def test_patterns_are_linear(self):
        """No wording repeats what repeats: a message of 100,000 characters is searched in no time."""
        long = "a" * 100_000
        assert not any(re.search(wording.pattern, long) for wording in VLLM.wordings)


def _references(version):
    return {fault.reference for fault in dialect("vllm", version).faults(["graphs.not_reserved"])}
