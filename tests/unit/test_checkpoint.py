"""Checkpoints load into the parameters they belong to, and every fault of a folder has one clear message."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode

from startup_fsm.engines.reference import checkpoint
from startup_fsm.engines.reference.checkpoint import (
    CheckpointError,
    checkpoint_bytes,
    checkpoint_shape,
    load_checkpoint,
    random_weights,
    save_checkpoint,
)
from startup_fsm.engines.reference.model import Decoder
from startup_fsm.engines.reference.shapes import Shape, ShapeError, config_from_shape

PLAIN = Shape(
    name="plain",
    hidden=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp=24,
    vocabulary=32,
    max_positions=64,
    dtype="float32",
)
VARIANTS = {
    "plain": PLAIN,
    "bfloat16": attrs.evolve(PLAIN, dtype="bfloat16"),
    "tied with biases": attrs.evolve(PLAIN, tied_embeddings=True, qkv_bias=True),
    "experts": attrs.evolve(PLAIN, experts=4, top_k=2),
}
QUERY = "model.layers.1.self_attn.q_proj.weight"


def made(shape: Shape, seed: int = 1) -> Decoder:
    model = Decoder(shape)
    random_weights(model, seed)
    return model


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> dict[str, Path]:
    """Folders of the plain shape, whole and in shards."""
    root = tmp_path_factory.mktemp("pristine")
    save_checkpoint(made(PLAIN), root / "whole")
    save_checkpoint(made(PLAIN), root / "sharded", shard_bytes=4096)
    return {"whole": root / "whole", "sharded": root / "sharded"}


@pytest.fixture
def whole(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine["whole"], tmp_path / "model"))


@pytest.fixture
def sharded(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine["sharded"], tmp_path / "model"))


def refusal(folder: Path, shape: Shape = PLAIN) -> CheckpointError:
    """The error of a load; its message is one sentence and a hint, and no weight was touched."""
    model = made(shape, seed=5)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(model, folder)
    sentence, hint = str(caught.value).split("\n")
    assert str(folder) in sentence
    assert hint.startswith("hint: ")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return caught.value


def rewrite(file: Path, change) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize("shape", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("shard_bytes", [None, 4096])
def test_what_was_saved_is_loaded(shape, shard_bytes, tmp_path, monkeypatch):
    """Every parameter comes back bit for bit, whole or in shards, read in pieces smaller than a tensor."""
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 1000)
    model = made(shape)
    save_checkpoint(model, tmp_path, shard_bytes=shard_bytes)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or shard_bytes
    again = Decoder(checkpoint_shape(tmp_path))
    loaded = load_checkpoint(again, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert loaded.values
    assert loaded.bytes == checkpoint_bytes(tmp_path) == shape.weight_bytes


def test_loading_keeps_every_address(whole):
    """Values go into the memory that the parameters have: nothing is allocated a second time."""
    model = Decoder(PLAIN)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    load_checkpoint(model, whole)
    assert before == [parameter.data_ptr() for parameter in model.parameters()]


def test_progress_rises_to_the_total(sharded):
    """Bytes done rise strictly and end at the total."""
    seen: list[tuple[int, int]] = []
    load_checkpoint(Decoder(PLAIN), sharded, lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (PLAIN.weight_bytes, PLAIN.weight_bytes)


def test_fake_parameters_are_checked_and_not_read(whole):
    """With fakes the folder is verified, progress is told, and the result says that no value was read."""
    seen: list[int] = []
    with FakeTensorMode():
        loaded = load_checkpoint(Decoder(PLAIN), whole, lambda done, _: seen.append(done))
    assert not loaded.values
    assert seen[-1] == loaded.bytes == PLAIN.weight_bytes


def test_a_device_with_memory_of_its_own_is_filled_through_staging(whole, monkeypatch):
    """Where the CPU cannot read into a parameter, pieces go through one buffer and arrive the same."""
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(checkpoint, "_staging", lambda _: torch.empty(1000, dtype=torch.uint8))
    model = Decoder(PLAIN)
    load_checkpoint(model, whole)
    assert all(torch.equal(a, b) for a, b in zip(made(PLAIN).parameters(), model.parameters(), strict=True))


def test_no_config(whole):
    """A folder without `config.json` is no checkpoint."""
    (whole / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"model: no config\.json\nhint: "):
        checkpoint_shape(whole)


@pytest.mark.parametrize(("text", "fault"), [("{", "not JSON"), ("[]", "not a JSON object")])
def test_broken_config(whole, text, fault):
    """A configuration that cannot be read is named with its path."""
    (whole / "config.json").write_text(text)
    with pytest.raises(ShapeError, match=f"config.json: {fault}"):
        checkpoint_shape(whole)


def test_no_weights(whole):
    """A folder without weights says what it looked for."""
    (whole / "model.safetensors").unlink()
    assert "neither model.safetensors nor" in str(refusal(whole))


def test_pickles_are_never_read(whole):
    """A pickled checkpoint is refused by name, not opened."""
    (whole / "model.safetensors").unlink()
    (whole / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    assert "pickles are never read" in str(refusal(whole))


def test_missing_shard(sharded):
    """The index and the missing file are named."""
    victim = sorted(sharded.glob("*.safetensors"))[2]
    victim.unlink()
    error = refusal(sharded)
    assert f"shard {victim.name!r} is missing" in str(error)
    assert error.place.endswith("index.json")


def test_missing_tensor(whole):
    """A tensor that the model needs and the checkpoint lacks is named."""
    rewrite(whole / "model.safetensors", lambda tensors: tensors.pop(QUERY))
    error = refusal(whole)
    assert "missing from the checkpoint" in str(error)
    assert QUERY in error.place


def test_tensor_that_the_index_promises_in_vain(sharded):
    """An index that points at a shard without the tensor is named with both."""
    index = sharded / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    rewrite(sharded / files[QUERY], lambda tensors: (tensors.pop(QUERY), tensors.update(other=torch.zeros(1))))
    error = refusal(sharded)
    assert "promises it" in str(error)
    assert error.place.endswith(f"{files[QUERY]}, tensor {QUERY!r}")


def test_tensor_in_two_shards(sharded):
    """A tensor that two shards hold is refused: nobody could say which is right."""
    files = sorted(sharded.glob("*.safetensors"))
    twice = next(iter(load_file(files[0])))
    rewrite(files[1], lambda tensors: tensors.update({twice: torch.zeros(1)}))
    assert f"also in {files[0].name!r}" in str(refusal(sharded))


def test_unexpected_tensor(whole):
    """A tensor that the model has no place for is named."""
    rewrite(whole / "model.safetensors", lambda tensors: tensors.update({"model.extra": torch.zeros(1)}))
    error = refusal(whole)
    assert "the model has no such tensor" in str(error)
    assert "'model.extra'" in error.place


def test_head_beside_tied_embeddings(tmp_path):
    """A head where the configuration says that there is none is refused with that reason."""
    tied = attrs.evolve(PLAIN, tied_embeddings=True)
    save_checkpoint(made(tied), tmp_path)
    rewrite(tmp_path / "model.safetensors", lambda tensors: tensors.update({"lm_head.weight": torch.zeros(32, 16)}))
    assert "tie_word_embeddings" in str(refusal(tmp_path, tied))


def test_derived_frequencies_of_old_exports_are_passed_over(whole):
    """Old exports carry rotary frequencies; they are no weights."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(whole / "model.safetensors", lambda tensors: tensors.update({name: torch.zeros(2)}))
    assert load_checkpoint(Decoder(PLAIN), whole).bytes == PLAIN.weight_bytes


def test_wrong_dtype(whole):
    """The dtype in the file and that of the model are both told."""
    rewrite(whole / "model.safetensors", lambda tensors: tensors.update({QUERY: tensors[QUERY].half()}))
    error = refusal(whole)
    assert "dtype float16, the model has float32" in str(error)
    assert QUERY in error.place


def test_wrong_shape(whole):
    """The shape in the file and that of the model are both told."""
    rewrite(whole / "model.safetensors", lambda tensors: tensors.update({QUERY: tensors[QUERY].reshape(8, 32)}))
    error = refusal(whole)
    assert "shape [8, 32], the model has [16, 16]" in str(error)
    assert QUERY in error.place


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_file(whole, kept):
    """A file cut in its length, its header or its data is called truncated."""
    file = whole / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    error = refusal(whole)
    assert "truncated: " in str(error)
    assert error.place == str(file)


def test_file_cut_while_it_is_read(whole, monkeypatch):
    """A file that shrinks after it was checked is called truncated, with the tensor."""
    file = whole / "model.safetensors"
    headers = checkpoint.stored_tensors(whole)
    monkeypatch.setattr(checkpoint, "stored_tensors", lambda _: headers)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated: ends inside tensor"):
        load_checkpoint(Decoder(PLAIN), whole)


def test_file_with_a_tail(whole):
    """Bytes behind the last tensor are refused."""
    file = whole / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"abc")
    assert "3 bytes more than its header promises" in str(refusal(whole))


def with_header(file: Path, header: bytes, data: bytes = b"") -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize(
    "header",
    [
        b"no json",
        b"[]",
        b"\xff\xfe",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32"}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        b'{"a": {"dtype": 3, "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}',
    ],
)
def test_not_a_safetensors_file(whole, header):
    """A header that is none is called what it is, whatever is wrong with it."""
    with_header(whole / "model.safetensors", header, b"\0" * 4)
    assert "not a safetensors file" in str(refusal(whole))


@pytest.mark.parametrize("offsets", [[0, 8], [4, 0], [-4, 0]])
def test_offsets_that_contradict_the_shape(whole, offsets):
    """Offsets that do not hold the tensor are refused with the tensor's name."""
    header = json.dumps({QUERY: {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    with_header(whole / "model.safetensors", header, b"\0" * 8)
    error = refusal(whole)
    assert "bytes declared for shape [1]" in str(error)
    assert QUERY in error.place


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_broken_index(sharded, text):
    """An index that names no shard is refused with its path."""
    index = sharded / "model.safetensors.index.json"
    index.write_text(text)
    assert refusal(sharded).place == str(index)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", 3])
def test_an_index_cannot_point_out_of_its_folder(sharded, file):
    """A shard is a plain file name; a path is refused before anything is opened."""
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {QUERY: file}}))
    assert "is no file name" in str(refusal(sharded))


def test_a_shape_that_no_family_has_cannot_be_written(tmp_path):
    """Experts with biases have no configuration that could be read back."""
    with pytest.raises(ShapeError, match="experts and qkv_bias"):
        config_from_shape(attrs.evolve(PLAIN, experts=4, top_k=2, qkv_bias=True))
