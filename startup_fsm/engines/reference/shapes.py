"""Shapes of models: every number that decides how many bytes a decoder of the Llama family takes.

Bytes are ints in bytes. This module must not import torch: the command line lists shapes on machines that have none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs

from startup_fsm.errors import StartupError

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number, by the name of its dtype."""

FAMILIES = ("llama", "mistral", "mixtral", "qwen2")
"""Values of `model_type` in a `config.json` that this engine can run."""

_Value = TypeVar("_Value")


class ShapeError(StartupError, ValueError):
    """A shape is impossible, or a `config.json` asks for what this engine does not do; `where` is its file or name."""

    def __init__(self, what: str, *, where: str, hint: str) -> None:
        super().__init__(f"{where}: {what}", hint=hint)
        self.where = where


@attrs.frozen
class RopeScaling:
    """The `llama3` stretch of the rotary frequencies: slow turns by `factor`, fast ones not, a blend between."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_positions: int


@attrs.frozen(kw_only=True)
class Shape:
    """The shape of one decoder. `experts == 0` is a dense MLP, else `top_k` of `experts` are mixed for each token.

    Raises `ShapeError` where the numbers do not fit together.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    max_positions: int
    dtype: str = "bfloat16"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_epsilon: float = 1e-5
    tied_embeddings: bool = False
    qkv_bias: bool = False
    experts: int = 0
    top_k: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuses numbers that cannot be a model."""
        counts = ("hidden", "layers", "heads", "kv_heads", "head_dim", "mlp", "vocabulary", "max_positions")
        for field in counts:
            if getattr(self, field) < 1:
                raise self._wrong(f"{field} is {getattr(self, field)}", f"give {field} a number of at least 1")
        if self.heads % self.kv_heads:
            raise self._wrong(
                f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly",
                "heads must be a multiple of kv_heads",
            )
        if self.head_dim % 2:
            raise self._wrong(f"head_dim {self.head_dim} is odd", "rotary embeddings turn pairs: use an even head_dim")
        if self.dtype not in DTYPE_BYTES:
            raise self._wrong(f"dtype {self.dtype!r} is not supported", f"use one of {', '.join(DTYPE_BYTES)}")
        if self.experts < 0 or not 0 <= self.top_k <= self.experts or (self.experts and not self.top_k):
            raise self._wrong(
                f"top_k {self.top_k} of {self.experts} experts is impossible",
                "set both to 0 for a dense MLP, else 1 <= top_k <= experts",
            )

    def _wrong(self, what: str, hint: str) -> ShapeError:
        return ShapeError(what, where=f"shape {self.name!r}", hint=hint)

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused projection: queries, then keys, then values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def parameters(self) -> int:
        """How many numbers the weights have; tied embeddings count once."""
        attention = self.qkv_rows * self.hidden + self.hidden * self.heads * self.head_dim
        attention += self.qkv_rows if self.qkv_bias else 0
        mlp = 3 * self.mlp * self.hidden * max(1, self.experts) + self.experts * self.hidden
        embeddings = self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)
        return embeddings + self.layers * (attention + mlp + 2 * self.hidden) + self.hidden

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, before any allocator rounds them."""
        return self.parameters * DTYPE_BYTES[self.dtype]

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block of `block_size` tokens over all layers, keys and values together."""
        return 2 * self.layers * block_size * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


_LLAMA3: Mapping[str, Any] = {"vocabulary": 128_256, "max_positions": 8_192, "rope_theta": 500_000.0}

SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        # Small enough for real arithmetic on two CPU cores: 4 million numbers, 16 MiB.
        Shape(
            name="tiny",
            hidden=256,
            layers=4,
            heads=8,
            kv_heads=2,
            head_dim=32,
            mlp=768,
            vocabulary=2_048,
            max_positions=2_048,
            dtype="float32",
        ),
        # Qwen2.5-0.5B.
        Shape(
            name="0.5b",
            hidden=896,
            layers=24,
            heads=14,
            kv_heads=2,
            head_dim=64,
            mlp=4_864,
            vocabulary=151_936,
            max_positions=32_768,
            rope_theta=1_000_000.0,
            rms_epsilon=1e-6,
            tied_embeddings=True,
            qkv_bias=True,
        ),
        # Llama-3-8B.
        Shape(name="8b", hidden=4_096, layers=32, heads=32, kv_heads=8, head_dim=128, mlp=14_336, **_LLAMA3),
        # Llama-3-70B.
        Shape(name="70b", hidden=8_192, layers=80, heads=64, kv_heads=8, head_dim=128, mlp=28_672, **_LLAMA3),
        # Mixtral-8x7B.
        Shape(
            name="moe",
            hidden=4_096,
            layers=32,
            heads=32,
            kv_heads=8,
            head_dim=128,
            mlp=14_336,
            vocabulary=32_000,
            max_positions=32_768,
            rope_theta=1_000_000.0,
            experts=8,
            top_k=2,
        ),
    )
}
"""The shapes with a name, smallest first."""


def named(name: str) -> Shape:
    """The shape called `name`; `ShapeError` lists the names there are."""
    try:
        return SHAPES[name]
    except KeyError:
        raise ShapeError("no shape has this name", where=repr(name), hint=f"use one of {', '.join(SHAPES)}") from None


def read_config(path: Path) -> Shape:
    """The shape that the Hugging Face `config.json` at `path` describes.

    Raises `ShapeError` where the file is not such a JSON object, or asks for what this engine does not do;
    `FileNotFoundError` where there is no file.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ShapeError(f"not JSON: {error}", where=str(path), hint="fetch the file again") from error
    if not isinstance(config, dict):
        raise ShapeError("not a JSON object", where=str(path), hint="this must be a model's config.json")
    return shape_from_config(config, where=str(path))


def shape_from_config(config: Mapping[str, Any], *, where: str = "config.json") -> Shape:
    """The shape that a Hugging Face configuration describes; `where` is its place, for messages.

    Raises `ShapeError` on a missing field, a field of another type, or a feature that would change the result.
    """
    fields = _Fields(config, where)
    family = fields.take("model_type", str)
    if family not in FAMILIES:
        raise fields.wrong(f"model_type {family!r} is not supported", f"use a model of {', '.join(FAMILIES)}")
    fields.refuse_what_changes_results()
    heads = fields.take("num_attention_heads", int)
    hidden = fields.take("hidden_size", int)
    theta, scaling = fields.rope()
    mixture = family == "mixtral"
    return Shape(
        name=Path(where).parent.name or family,
        hidden=hidden,
        layers=fields.take("num_hidden_layers", int),
        heads=heads,
        kv_heads=fields.take("num_key_value_heads", int, heads),
        head_dim=fields.take("head_dim", int, hidden // max(1, heads)),
        mlp=fields.take("intermediate_size", int),
        vocabulary=fields.take("vocab_size", int),
        max_positions=fields.take("max_position_embeddings", int),
        dtype=fields.take("dtype" if config.get("dtype") is not None else "torch_dtype", str),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_epsilon=fields.take("rms_norm_eps", float),
        tied_embeddings=fields.take("tie_word_embeddings", bool, False),
        qkv_bias=family == "qwen2",
        experts=fields.take("num_local_experts", int) if mixture else 0,
        top_k=fields.take("num_experts_per_tok", int) if mixture else 0,
    )


@attrs.frozen
class _Fields:
    """A configuration read field by field, each with its type."""

    config: Mapping[str, Any]
    where: str

    def wrong(self, what: str, hint: str) -> ShapeError:
        return ShapeError(what, where=self.where, hint=hint)

    def take(self, name: str, kind: type[_Value], default: _Value | None = None) -> _Value:
        """The field `name`; null counts as absent, and an int may stand for a float but a bool for nothing else."""
        value = self.config.get(name)
        if value is None:
            if default is None:
                raise self.wrong(f"field {name!r} is missing", f"add {name!r}, as the model's own config.json has it")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.wrong(f"field {name!r} is {value!r}, not of type {kind.__name__}", "correct the field")
        return value

    def refuse_what_changes_results(self) -> None:
        """Refuses features that are not built here and would silently give other logits."""
        activation = self.take("hidden_act", str, "silu")
        if activation != "silu":
            raise self.wrong(f"hidden_act {activation!r} is not supported", "only 'silu' is")
        for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
            if self.take(name, bool, False):
                raise self.wrong(f"{name} is not supported", "use a model without it")
        if self.config.get("quantization_config") is not None:
            raise self.wrong("quantized weights are not supported", "use a checkpoint that is not quantized")
        window, positions = self.config.get("sliding_window"), self.take("max_position_embeddings", int)
        switched_off = self.config.get("use_sliding_window") is False
        if isinstance(window, int) and window < positions and not switched_off:
            raise self.wrong(
                f"a sliding window of {window} tokens is not supported",
                f"lower max_position_embeddings to {window}, where a window and full attention are the same",
            )

    def rope(self) -> tuple[float, RopeScaling | None]:
        """Base and stretch of the rotations, in `rope_parameters` or in the older `rope_theta`, `rope_scaling`."""
        section = "rope_parameters" if self.config.get("rope_parameters") is not None else "rope_scaling"
        values = self.config.get(section)
        if values is None:
            return self.take("rope_theta", float), None
        if not isinstance(values, dict):
            raise self.wrong(f"field {section!r} is {values!r}, not an object", "correct the field")
        inner = _Fields(values, f"{self.where}, {section}")
        theta = inner.take("rope_theta", float) if "rope_theta" in values else self.take("rope_theta", float)
        kind = inner.take("rope_type" if "rope_type" in values else "type", str, "default")
        if kind == "default":
            return theta, None
        if kind != "llama3":
            raise inner.wrong(f"rope type {kind!r} is not supported", "use a model of rope type 'default' or 'llama3'")
        return theta, RopeScaling(
            factor=inner.take("factor", float),
            low_frequency_factor=inner.take("low_freq_factor", float),
            high_frequency_factor=inner.take("high_freq_factor", float),
            original_max_positions=inner.take("original_max_position_embeddings", int),
        )


def config_from_shape(shape: Shape) -> dict[str, Any]:
    """The Hugging Face configuration that `shape_from_config` reads back as `shape` (but for its name).

    Raises `ShapeError` for a mixture of experts with biases, which no supported family has.
    """
    if shape.experts and shape.qkv_bias:
        raise ShapeError("experts and qkv_bias together", where=f"shape {shape.name!r}", hint="drop one of them")
    family = "mixtral" if shape.experts else "qwen2" if shape.qkv_bias else "llama"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": shape.rope_scaling.factor,
            "low_freq_factor": shape.rope_scaling.low_frequency_factor,
            "high_freq_factor": shape.rope_scaling.high_frequency_factor,
            "original_max_position_embeddings": shape.rope_scaling.original_max_positions,
        }
    config: dict[str, Any] = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.max_positions,
        "dtype": shape.dtype,
        "rope_parameters": rope,
        "rms_norm_eps": shape.rms_epsilon,
        "tie_word_embeddings": shape.tied_embeddings,
        "hidden_act": "silu",
    }
    if shape.experts:
        config |= {"num_local_experts": shape.experts, "num_experts_per_tok": shape.top_k}
    return config
