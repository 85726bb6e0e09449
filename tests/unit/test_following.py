"""The simulated device under torch: storages have blocks, captures are tapes, fakes need no memory."""

from __future__ import annotations

import gc
import threading

import pytest

torch = pytest.importorskip("torch")

from startup_fsm.devices.costs import Costs  # noqa: E402
from startup_fsm.devices.following import FollowingDevice  # noqa: E402
from startup_fsm.devices.operators import sort_scratch  # noqa: E402
from startup_fsm.pages import GIB, MIB, DeviceOutOfMemoryError  # noqa: E402

FORBIDDEN = "operation not permitted when stream is capturing"


@pytest.fixture(params=[torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"], autouse=True)
def without_gradients(request):
    with request.param():
        yield


@pytest.fixture
def device() -> FollowingDevice:
    return FollowingDevice(2 * GIB, costs=Costs.none())


@pytest.fixture
def fakes() -> FollowingDevice:
    return FollowingDevice(8 * GIB, costs=Costs.none(), fake=True)


def allocated(device):
    return device.snapshot().allocated_bytes


class Model(torch.nn.Module):
    """Two layers, a norm, and a cache that is written in place."""

    def __init__(self, width=64):
        super().__init__()
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width, bias=False)
        self.norm = torch.nn.Parameter(torch.ones(width))

    def forward(self, tokens, cache, slots):
        hidden = torch.nn.functional.rms_norm(tokens, (tokens.shape[-1],), self.norm)
        hidden = torch.nn.functional.silu(self.up(hidden))
        first, second = self.down(hidden).chunk(2, -1)
        cache.index_copy_(0, slots, torch.cat([second, first], -1))
        attended = torch.nn.functional.scaled_dot_product_attention(
            tokens.view(1, 1, *tokens.shape), cache[None, None], cache[None, None]
        )
        return attended.view_as(tokens) + hidden.sum(-1, keepdim=True) * 2.0


class TestStorages:
    def test_output(self, device):
        """A storage takes a block when an operation returns it and gives it back with its last tensor."""
        with device.scope():
            made = torch.zeros(1024, 1024)
            assert allocated(device) == 4 * MIB
            view = made[100:].t()
            del made
            assert allocated(device) == 4 * MIB
            del view
            assert allocated(device) == 0

    def test_temporaries(self, device):
        """Temporaries count in the peak: two operands and two results, never three."""
        with device.scope():
            left, right = torch.ones(1024, 1024), torch.ones(1024, 1024)
            device.reset_peaks()
            result = (left + right).mul(3.0).add(1.0)
            assert device.snapshot().allocated_peak_bytes == 16 * MIB
            assert allocated(device) == 12 * MIB
            assert float(result[0, 0]) == 7.0

    def test_in_place(self, device):
        """An operation in place allocates nothing."""
        with device.scope():
            tensor = torch.zeros(1024)
            before = allocated(device)
            tensor.add_(1).mul_(2)
            assert allocated(device) == before

    def test_cycle(self, device):
        """A tensor in a cycle is freed by the collector."""
        with device.scope():
            cycle = [torch.zeros(1024, 1024)]
            cycle.append(cycle)
            del cycle
            assert allocated(device) == 4 * MIB
            gc.collect()
            assert allocated(device) == 0

    def test_outside_scope(self, device):
        """Nothing is followed outside, but what is followed is freed there too."""
        with device.scope():
            tensor = torch.zeros(1024, 1024)
        other = torch.zeros(1024, 1024)
        assert allocated(device) == 4 * MIB
        del tensor
        assert allocated(device) == 0
        assert other.numel() == 1024 * 1024

    def test_nested_scope(self, device):
        """A scope in a scope follows once."""
        with device.scope(), device.scope():
            tensor = torch.zeros(1024, 1024)
        assert allocated(device) == 4 * MIB
        assert tensor.shape == (1024, 1024)

    def test_empty_and_meta(self, device):
        """Tensors without bytes have no block."""
        with device.scope():
            nothing = torch.empty(0), torch.empty(10, device="meta")
        assert allocated(device) == 0
        assert len(nothing) == 2

    def test_resize(self, device):
        """A storage that grows moves to a larger block."""
        with device.scope():
            tensor = torch.zeros(MIB, dtype=torch.uint8)
            tensor.resize_(8 * MIB)
            assert device.snapshot().requested_bytes == 8 * MIB

    def test_address(self, device):
        """A tensor's address is that of its block, plus its offset."""
        with device.scope():
            tensor = torch.zeros(1024)
            assert device.address(tensor[10:]) == device.address(tensor) + 40
        with pytest.raises(ValueError, match="adopt"):
            device.address(torch.zeros(3))

    def test_parts(self, device):
        """In inference mode composite operators are followed by their parts: a product takes a workspace."""
        device.costs = Costs(context_bytes=0, modules_bytes=0, capture_bytes=0)
        weight = torch.ones(64, 64)
        device.adopt(weight)
        with device.scope():
            result = torch.nn.functional.linear(torch.ones(8, 64), weight)
            assert allocated(device) >= 32 * MIB
        assert result.shape == (8, 64)

    def test_fused(self, device):
        """A norm that is one kernel on a GPU takes its result only."""
        with device.scope():
            hidden = torch.ones(1024, 1024)
            device.reset_peaks()
            kernels = device.kernels
            result = torch.nn.functional.rms_norm(hidden, (1024,))
            assert device.kernels == kernels + 1
            assert device.snapshot().allocated_peak_bytes == 8 * MIB
        assert torch.allclose(result, torch.ones(1))


class TestAdopt:
    def test_module(self, device):
        """What a loader read is adopted with its module, once, shared storages once."""
        model = Model()
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        assert device.adopt(model) == nbytes
        assert device.adopt(model, {"again": [model.norm]}) == 0
        assert device.snapshot().requested_bytes == nbytes
        del model
        assert allocated(device) == 0

    def test_unseen(self, device):
        """A storage first seen as an input is adopted and counted as unseen."""
        outside = torch.ones(1024, 1024)
        with device.scope():
            result = outside * 2
        assert device.untracked.unseen_storages == 1
        assert device.untracked.unseen_bytes == 4 * MIB
        assert allocated(device) == 8 * MIB
        assert result.shape == outside.shape

    def test_constant(self, device):
        """A constant made from Python numbers is seen."""
        with device.scope():
            constant = torch.tensor([1.0, 2.0])
            assert device.untracked.unseen_storages == 0
            assert device.snapshot().requested_bytes == 8
        assert constant.shape == (2,)

    def test_other_thread(self, device):
        """Work that autograd does on another thread is followed there and reported."""
        with torch.inference_mode(False), torch.enable_grad(), device.scope():
            weight = torch.ones(64, 64, requires_grad=True)
            loss = (weight * 3).sum()
            worker = threading.Thread(target=loss.backward)
            worker.start()
            worker.join()
            other = torch.ones(8)
        assert weight.grad is not None
        assert other.shape == (8,)
        # A thread that never entered the scope allocates unseen; its result is adopted when it is used.
        with device.scope(), torch.no_grad():
            assert float(weight.grad.sum()) == 3 * 64 * 64
        assert device.untracked.unseen_bytes + device.untracked.thread_bytes >= weight.grad.nbytes

    def test_freed_by_another_thread(self, device):
        """A storage that dies on another thread gives its block back."""
        with device.scope():
            held = [torch.zeros(1024, 1024)]
        worker = threading.Thread(target=held.clear)
        worker.start()
        worker.join()
        assert allocated(device) == 0


class TestOutOfMemory:
    def test_torch_error(self, device):
        """Too large a tensor raises torch's own class with the model's sentence and numbers."""
        with (
            device.scope(),
            pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 3.00 GiB") as caught,
        ):
            torch.empty(3 * GIB, dtype=torch.uint8)
        assert caught.value.tried_bytes == 3 * GIB
        assert caught.value.free_bytes == 2 * GIB
        assert isinstance(caught.value.__cause__, DeviceOutOfMemoryError)
        assert device.category(caught.value) == "oom"
        assert device.out_of_memory(caught.value).tried_bytes == 3 * GIB
        assert allocated(device) == 0

    def test_buffers(self, device):
        """Buffers that do not fit raise too, and those made before are freed."""
        with device.scope(), pytest.raises(torch.OutOfMemoryError):
            device.buffers(3, GIB)
        gc.collect()
        assert allocated(device) == 0


class TestPools:
    def test_buffers(self, device):
        """Zeroed buffers come from the open pool, and the holder test finds their views."""
        pool = device.open_pool("kv")
        with device.scope():
            with pool:
                first, second = device.buffers(2, 4 * MIB)
            outside = torch.zeros(10)
        view = first.view(torch.float32)[5:]
        test = device.holder_test(pool.id)
        assert int(second.sum()) == 0
        assert device.snapshot().pool(pool.id).active_bytes == 8 * MIB
        del first, second
        pool.release()
        assert device.snapshot().pool(pool.id).active_bytes == 4 * MIB
        assert [test(thing) for thing in (view, outside, "text", None)] == [True, False, False, False]

    def test_arena(self, device):
        """Arena tensors take no block, keep their address, and are known to the holder test."""
        arena = device.reserve(count=2, block_bytes=64 * 1024, blocks=64)
        with device.scope():
            keys, values = arena.buffers()
            arena.map_blocks(4)
            cache = keys.view(torch.bfloat16).view(64, -1)
            cache[:4] = 1.0
            total = cache[:4].float().sum()
            assert device.address(keys) == arena.base == keys.data_ptr()
            assert device.address(values) == arena.base + 4 * MIB
        assert float(total) == 4 * 32 * 1024
        assert device.untracked.unseen_storages == 0
        snapshot = device.snapshot()
        assert snapshot.arena_mapped_bytes == 4 * MIB
        assert snapshot.requested_bytes < 8 * 1024 * 1024
        assert device.holder_test(None)(cache)
        assert not device.holder_test(None)(total)
        arena.close()


class TestCapture:
    def make(self, device, rows=4):
        torch.manual_seed(0)
        model = Model()
        device.adopt(model)
        tokens, cache, slots = torch.randn(rows, 64), torch.zeros(8, 64), torch.arange(rows)
        pool = device.open_pool("graphs")
        graph = device.capture(lambda: model(tokens, cache, slots), pool, size=rows)
        return model, tokens, cache, slots, pool, graph

    def test_bitwise(self, device):
        """A replay on new inputs is bitwise the eager result, output and cache, at the same address."""
        with device.scope():
            model, tokens, cache, slots, _, graph = self.make(device)
            address = device.address(graph.output)
            for seed in range(3):
                torch.manual_seed(seed)
                tokens.copy_(torch.randn(4, 64))
                cache.zero_()
                graph.replay()
                replayed, cached = graph.output.clone(), cache.clone()
                cache.zero_()
                assert torch.equal(replayed, model(tokens, cache, slots))
                assert torch.equal(cached, cache)
            assert device.address(graph.output) == address

    def test_outside_scope(self, device):
        """A graph replays outside the scope as well."""
        with device.scope():
            model, tokens, cache, slots, _, graph = self.make(device)
        tokens.fill_(0.5)
        graph.replay()
        replayed = graph.output.clone()
        assert torch.equal(replayed, model(tokens, cache, slots))

    def test_replay_takes_nothing(self, device):
        """A replay allocates nothing."""
        with device.scope():
            *_, graph = kept = self.make(device)
            device.reset_peaks()
            before = device.snapshot()
            graph.replay()
            after = device.snapshot()
        assert (after.allocated_bytes, after.allocated_peak_bytes) == (before.allocated_bytes, before.allocated_bytes)
        assert len(kept) == 6

    def test_nodes(self, device):
        """Nodes are the kernels: views and empty tensors are none."""
        with device.scope():
            x = torch.ones(8, 8)
            pool = device.open_pool("graphs")

            def body():
                out = torch.empty(8, 8)
                torch.mul(x.t(), 2, out=out)
                return out.view(64)[:32] + 1

            graph = device.capture(body, pool, size=8)
            assert graph.nodes == 2
            x.fill_(3)
            graph.replay()
            assert graph.output.unique().tolist() == [7.0]

    def test_only_the_output_lives(self, device):
        """In the pool only the output stays allocated: temporaries are free for the next graph."""
        with device.scope():
            *kept, pool, graph = self.make(device)
            assert device.snapshot().pool(pool.id).requested_bytes == graph.output.nbytes
            test = device.holder_test(pool.id)
            assert test(graph.output)
            graph.reset()
            assert device.snapshot().pool(pool.id).requested_bytes == 0
            pool.release()
            device.settle()
            assert device.snapshot().pool(pool.id) is None
        assert len(kept) == 4

    def test_output_outlives(self, device):
        """An output that somebody keeps holds the pool, and its values stay readable."""
        with device.scope():
            *kept, pool, graph = self.make(device)
            graph.replay()
            output, expected = graph.output, graph.output.clone()
            graph.reset()
            del graph
            pool.release()
            device.settle()
            assert device.snapshot().pool(pool.id).active_bytes == 1024
            assert torch.equal(output, expected)
        assert len(kept) == 4

    def test_does_not_hold(self, device):
        """A graph does not keep its inputs alive; replaying after they are gone is an illegal access."""
        with device.scope():
            model, tokens, cache, slots, _, graph = self.make(device)
            before = allocated(device)
            del cache
            assert allocated(device) == before - 2048
            with pytest.raises(RuntimeError, match="illegal memory access"):
                graph.replay()
        assert tokens.shape[0] == slots.shape[0]
        assert model.norm.shape == (64,)

    def test_constant(self, device):
        """A constant of the body is kept by the graph."""
        with device.scope():
            x = torch.zeros(2)
            pool = device.open_pool("graphs")
            graph = device.capture(lambda: x + torch.tensor([1.0, 2.0]), pool, size=2)
            x.fill_(10)
            graph.replay()
            assert graph.output.tolist() == [11.0, 12.0]

    def test_several_outputs(self, device):
        """Outputs of one operation are all replayed, nested returns are kept as they are."""
        with device.scope():
            x = torch.tensor([3.0, 1.0, 2.0])
            pool = device.open_pool("graphs")
            graph = device.capture(lambda: {"sorted": torch.sort(x), "double": [x * 2]}, pool, size=3)
            x.copy_(torch.tensor([1.0, 9.0, 5.0]))
            graph.replay()
            assert graph.output["sorted"].values.tolist() == [1.0, 5.0, 9.0]
            assert graph.output["sorted"].indices.tolist() == [0, 2, 1]
            assert graph.output["double"][0].tolist() == [2.0, 18.0, 10.0]

    def test_shared_static_buffer(self, device):
        """A graph may use what an earlier graph of the pool returned."""
        with device.scope():
            x = torch.ones(4)
            pool = device.open_pool("graphs")
            first = device.capture(lambda: x * 2, pool, size=4)
            second = device.capture(lambda: first.output + 1, pool, size=4)
            x.fill_(5)
            first.replay()
            second.replay()
            assert second.output.tolist() == [11.0] * 4

    @pytest.mark.parametrize(
        "operation",
        [
            lambda x: x.sum().item(),
            lambda x: x.nonzero(),
            lambda x: x.sum() > 0 or None,
            lambda x: x[x > 0],
            torch.unique,
            lambda x: torch.masked_select(x, x > 0),
            lambda x: torch.equal(x, x),
            lambda x: x.tolist() if x.dim() == 0 else x.max().item(),
        ],
    )
    def test_forbidden(self, device, operation):
        """What copies a value or a size to the host invalidates the capture, and nothing is emptied until the repair."""
        with device.scope():
            x = torch.ones(8)
            pool = device.open_pool("graphs")
            with pytest.raises(RuntimeError, match=FORBIDDEN) as caught:
                device.capture(lambda: operation(x), pool, size=8)
            assert device.category(caught.value) == "capture"
            del caught
            assert len(device.allocator.captures_underway) == 1
            gc.collect()
            assert device.repair(pool).proven
            after = device.open_pool("graphs")
            assert device.capture(lambda: x + 1, after, size=8).output.tolist() == [2.0] * 8

    def test_allowed(self, device):
        """Indexing with numbers is no synchronization."""
        with device.scope():
            x, rows = torch.arange(8.0), torch.tensor([3, 1])
            pool = device.open_pool("graphs")
            graph = device.capture(lambda: x[rows], pool, size=2)
            rows.copy_(torch.tensor([0, 7]))
            graph.replay()
            assert graph.output.tolist() == [0.0, 7.0]

    def test_goes_on_after_the_error(self, device):
        """Once invalidated, every further operation of the capture fails."""
        with device.scope():
            x = torch.ones(8)
            pool = device.open_pool("graphs")

            def body():
                with pytest.raises(RuntimeError, match=FORBIDDEN):
                    x.sum().item()
                return x + 1

            with pytest.raises(RuntimeError, match="due to a previous error during capture"):
                device.capture(body, pool, size=8, warmups=0)


class TestFakes:
    def test_no_memory(self, fakes):
        """A tensor of 4 GiB needs none, and counts."""
        with fakes.scope():
            weight = torch.empty(2 * GIB, dtype=torch.bfloat16).normal_()
            assert allocated(fakes) == 4 * GIB
            with pytest.raises(torch.OutOfMemoryError):
                weight.float()
        assert not fakes.has_values

    def test_same_bytes(self, device, fakes):
        """Fakes and real tensors take the same bytes, pools, peaks and nodes."""
        seen = []
        for each in (device, fakes):
            with each.scope():
                kept = TestCapture().make(each)
                graph = kept[-1]
                graph.replay()
                snapshot = each.snapshot()
                seen.append((snapshot.reserved_bytes, snapshot.allocated_bytes, snapshot.pools, graph.nodes))
                del kept, graph
        assert seen[0] == seen[1]

    def test_forbidden(self, fakes):
        """A forbidden operation is forbidden without values too."""
        with fakes.scope():
            x = torch.ones(8)
            pool = fakes.open_pool("graphs")
            with pytest.raises(RuntimeError, match=FORBIDDEN):
                fakes.capture(lambda: x.sum().item(), pool, size=8, warmups=0)

    def test_inputs_gone(self, fakes):
        """A replay whose inputs are gone fails without values too."""
        with fakes.scope():
            inputs = [torch.ones(8)]
            pool = fakes.open_pool("graphs")
            graph = fakes.capture(lambda: inputs[0] * 2 + 1, pool, size=8)
            graph.replay()
            inputs.clear()
            with pytest.raises(RuntimeError, match="illegal memory access"):
                graph.replay()

    def test_arena(self, fakes):
        """An arena under fakes is a counter with fake buffers."""
        arena = fakes.reserve(count=64, block_bytes=MIB, blocks=100)
        with fakes.scope():
            buffers = arena.buffers()
            buffers[3].view(torch.bfloat16).fill_(1)
            assert fakes.address(buffers[3]) == arena.base + 300 * MIB
        arena.map_blocks(10)
        assert fakes.snapshot().arena_mapped_bytes == 640 * MIB
        assert (allocated(fakes), fakes.untracked.unseen_storages) == (0, 0)
        assert fakes.holder_test(None)(buffers[3])

    def test_buffers(self, fakes):
        """Buffers are fakes of the pool that is open."""
        pool = fakes.open_pool("kv")
        with fakes.scope(), pool:
            kept = fakes.buffers(3, GIB)
        assert fakes.snapshot().pool(pool.id).active_bytes == 3 * GIB
        assert fakes.holder_test(pool.id)(kept[0].view(torch.bfloat16))


class Llama8B:
    """The shape that was measured on an H200: 32 layers, hidden 4096, attention over 256 gathered tokens, bf16."""

    layers, hidden, heads, kv_heads, head, inner, vocabulary, block = 32, 4096, 32, 8, 128, 14336, 128256, 16

    def __init__(self):
        self.weights = [
            [
                self.random((self.heads + 2 * self.kv_heads) * self.head, self.hidden),
                self.random(self.hidden, self.heads * self.head),
                self.random(2 * self.inner, self.hidden),
                self.random(self.hidden, self.inner),
                torch.ones(self.hidden, dtype=torch.bfloat16),
                torch.ones(self.hidden, dtype=torch.bfloat16),
            ]
            for _ in range(self.layers)
        ]
        self.embedding = self.random(self.vocabulary, self.hidden)
        self.output = self.random(self.vocabulary, self.hidden)

    @staticmethod
    def random(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16).normal_(std=0.02)

    def __call__(self, tokens, cache=None, slots=None, table=None):
        # One function, as it was measured: a local name keeps its tensor alive until it is given another.
        functional, rows, heads = torch.nn.functional, tokens.shape[0], (self.heads, self.kv_heads, self.kv_heads)
        x = functional.embedding(tokens, self.embedding)
        for layer, (qkv, out, up, down, before, after) in enumerate(self.weights):
            h = functional.rms_norm(x, (self.hidden,), before)
            both = functional.linear(h, qkv)
            q, k, v = both.split([count * self.head for count in heads], -1)
            if cache is None:
                q, k, v = (part.view(1, rows, -1, self.head).transpose(1, 2) for part in (q, k, v))
                a = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                a = a.transpose(1, 2).reshape(rows, -1)
            else:
                flat_k, flat_v = (cache[layer][place].view(-1, self.kv_heads, self.head) for place in range(2))
                flat_k.index_copy_(0, slots, k.view(rows, self.kv_heads, self.head))
                flat_v.index_copy_(0, slots, v.view(rows, self.kv_heads, self.head))
                keys = cache[layer][0][table].view(rows, 256, self.kv_heads, self.head).transpose(1, 2)
                values = cache[layer][1][table].view(rows, 256, self.kv_heads, self.head).transpose(1, 2)
                q = q.view(rows, self.heads, 1, self.head)
                a = functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True).reshape(rows, -1)
            x = x + functional.linear(a, out)
            h = functional.rms_norm(x, (self.hidden,), after)
            g, u = functional.linear(h, up).chunk(2, -1)
            x = x + functional.linear(functional.silu(g) * u, down)
        return functional.linear(x[-512:], self.output)


class TestAgainstAnH200:
    """A start of the 8B shape with fakes, against the same start on an H200 (torch 2.11, driver 580); all in MiB."""

    def run(self, sizes):
        device = FollowingDevice(150_110_011_392, fake=True)
        seen = {}

        def read(name):
            snapshot = device.snapshot()
            figures = (snapshot.reserved_bytes, snapshot.allocated_bytes, snapshot.outside_bytes)
            seen[name] = tuple(round(nbytes / MIB, 1) for nbytes in figures)

        with device.scope():
            model = Llama8B()
            read("weights")
            logits = model(torch.randint(0, model.vocabulary, (8192,)))
            read("prefill")
            seen["peak"] = round(device.snapshot().allocated_peak_bytes / MIB, 1)
            del logits
            device.settle()
            read("settled")
            shape = (model.layers, 2, 512, model.block, model.kv_heads, model.head)
            cache = torch.zeros(*shape, dtype=torch.bfloat16)
            tokens, slots = torch.zeros(512, dtype=torch.long), torch.arange(512)
            table = torch.zeros(512, 256 // model.block, dtype=torch.long)
            pool = device.open_pool("throwaway")
            graphs = [
                device.capture(lambda n=n: model(tokens[:n], cache, slots[:n], table[:n]), pool, size=n) for n in sizes
            ]
            usage = device.snapshot().pool(pool.id)
            seen["pool"] = (usage.reserved_bytes / MIB, round(usage.active_bytes / MIB, 1))
            read("captured")
            assert len(graphs) == len(sizes)
        assert device.untracked.unseen_storages == 0
        return seen

    def test_profile_and_two_graphs(self):
        """Weights, prefill, its peak, what stays, and the pool of the two largest graphs are as measured."""
        seen = self.run([512, 496])
        assert seen["weights"] == (15_318.0, 15_316.5, 618.8)
        assert seen["prefill"] == (17_110.0, 15_473.8, 692.8)
        assert seen["peak"] == 16_532.6
        assert seen["settled"] == (15_350.0, 15_348.5, 692.8)
        assert seen["pool"] == (1_122.0, 246.6)
        assert seen["captured"][2] == pytest.approx(764.8, abs=4)

    @pytest.mark.slow
    def test_all_graphs(self):
        """The pool of all 51 graphs is as measured, and what the driver took within 4 MiB."""
        seen = self.run(sorted([1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)], reverse=True))
        assert seen["pool"] == (2_926.0, 2_574.3)
        assert seen["captured"][2] == pytest.approx(842.8, abs=4)


class TestSortScratch:
    """Scratch memory of a sort, which no operation shows."""

    def test_rows(self):
        """Many long rows take place, row, and a second buffer of keys and places: 20 bytes a float32."""
        assert sort_scratch(torch.empty(512, 151_936, device="meta")) == 512 * 151_936 * 20

    def test_short(self):
        """One row, or short ones, take nothing that counts."""
        assert sort_scratch(torch.empty(151_936, device="meta")) == 0
        assert sort_scratch(torch.empty(512, 64, device="meta")) == 0

    def test_it_is_in_the_peak(self):
        """It is taken while the sort runs, beside its results, and given back."""
        device = FollowingDevice(4 * GIB, fake=True, costs=Costs.none())
        with device.scope(), torch.no_grad():
            keys = torch.empty(64, 100_000)
            before = device.snapshot()
            device.reset_peaks()
            ordered = keys.sort(dim=-1)
            after = device.snapshot()
            del ordered

        one = 64 * 100_000
        assert after.allocated_bytes - before.allocated_bytes == pytest.approx(12 * one, rel=1e-3)
        assert after.allocated_peak_bytes - before.allocated_bytes == pytest.approx(32 * one, rel=1e-3)
