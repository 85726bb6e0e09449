"""Weights in and out: Hugging Face checkpoint folders of safetensors files, and random weights. Never a pickle.

A file is read straight into the parameter it belongs to, so loading to a CPU needs no second copy and loading to
another device one staging buffer of `CHUNK_BYTES`. That is why the header (eight bytes of length, then JSON) is read
here: the safetensors library would hand out tensors of its own. Everything is checked before the first weight is read.
Bytes are ints in bytes.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import attrs
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from startup_fsm.engines.reference.model import Decoder
from startup_fsm.engines.reference.shapes import Shape, config_from_shape, read_config
from startup_fsm.errors import StartupError

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total, at least once a tensor."""

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHUNK_BYTES = 64 << 20
"""Most bytes read at once, and the size of the staging buffer."""

_HEADER_LIMIT = 100_000_000
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Old exports of the family carry these; they are derived from the shape and hold nothing of the model.
_DERIVED = ".rotary_emb.inv_freq"


class CheckpointError(StartupError, ValueError):
    """A checkpoint cannot be loaded; `place` is the file, and the tensor where one is to blame."""

    def __init__(self, what: str, *, place: str, hint: str) -> None:
        super().__init__(f"{place}: {what}", hint=hint)
        self.place = place


@attrs.frozen
class Stored:
    """One tensor as a file declares it: where its bytes are, counted from the start of the file."""

    name: str
    file: Path
    dtype: str
    size: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def place(self) -> str:
        """File and tensor, for messages."""
        return f"{self.file}, tensor {self.name!r}"


@attrs.frozen
class Loaded:
    """What a load did. `values` is false where the model is fake: everything was checked and nothing was read."""

    tensors: int
    bytes: int
    values: bool


def checkpoint_shape(folder: Path) -> Shape:
    """The shape in the folder's `config.json`. Raises `CheckpointError` without one, `ShapeError` for a useless one."""
    try:
        return read_config(folder / CONFIG)
    except FileNotFoundError:
        hint = f"give the folder of a Hugging Face checkpoint: {CONFIG} and safetensors files"
        raise CheckpointError(f"no {CONFIG}", place=str(folder), hint=hint) from None


def checkpoint_bytes(folder: Path) -> int:
    """Bytes of all tensors in the folder's files, from their headers. Raises `CheckpointError`."""
    return sum(stored.nbytes for stored in stored_tensors(folder).values())


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the checkpoint by name.

    Raises `CheckpointError` for a missing, truncated or contradicting file.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return {stored.name: stored for stored in _read_header(single)}
    if not index.is_file():
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth"))
        hint = "pickles are never read: convert this checkpoint to safetensors" if pickled else "finish the download"
        raise CheckpointError(f"neither {SINGLE} nor {INDEX}", place=str(folder), hint=hint)
    places = _read_index(index)
    found: dict[str, Stored] = {}
    for file in sorted(set(places.values())):
        if not (folder / file).is_file():
            raise CheckpointError(f"shard {file!r} is missing", place=str(index), hint="fetch this shard again")
        for stored in _read_header(folder / file):
            if stored.name in found:
                where = found[stored.name].file.name
                raise CheckpointError(f"also in {where!r}", place=stored.place, hint="remove the shard of another save")
            found[stored.name] = stored
    for name, file in places.items():
        if name not in found or found[name].file.name != file:
            place = f"{folder / file}, tensor {name!r}"
            raise CheckpointError(f"missing, though {INDEX} promises it", place=place, hint="fetch this shard again")
    return found


def checkpoint_names(model: Decoder) -> dict[str, Tensor]:
    """The Hugging Face name of every tensor of the checkpoint, and the contiguous part of a parameter it fills."""
    shape = model.shape
    names: dict[str, Tensor] = {"model.embed_tokens.weight": model.embedding}
    for index, layer in enumerate(model.blocks()):
        prefix = f"model.layers.{index}."
        names[prefix + "input_layernorm.weight"] = layer.attention_norm
        for kind, fused in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
            if fused is not None:
                queries, one = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
                for name, part in zip("qkv", torch.split(fused, [queries, one, one]), strict=True):
                    names[f"{prefix}self_attn.{name}_proj.{kind}"] = part
        names[prefix + "self_attn.o_proj.weight"] = layer.out
        names[prefix + "post_attention_layernorm.weight"] = layer.mlp_norm
        if layer.router is None:
            gate, up = torch.split(layer.gate_up, shape.mlp)
            names |= {prefix + "mlp.gate_proj.weight": gate, prefix + "mlp.up_proj.weight": up}
            names[prefix + "mlp.down_proj.weight"] = layer.down
        else:
            names[prefix + "block_sparse_moe.gate.weight"] = layer.router
            for expert in range(shape.experts):
                place = f"{prefix}block_sparse_moe.experts.{expert}."
                gate, up = torch.split(layer.gate_up[expert], shape.mlp)
                names |= {place + "w1.weight": gate, place + "w3.weight": up}
                names[place + "w2.weight"] = layer.down[expert]
    names["model.norm.weight"] = model.norm
    if model.head is not None:
        names["lm_head.weight"] = model.head
    return names


def load_checkpoint(model: Decoder, folder: Path, progress: Progress | None = None) -> Loaded:
    """Fills the parameters of `model` from the checkpoint in `folder`, tensor by tensor.

    Raises `CheckpointError` before anything is read where a tensor is missing, unexpected, or of another dtype or size
    than the model's, or a file is not whole. A model of fake tensors is checked all the same, and nothing is read.
    """
    stored = stored_tensors(folder)
    names = checkpoint_names(model)
    _compare(stored, names, model.shape, folder)
    total, done = sum(stored[name].nbytes for name in names), 0
    values = not _is_fake(model.embedding)
    staging = _staging(model.embedding.device) if values else None
    opened: tuple[Path, BinaryIO] | None = None
    try:
        # In the order of the files, so that a disk reads forward.
        for one in sorted((stored[name] for name in names), key=lambda stored: (stored.file, stored.start)):
            if values and (opened is None or opened[0] != one.file):
                if opened is not None:
                    opened[1].close()
                opened = one.file, one.file.open("rb", buffering=0)
            for count in _fill(names[one.name], one, opened[1] if opened else None, staging):
                done += count
                if progress is not None:
                    progress(done, total)
    finally:
        if opened is not None:
            opened[1].close()
    return Loaded(len(names), total, values)


@torch.no_grad()
def random_weights(model: Decoder, seed: int = 0, *, spread: float = 0.02) -> None:
    """Sets every parameter in place: norms to 1, the rest normal with standard deviation `spread`.

    The same seed on the same device gives the same weights.
    """
    generator = torch.Generator(device=model.embedding.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in ("norm", "attention_norm", "mlp_norm"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=spread, generator=generator)


def save_checkpoint(model: Decoder, folder: Path, *, shard_bytes: int | None = None) -> None:
    """Writes the model as a Hugging Face checkpoint folder.

    With `shard_bytes`, in shards of at most that size, or of one tensor where a tensor is larger.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config_from_shape(model.shape), indent=2) + "\n", encoding="utf-8")
    tensors = {name: part.detach().cpu().clone() for name, part in checkpoint_names(model).items()}
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        filled = sum(other.nbytes for other in shards[-1].values())
        if shard_bytes is not None and shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE, metadata={"format": "pt"})
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _is_fake(tensor: Tensor) -> bool:
    # A parameter made from a fake tensor is a fake tensor too; only meta tensors need the second question.
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _staging(device: torch.device) -> Tensor | None:
    if device.type == "cpu":
        return None
    return torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _fill(target: Tensor, stored: Stored, source: BinaryIO | None, staging: Tensor | None) -> Iterator[int]:
    """Reads one tensor in chunks and yields the bytes of each; without a source, yields them all and reads none."""
    if source is None:
        yield stored.nbytes
        return
    flat = target.detach().reshape(-1).view(torch.uint8)
    source.seek(stored.start)
    for start in range(0, stored.nbytes, CHUNK_BYTES):
        count = min(CHUNK_BYTES, stored.nbytes - start)
        into = flat[start : start + count] if staging is None else staging[:count]
        window = memoryview((ctypes.c_ubyte * count).from_address(into.data_ptr())).cast("B")
        filled = 0
        while filled < count:
            got = source.readinto(window[filled:])  # type: ignore[attr-defined]
            if not got:
                raise _truncated(stored.file, f"ends inside tensor {stored.name!r}")
            filled += got
        if staging is not None:
            flat[start : start + count].copy_(into)
        yield count


def _compare(stored: Mapping[str, Stored], names: Mapping[str, Tensor], shape: Shape, folder: Path) -> None:
    """Refuses a checkpoint that is not exactly the model's."""
    for name, target in names.items():
        one = stored.get(name)
        if one is None:
            place = f"{folder}, tensor {name!r}"
            hint = f"the checkpoint is incomplete, or {CONFIG} describes another model"
            raise CheckpointError("missing from the checkpoint", place=place, hint=hint)
        if one.dtype != shape.dtype:
            what = f"dtype {one.dtype}, the model has {shape.dtype}"
            raise CheckpointError(what, place=one.place, hint=f"convert the weights, or set dtype in {CONFIG}")
        if one.size != tuple(target.shape):
            what = f"shape {list(one.size)}, the model has {list(target.shape)}"
            raise CheckpointError(what, place=one.place, hint=f"{CONFIG} and the weights are of different models")
    for name, one in stored.items():
        if name not in names and not name.endswith(_DERIVED):
            tied = name == "lm_head.weight" and shape.tied_embeddings
            hint = f"{CONFIG} describes another model, or the folder has files of two"
            if tied:
                hint = f"{CONFIG} ties the head to the embeddings: set tie_word_embeddings to false if they differ"
            raise CheckpointError("the model has no such tensor", place=one.place, hint=hint)


def _read_index(index: Path) -> dict[str, str]:
    """Shard of each tensor. A shard must be a plain file name: an index must not point out of its folder."""
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        what = f"not an index of shards ({type(error).__name__}: {error})"
        raise CheckpointError(what, place=str(index), hint="fetch the file again") from error
    if not isinstance(places, dict) or not places:
        raise CheckpointError("weight_map names no tensor", place=str(index), hint="fetch the file again")
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file:
            hint = "a shard is named by its plain file name"
            raise CheckpointError(f"shard {file!r} is no file name", place=f"{index}, tensor {name!r}", hint=hint)
    return places


def _truncated(file: Path, what: str) -> CheckpointError:
    return CheckpointError(f"truncated: {what}", place=str(file), hint="fetch the file again")


def _read_header(file: Path) -> list[Stored]:
    """The tensors of one safetensors file, each within the file and of the size its dtype and shape ask for."""
    length = file.stat().st_size
    with file.open("rb") as source:
        header_bytes = int.from_bytes(source.read(8), "little")
        if length < 8 or length < 8 + header_bytes:
            raise _truncated(file, f"{length:,} bytes end inside the header")
        if header_bytes > _HEADER_LIMIT:
            raise CheckpointError("not a safetensors file", place=str(file), hint="fetch the file again")
        raw = source.read(header_bytes)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = [_stored(file, name, entry, 8 + header_bytes) for name, entry in header.items()]
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        what = f"not a safetensors file ({type(error).__name__}: {error})"
        raise CheckpointError(what, place=str(file), hint="fetch the file again") from error
    end = max((one.start + one.nbytes for one in tensors), default=8 + header_bytes)
    if length < end:
        raise _truncated(file, f"{length:,} bytes, its header promises {end:,}")
    if length > end:
        hint = "the file was written twice or joined: fetch it again"
        raise CheckpointError(f"{length - end:,} bytes more than its header promises", place=str(file), hint=hint)
    return tensors


def _stored(file: Path, name: str, entry: Mapping[str, object], data_start: int) -> Stored:
    dtype, size, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(size, list) or not isinstance(offsets, list):
        raise TypeError(f"entry of tensor {name!r}")
    start, end = (int(offset) for offset in offsets)
    sides = tuple(int(side) for side in size)
    one = Stored(name, file, _DTYPES.get(dtype, dtype), sides, data_start + start, end - start)
    item = {"F32": 4, "BF16": 2, "F16": 2}.get(dtype)
    if start < 0 or end < start or (item is not None and math.prod(one.size) * item != one.nbytes):
        what = f"{one.nbytes:,} bytes declared for shape {list(one.size)} of {one.dtype}"
        raise CheckpointError(what, place=one.place, hint="fetch the file again")
    return one
