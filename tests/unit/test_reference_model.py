"""The reference engine computes what transformers computes, from prompts and step by step."""

from __future__ import annotations

import random
import subprocess
import sys

import attrs
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from startup_fsm.engines.reference.checkpoint import checkpoint_shape, load_checkpoint, random_weights
from startup_fsm.engines.reference.generate import generate
from startup_fsm.engines.reference.model import Decoder
from startup_fsm.engines.reference.paging import BlockAllocator, DecodeInputs, KVCache, OutOfBlocks, blocks_for
from startup_fsm.engines.reference.sampler import Sampling
from startup_fsm.engines.reference.shapes import SHAPES, Shape, ShapeError, config_from_shape, named, shape_from_config

BLOCK = 4
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
STRETCH = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "grouped": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "every head its own keys": lambda: LlamaForCausalLM(LlamaConfig(**SMALL | {"num_key_value_heads": 4})),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "wide heads": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, head_dim=24)),
    "llama3 rope": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=STRETCH)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2)),
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory) -> tuple[PreTrainedModel, Decoder]:
    """A transformers model, and ours loaded from the checkpoint that it wrote."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(7)
    theirs = MODELS[request.param]().eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.normal_(mean=1.0, std=0.3)
    theirs.save_pretrained(folder)
    ours = Decoder(checkpoint_shape(folder))
    load_checkpoint(ours, folder)
    return theirs, ours


def theirs_logits(theirs: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return theirs(torch.tensor([tokens])).logits[0]


def words(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 96), k=count)


def prefill(model: Decoder, prompts: list[list[int]], **more) -> torch.Tensor:
    spans, tokens, positions = [], [], []
    for prompt in prompts:
        spans.append((len(tokens), len(tokens) + len(prompt)))
        tokens += prompt
        positions += range(len(prompt))
    return model.prefill(torch.tensor(tokens), torch.tensor(positions), spans, **more)


def stepwise(model: Decoder, sequences: list[list[int]], tables: list[list[int]], rows: int) -> list[torch.Tensor]:
    """Logits after every token of every sequence, decoded from nothing, all rows at once."""
    kv = KVCache.allocate(model.shape, 40, BLOCK)
    inputs = DecodeInputs.allocate(rows, 8)
    logits = [[] for _ in sequences]
    for place in range(max(map(len, sequences))):
        alive = [i for i, sequence in enumerate(sequences) if place < len(sequence)]
        inputs.fill([sequences[i][place] for i in alive], [place + 1] * len(alive), [tables[i] for i in alive], BLOCK)
        for row, i in zip(model.decode(inputs, kv), alive, strict=False):
            logits[i].append(row)
    return [torch.stack(rows) for rows in logits]


def test_prefill_equals_transformers(pair):
    """Logits of every token of packed prompts are transformers' logits of each prompt alone."""
    theirs, ours = pair
    prompts = [words(21, 1), words(1, 2), words(9, 3)]
    logits = prefill(ours, prompts, rows=torch.arange(31))
    expected = torch.cat([theirs_logits(theirs, prompt) for prompt in prompts])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_prefill_gives_the_last_rows_by_default(pair):
    """Without `rows`, one row of logits a prompt: the one that chooses its next token."""
    _, ours = pair
    prompts = [words(5, 1), words(3, 2)]
    everything = prefill(ours, prompts, rows=torch.arange(8))
    torch.testing.assert_close(prefill(ours, prompts), everything[[4, 7]], atol=1e-5, rtol=1e-5)


def test_paged_decode_equals_transformers(pair):
    """Token by token through scattered, interleaved blocks, in a padded batch, the logits are transformers'."""
    theirs, ours = pair
    sequences = [words(18, 4), words(11, 5), words(1, 6)]
    blocks = random.Random(8).sample(range(1, 40), 11)
    tables = [blocks[:5], blocks[5:8], blocks[8:9]]
    for logits, sequence in zip(stepwise(ours, sequences, tables, rows=5), sequences, strict=True):
        torch.testing.assert_close(logits, theirs_logits(theirs, sequence), atol=1e-4, rtol=1e-4)


def test_decode_continues_a_prefill(pair):
    """Keys and values that a prefill wrote serve the steps that follow it."""
    theirs, ours = pair
    tokens, read = words(14, 9), 10
    kv, inputs = KVCache.allocate(ours.shape, 8, BLOCK), DecodeInputs.allocate(1, 4)
    table = [5, 2, 7, 3]
    slots = torch.tensor([table[i // BLOCK] * BLOCK + i % BLOCK for i in range(read)])
    rows = [prefill(ours, [tokens[:read]], kv=kv, slots=slots)]
    for place in range(read, len(tokens)):
        inputs.fill([tokens[place]], [place + 1], [table], BLOCK)
        rows.append(ours.decode(inputs, kv))
    expected = theirs_logits(theirs, tokens)[read - 1 :]
    torch.testing.assert_close(torch.cat(rows), expected, atol=1e-4, rtol=1e-4)


def test_order_of_blocks_does_not_matter(pair):
    """The same sequences in other blocks give the same logits, bit for bit."""
    _, ours = pair
    sequences = [words(12, 4), words(7, 5)]
    one = stepwise(ours, sequences, [[1, 2, 3], [4, 5]], rows=2)
    other = stepwise(ours, sequences, [[31, 7, 19], [2, 30]], rows=2)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_greedy_generation_equals_transformers(pair):
    """Greedy tokens of several prompts, more of them than rows, are those of transformers' generate."""
    theirs, ours = pair
    prompts = [words(length, length) for length in (7, 1, 12, 5)]
    kv, inputs = KVCache.allocate(ours.shape, 14, BLOCK), DecodeInputs.allocate(2, 6)
    answers = generate(ours, kv, inputs, prompts, max_new_tokens=8)
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            whole = theirs.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=8,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert answer == whole[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def small() -> Decoder:
    """A model of our own with random weights."""
    shape = Shape(
        name="small",
        hidden=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        mlp=48,
        vocabulary=96,
        max_positions=64,
        dtype="float32",
    )
    model = Decoder(shape)
    random_weights(model, seed=3, spread=0.3)
    return model


def test_padded_replays_give_the_same_tokens(small):
    """Batches padded up to the next captured size choose the tokens that unpadded ones choose."""
    prompts = [words(length, length) for length in (3, 9, 4, 6, 2)]
    kv, inputs = KVCache.allocate(small.shape, 40, BLOCK), DecodeInputs.allocate(5, 6)
    used = []

    def replay(size: int) -> torch.Tensor:
        used.append(size)
        return small.decode(inputs.rows(size), kv)

    eager = generate(small, kv, inputs, prompts, max_new_tokens=6)
    replays = {size: lambda size=size: replay(size) for size in (1, 4)}
    assert generate(small, kv, inputs, prompts, max_new_tokens=6, replays=replays) == eager
    assert generate(small, kv, inputs, prompts[:3], max_new_tokens=6, replays=replays) == eager[:3]
    assert set(used) == {4}


def test_sampled_generation_is_deterministic(small):
    """The same seed gives the same tokens, another seed others."""
    kv, inputs = KVCache.allocate(small.shape, 20, BLOCK), DecodeInputs.allocate(3, 6)

    def tokens(seed: int) -> list[list[int]]:
        sampling = Sampling(temperature=1.0, top_k=40, top_p=0.95, seed=seed)
        return generate(small, kv, inputs, [words(4), words(6)], max_new_tokens=10, sampling=sampling)

    assert tokens(1) == tokens(1) != tokens(2)


def test_generation_stops_at_an_end_token_and_frees_its_blocks(small):
    """An end token ends its request, is part of the answer, and every block comes back."""
    kv, inputs = KVCache.allocate(small.shape, 20, BLOCK), DecodeInputs.allocate(3, 6)
    allocator = BlockAllocator(20)
    [free] = generate(small, kv, inputs, [words(4)], max_new_tokens=10, allocator=allocator)
    end = free[3]
    [short] = generate(
        small, kv, inputs, [words(4)], max_new_tokens=10, end_tokens=[end], allocator=allocator, max_batch_tokens=4
    )
    assert short == free[: free.index(end) + 1]
    assert allocator.free == 19


@pytest.mark.parametrize(
    ("prompt", "fault"),
    [([], "no tokens"), (words(20), "a request has 24"), (words(9), "a step reads 8"), (words(16), "KV blocks")],
)
def test_a_prompt_that_can_never_run_is_refused(small, prompt, fault):
    """A prompt that would wait for ever is named, with the number that stands in its way."""
    kv, inputs = KVCache.allocate(small.shape, 6, BLOCK), DecodeInputs.allocate(3, 6)
    with pytest.raises(ValueError, match=f"prompt 1: .*{fault}(.|\n)*hint: "):
        generate(small, kv, inputs, [words(2), prompt], max_new_tokens=8, max_batch_tokens=8)


def test_decode_keeps_its_addresses_and_touches_nothing_else(small):
    """A step writes its own slots and block 0, and leaves every other block as it was."""
    kv, inputs = KVCache.allocate(small.shape, 10, BLOCK), DecodeInputs.allocate(4, 3)
    before = [buffer.data_ptr() for buffer in (*kv.keys, inputs.tokens, inputs.tables)]
    inputs.fill([5, 6], [6, 3], [[2, 4], [7]], BLOCK)
    small.decode(inputs, kv)
    assert before == [buffer.data_ptr() for buffer in (*kv.keys, inputs.tokens, inputs.tables)]
    written = kv.keys[1].flatten(0, 1).abs().sum(dim=(1, 2)).nonzero().flatten().tolist()
    assert written == [0, 4 * BLOCK + 1, 7 * BLOCK + 2]


def test_stale_blocks_do_not_leak_into_a_sequence(small):
    """What lies in a table behind the context changes nothing."""
    sequence = words(6)
    clean = stepwise(small, [sequence], [[1, 2]], rows=1)[0]
    kv, inputs = KVCache.allocate(small.shape, 10, BLOCK), DecodeInputs.allocate(1, 8)
    for buffer in (*kv.keys, *kv.values):
        buffer.fill_(1e4)
    for place, token in enumerate(sequence):
        inputs.fill([token], [place + 1], [[1, 2]], BLOCK)
        torch.testing.assert_close(small.decode(inputs, kv)[0], clean[place])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_runs_in_both_modes_without_gradients(small, mode):
    """No mode is needed and both may be on; nothing asks for gradients."""
    with mode():
        kv, inputs = KVCache.allocate(small.shape, 4, BLOCK), DecodeInputs.allocate(1, 2)
        assert not small.decode(inputs, kv).requires_grad
    kv, inputs = KVCache.allocate(small.shape, 4, BLOCK), DecodeInputs.allocate(1, 2)
    assert not small.decode(inputs, kv).requires_grad


@pytest.mark.parametrize("name", ["70b", "moe"])
def test_fake_tensors_run_any_shape(name):
    """With fakes a shape of any size is built, prefilled and decoded, with the bytes that the shape promises."""
    shape = attrs.evolve(named(name), layers=2)
    with FakeTensorMode():
        model = Decoder(shape)
        random_weights(model)
        assert sum(parameter.nbytes for parameter in model.parameters()) == shape.weight_bytes
        kv, inputs = KVCache.allocate(shape, 64, 16), DecodeInputs.allocate(8, 16)
        assert sum(buffer.nbytes for buffer in (*kv.keys, *kv.values)) == 64 * shape.kv_block_bytes(16)
        tokens = torch.zeros(512, dtype=torch.int64)
        assert model.prefill(tokens, tokens, [(0, 300), (300, 512)]).shape == (2, shape.vocabulary)
        assert model.decode(inputs.rows(4), kv).shape == (4, shape.vocabulary)


def test_random_weights_are_deterministic(small):
    """The same seed gives the same weights."""
    again = Decoder(small.shape)
    random_weights(again, seed=3, spread=0.3)
    assert all(torch.equal(a, b) for a, b in zip(small.parameters(), again.parameters(), strict=True))


def test_fill_refuses_what_does_not_fit():
    """Too many sequences, and tables that do not cover their tokens or are too wide, are refused."""
    inputs = DecodeInputs.allocate(1, 2)
    for tokens, lengths, tables in (([1, 2], [1, 1], [[1], [2]]), ([1], [5], [[1]]), ([1], [1], [[1, 2, 3]])):
        with pytest.raises(ValueError, match="hint: "):
            inputs.fill(tokens, lengths, tables, BLOCK)


def test_block_allocator_never_gives_out_the_padding_block():
    """Every block but 0 is given once; asking for more takes none; giving back twice is an error."""
    allocator = BlockAllocator(5)
    taken = allocator.take(4)
    assert sorted(taken) == [1, 2, 3, 4]
    with pytest.raises(OutOfBlocks, match="1 blocks wanted, 0 free") as caught:
        allocator.take(1)
    assert (caught.value.wanted, caught.value.free) == (1, 0)
    allocator.give_back(taken[:2])
    assert allocator.free == 2
    for block in (taken[0], 0, 5):
        with pytest.raises(ValueError, match="not taken"):
            allocator.give_back([block])
    assert blocks_for(8, 4) == 2
    assert blocks_for(9, 4) == 3


def test_named_shapes_have_the_published_sizes():
    """Llama-3-8B, Llama-3-70B, Mixtral-8x7B and Qwen2.5-0.5B have the numbers of parameters that their cards say."""
    sizes = {name: shape.parameters for name, shape in SHAPES.items()}
    assert sizes["8b"] == 8_030_261_248
    assert sizes["70b"] == 70_553_706_496
    assert sizes["moe"] == 46_702_792_704
    assert sizes["0.5b"] == 494_032_768
    assert named("8b").weight_bytes == 2 * sizes["8b"]
    assert named("8b").kv_block_bytes(16) == 2 << 20
    with pytest.raises(ShapeError, match="'9b': no shape has this name\nhint: use one of tiny"):
        named("9b")


def test_shapes_need_no_torch():
    """Shapes can be listed on a machine that has no torch."""
    code = "import sys; from startup_fsm.engines.reference import shapes; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_shape_survives_its_configuration(shape):
    """A shape written as a Hugging Face configuration reads back the same."""
    again = shape_from_config(config_from_shape(shape))
    assert attrs.evolve(again, name=shape.name) == shape


def test_older_configurations_are_read():
    """The fields of older releases (`torch_dtype`, `rope_theta`, `rope_scaling`) mean the same."""
    new = config_from_shape(named("8b")) | {"rope_parameters": STRETCH}
    old = {key: value for key, value in new.items() if key not in ("dtype", "rope_parameters")}
    scaling = {"type" if key == "rope_type" else key: value for key, value in STRETCH.items() if key != "rope_theta"}
    old |= {"torch_dtype": "bfloat16", "rope_theta": 10_000, "rope_scaling": scaling}
    assert shape_from_config(old) == shape_from_config(new)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"hidden_size": None}, "field 'hidden_size' is missing"),
        ({"hidden_size": "4096"}, "field 'hidden_size' is '4096', not of type int"),
        ({"num_hidden_layers": True}, "is True, not of type int"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"quantization_config": {}}, "quantized"),
        ({"sliding_window": 64}, "sliding window of 64"),
        ({"dtype": "float8"}, "dtype 'float8'"),
        ({"num_key_value_heads": 5}, "32 heads cannot share 5 KV heads"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"vocab_size": 0}, "vocabulary is 0"),
        ({"rope_parameters": 3}, "'rope_parameters' is 3, not an object"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "rope_parameters: field 'factor' is missing"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "top_k 3 of 2"),
    ],
)
def test_a_configuration_that_cannot_run_is_refused(change, fault):
    """Each fault is named with its place, and with a hint."""
    with pytest.raises(ShapeError) as caught:
        shape_from_config(config_from_shape(named("8b")) | change)
    assert fault in str(caught.value)
    assert "\nhint: " in str(caught.value)


def test_a_window_that_is_switched_off_is_no_window():
    """Qwen2's configuration has a window and the switch that disables it."""
    config = config_from_shape(named("0.5b")) | {"sliding_window": 1024, "use_sliding_window": False}
    assert shape_from_config(config).qkv_bias
