"""The budget again with other settings: the same arithmetic for text logs and for journals of our own."""

from __future__ import annotations

import pytest

from startup_fsm.budget import Knobs
from startup_fsm.events import BudgetTerm
from startup_fsm.logged.start import read_start
from startup_fsm.memory import GIB, MIB
from startup_fsm.testing import counting_start, verdict_of
from startup_fsm.what_if import Sizing, changed, sizing_of_journal, what_if
from tests.unit.logged_starts import Log, gib


def sizing(**more) -> Sizing:
    """72 of 80 GiB requested, 20 charged, 52 left; 1 GiB of graphs comes on top."""
    terms = (
        BudgetTerm(term="weights", bytes=-15 * GIB, source="printed"),
        BudgetTerm(term="activation", bytes=-4 * GIB, source="printed"),
        BudgetTerm(term="graphs", bytes=-GIB, source="estimate"),
    )
    told = {
        "share": 0.9,
        "base_bytes": 80 * GIB,
        "terms": terms,
        "available_bytes": 52 * GIB,
        "reachable_bytes": 79 * GIB,
        "later_bytes": GIB,
        "tokens": 52 * 1024,
        "longest_tokens": 8192,
        "settings": {"max_num_batched_tokens": 8192, "kv_cache_dtype": "auto"},
    }
    return Sizing(**told | more)


class TestSolving:
    def test_at(self):
        """What a share leaves is the share of the base less what is charged."""
        assert sizing().at(0.9) == 52 * GIB
        assert sizing().at(0.5) == 20 * GIB

    def test_interval(self):
        """From what one request needs to what the device has beside the graphs, in thousandths, inwards."""
        found = sizing().interval(8 * GIB)

        assert found == (0.35, 0.975)
        assert sizing().at(0.35) == 8 * GIB
        assert 80 * GIB * 0.976 > 78 * GIB

    def test_digits_are_on_the_safe_side(self):
        """What the printed digits hide is added below and taken off above."""
        found = sizing(resolution_bytes=80 * MIB).interval(8 * GIB)

        assert found == (0.351, 0.974)

    def test_nothing_fits(self):
        """An empty interval says how much is missing."""
        assert sizing().interval(59 * GIB) is None
        assert sizing().missing(59 * GIB) == GIB
        assert sizing().missing(50 * GIB) == 0

    def test_unknown(self):
        """Without the base nothing can be solved, and nothing is guessed."""
        bare = sizing(base_bytes=None, reachable_bytes=None)

        assert bare.lowest(GIB) is None
        assert bare.interval(GIB) is None
        assert bare.leftover(0.5) is None


class TestChanges:
    def test_share(self):
        """Both sides, tokens, and what is left to nobody."""
        found = what_if(sizing(), {"gpu_memory_utilization": 0.5})

        assert (found.before.tokens, found.after.tokens) == (52 * 1024, 20 * 1024)
        assert (found.before.requested_bytes, found.after.requested_bytes) == (72 * GIB, 40 * GIB)
        assert found.after.request_fits is True
        assert found.after.leftover_bytes == 38 * GIB
        assert found.interval == (0.35, 0.975)

    def test_share_beyond_the_device(self):
        """A share that the device cannot honour gives no more than the device has."""
        assert changed(sizing(), {"gpu_memory_utilization": 1.0}).available_bytes == 59 * GIB

    def test_longer_requests(self):
        """The longest request needs what its tokens need."""
        found = what_if(sizing(), {"max_model_len": 65536})

        assert found.after.request_fits is False
        assert found.interval is None
        assert found.missing_bytes == 6 * GIB

    def test_explicit_bytes(self):
        """Explicit KV bytes are what the cache gets, whatever is available."""
        found = what_if(sizing(), {"kv_cache_memory_bytes": 4 * GIB})

        assert found.after.kv_bytes == 4 * GIB
        assert found.after.request_fits is False

    def test_graphs(self):
        """What is reserved for graphs does not come on top any more; without graphs nothing does."""
        more, none = (changed(sizing(), each) for each in ({"graph_estimate": 2 * GIB}, {"enforce_eager": True}))

        assert (more.available_bytes, more.later_bytes) == (51 * GIB, 0)
        assert (none.available_bytes, none.later_bytes) == (53 * GIB, 0)

    def test_tokens_of_a_step(self):
        """The largest step goes by its tokens."""
        found = changed(sizing(), {"max_num_batched_tokens": 2048})

        assert found.available_bytes == 55 * GIB
        assert found.assumed == ("what a step takes goes by its tokens",)

    def test_devices(self):
        """Weights and cache are split; each token then takes half."""
        found = changed(sizing(), {"tensor_parallel_size": 2})

        assert found.available_bytes == round(59.5 * GIB)
        assert found.tokens == pytest.approx(2 * 59.5 * 1024, abs=2)

    def test_number_format(self):
        """Half the bytes of a number hold twice the tokens."""
        assert changed(sizing(), {"kv_cache_dtype": "fp8"}).tokens == 2 * 52 * 1024

    @pytest.mark.parametrize(
        "changes",
        [
            {"gpu_memory_utilization": 0},
            {"gpu_memory_utilization": 1.1},
            {"gpu_memory_utilization": "much"},
            {"kv_cache_memory_bytes": -1},
            {"max_model_len": True},
            {"kv_cache_dtype": "of my own"},
            {"enforce_eager": False},
            {"quantization": "awq"},
            {"chunked_prefill_size": 512},
        ],
    )
    def test_refused(self, changes):
        """What a budget does not tell, and values that are none, are refused by their names."""
        with pytest.raises(ValueError, match=next(iter(changes))):
            what_if(sizing(), changes)


class TestSources:
    def test_of_a_log(self):
        """A log's budget comes back as it was printed, and moves with its share."""
        log = Log(version="0.25.1")
        only = log.process().state("init_device").figures(free_at_start_bytes=gib(139.29), total_bytes=gib(139.8))
        only.figures(requested_bytes=gib(125.82), gpu_memory_utilization=0.9, weights_bytes=gib(15))
        only.figures(engine_activation_bytes=gib(1.78), engine_outside_torch_bytes=gib(0.22))
        only.state("size_kv").figures(kv_available_bytes=gib(108.81), kv_tokens=891392, max_model_len=8192)
        found = read_start(log.sources()).sizing
        assert found is not None
        compared = what_if(found, {"gpu_memory_utilization": 0.95})

        assert compared.before.available_bytes == gib(108.81)
        assert compared.after.available_bytes == pytest.approx(gib(108.81 + 0.05 * 139.8), abs=20 * MIB)
        assert compared.after.tokens == pytest.approx(891392 * 115.8 / 108.81, rel=1e-3)
        assert compared.before.request_fits is True

    def test_of_a_fraction(self):
        """A fraction is a share of what was free before loading."""
        log = Log("sglang", mem_fraction_static=0.8)
        only = log.process().state("load_weights").figures(weights_bytes=gib(20), avail_after_load_bytes=gib(59))
        only.state("allocate_kv").figures(k_bytes=gib(21.6), v_bytes=gib(21.6), kv_tokens=100_000)
        found = read_start(log.sources()).sizing
        assert found is not None
        compared = what_if(found, {"mem_fraction_static": 0.7})

        assert compared.before.available_bytes == 2 * gib(21.6)
        assert compared.after.available_bytes == pytest.approx(gib(0.7 * 79 - 20), abs=2)

    def test_of_a_journal(self):
        """A start of our own: a larger share gives exactly what it says, and the charges stay."""
        boot, engine = counting_start(progress=False, knobs=Knobs(utilization=0.6))
        boot.run(engine)
        found = sizing_of_journal(boot.history)
        assert found is not None
        compared = what_if(found, {"gpu_memory_utilization": 0.7})
        total = boot.history.budgets[-1][1].total_bytes

        assert compared.before.available_bytes == boot.history.budgets[-1][1].available_bytes
        assert compared.after.available_bytes - compared.before.available_bytes == pytest.approx(0.1 * total, abs=2)
        assert compared.after.terms == compared.before.terms

    def test_no_budget(self):
        """A start that came to no budget has none to compare."""
        boot, _ = counting_start(progress=False)

        assert sizing_of_journal(boot.history) is None

    def test_a_request_in_bytes(self):
        """What was asked for is the bytes, whatever the share says that nobody went by."""
        boot, engine = counting_start(total_bytes=64 * GIB, knobs=Knobs(requested_bytes=4 * GIB))
        boot.run(engine)
        found = what_if(sizing_of_journal(boot.history), {})

        assert found.before.requested_bytes == 4 * GIB
        assert found.before.available_bytes == boot.history.budgets[-1][1].available_bytes
        assert "gpu_memory_utilization" not in verdict_of(boot).figures
