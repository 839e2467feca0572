"""s, the KV bytes per token, from a model's config.json.

What counts is what one more token adds to the cache, so only layers that keep every token
count: sliding windows, chunked attention, Mamba and linear attention keep a state of constant
size. The figure is that of the whole model, each KV head once, whatever the tensor-parallel
size is (an engine with more ranks than KV heads stores copies besides).

A model type outside `guard.kv_layouts.FAMILIES` is an error that says what to configure
instead: architectures with the same field names can cache very different things.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guard.errors import ModelConfigError
from guard.kv_layers import CONSTANT, FULL, INSTEAD, SLIDING, Fields
from guard.kv_layouts import FAMILIES, KvPart, layer_kinds


@dataclass(frozen=True, slots=True)
class KvBytes:
    """What a token costs in the KV cache, and how that comes about.

    `kv_bytes_per_token` is the sum of `parts`, in bytes. `layers` counts the layers that grow
    with every token, `constant_layers` those that keep a constant state (windows, Mamba,
    linear attention); layers without a cache of their own are in neither. `attention` is
    `mha`, `gqa`, `mqa` or `mla`, `dtype` what the cache stores. `window` is None, or the number
    of tokens beyond which nothing grows any more because *every* layer slides: then the figure
    holds up to there. `notes` say, for a person, what was assumed.
    """

    kv_bytes_per_token: int
    model_type: str
    attention: str
    dtype: str
    layers: int
    constant_layers: int
    parts: tuple[KvPart, ...]
    window: int | None = None
    notes: tuple[str, ...] = ()


def from_file(path: str | Path, cache_dtype: str = "auto", *, draft_layers: int = 0) -> KvBytes:
    """`from_config` of a config.json, or of the model directory that holds one.

    An `hf_quant_config.json` beside it is taken into account as engines do.
    Raises ModelConfigError when there is no such file, when it is no JSON object, and for
    everything that `from_config` raises.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    config = _json_object(path)
    beside = path.with_name("hf_quant_config.json")
    if not isinstance(config.get("quantization_config"), Mapping) and beside.is_file():
        config["quantization_config"] = _json_object(beside)
    try:
        return from_config(config, cache_dtype, draft_layers=draft_layers)
    except ModelConfigError as error:
        raise ModelConfigError(f"{path}: {error}") from None


def from_config(
    config: Mapping[str, Any], cache_dtype: str = "auto", *, draft_layers: int = 0
) -> KvBytes:
    """KV bytes per token of the model that `config`, the content of its config.json, describes.

    `cache_dtype` is the engine's `--kv-cache-dtype`: `auto` (what the checkpoint asks for, else
    the model's own dtype), `bfloat16`, `float16`, `float32`, `int8`, `fp8` and its variants,
    `fp8_ds_mla`. `draft_layers` counts so many layers of speculative decoding (MTP) besides,
    full attention like the model's own; without it they are not counted.
    Raises ModelConfigError for a model whose layout is not known, for a field that is missing
    or makes no sense, and for a cache dtype that is not known. It never guesses.
    """
    if not isinstance(config, Mapping):
        raise ModelConfigError(f"a model's config is a JSON object, got {config!r:.60}; {INSTEAD}")
    if draft_layers < 0:
        raise ModelConfigError(f"draft layers must not be negative, got {draft_layers}")
    text, outer = _text_config(config)
    fields = Fields(text)
    model_type = fields.text("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        raise ModelConfigError(
            f"the KV layout of model_type {model_type!r:.60} is not known to kvguard; {INSTEAD}"
        )
    notes: list[str] = []
    layers = layer_kinds(fields, family, notes)
    dtype, size = _cache_dtype(cache_dtype, [*outer, text], notes)
    shape = family.shape(fields)
    window = None
    full = [index for index, kind in enumerate(layers) if kind == FULL]
    constant = sum(kind in (SLIDING, CONSTANT) for kind in layers)
    if not full:
        full = [index for index, kind in enumerate(layers) if kind == SLIDING]
        if not full:
            raise ModelConfigError(
                f"no layer of this {model_type} model keeps a KV cache that grows; {INSTEAD}"
            )
        window = fields.integer("sliding_window", "attention_chunk_size")
        constant -= len(full)
        notes.append(f"every layer slides: beyond {window} tokens nothing grows any more")
    elif SLIDING in layers:
        notes.append(
            f"{layers.count(SLIDING)} windowed layers are not counted: an engine that runs "
            "without its hybrid KV cache manager caches every token in them too"
        )
    mtp = fields.optional(
        "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", zero=True
    )
    if mtp and not draft_layers:
        notes.append(f"{mtp} speculative (MTP) layers are not counted")
    parts = shape.parts(full, draft_layers, dtype, size, notes)
    return KvBytes(
        kv_bytes_per_token=sum(part.bytes_per_token for part in parts),
        model_type=model_type,
        attention=shape.attention,
        dtype=dtype,
        layers=len(full) + draft_layers,
        constant_layers=constant,
        parts=tuple(parts),
        window=window,
        notes=tuple(notes),
    )


# ---- which part of a config describes the language model -----------------------------------

# Models around a language model that leave its KV cache as it is. Not among them: those
# whose layers also attend to an encoder, such as mllama, whisper or t5.
_WRAPPERS = [
    "aria",
    "aya_vision",
    "cohere2_vision",
    "gemma3",
    "gemma3n",
    "gemma4",
    "glm4v",
    "glm4v_moe",
    "granite4_vision",
    "granite_speech",
    "idefics3",
    "internvl",
    "internvl_chat",
    "interns1",
    "kimi_k25",
    "kimi_vl",
    "llama4",
    "llava",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "mistral3",
    "ovis",
    "paligemma",
    "pixtral",
    "qwen2_5_omni",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen2_audio",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_omni_moe",
    "qwen3_omni_moe_thinker",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
    "ultravox",
    "voxtral",
]
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")


def _text_config(
    config: Mapping[str, Any],
) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """The language model's own part of a config, and what it is wrapped in, from outside."""
    outer: list[Mapping[str, Any]] = []
    while True:
        if config.get("is_encoder_decoder") is True:
            raise ModelConfigError(f"encoder-decoder models are not known to kvguard; {INSTEAD}")
        nested = [key for key in _NESTED if isinstance(config.get(key), Mapping)]
        if not nested:
            return config, outer
        wrapper = config.get("model_type")
        if not isinstance(wrapper, str) or wrapper not in _WRAPPERS:
            raise ModelConfigError(
                f"model_type {wrapper!r:.60} around a {nested[0]} is not known to kvguard; "
                f"{INSTEAD}"
            )
        if len(nested) > 1:
            raise ModelConfigError(f"both {' and '.join(nested)} are given; {INSTEAD}")
        outer.append(config)
        config = config[nested[0]]


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(f"{path}: {error.strerror or error}; {INSTEAD}") from None
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path}: no JSON ({error}); {INSTEAD}") from None
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path}: not a JSON object; {INSTEAD}")
    return value


# ---- cache dtype ----------------------------------------------------------------------------

_DTYPES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "int8": 1,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    # A whole row of a latent cache: 512 fp8 values, 4 float32 scales, 64 bf16 rotary values.
    "fp8_ds_mla": 656,
}
_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "float": "float32",
    "fp32": "float32",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}


def _cache_dtype(asked: str, configs: list[Mapping[str, Any]], notes: list[str]) -> tuple[str, int]:
    if asked.strip().lower() != "auto":
        return _known_dtype(asked, "cache dtype")
    for config in configs:
        quantized = _quantized_cache(config)
        if quantized is not None:
            notes.append(f"the checkpoint asks for a {quantized} KV cache")
            return _known_dtype(quantized, "the checkpoint's KV cache dtype")
    for config in configs:
        own = config.get("dtype") or config.get("torch_dtype")
        if isinstance(own, str) and own != "auto":
            name, size = _known_dtype(own.removeprefix("torch."), "the model's dtype")
            if name == "float32":
                notes.append(
                    "a float32 checkpoint, which engines run in 16 bits unless told not to"
                )
                return "float16", 2
            return name, size
    raise ModelConfigError(
        "the config says neither dtype nor torch_dtype: give --cache-dtype the dtype that the "
        f"engine runs the model in, or {INSTEAD}"
    )


def _known_dtype(name: str, what: str) -> tuple[str, int]:
    key = name.strip().lower()
    key = _ALIASES.get(key, key)
    if key not in _DTYPES:
        raise ModelConfigError(
            f"{what} {name!r:.60} is not one of auto, {', '.join(_DTYPES)}; {INSTEAD}"
        )
    return key, _DTYPES[key]


def _quantized_cache(config: Mapping[str, Any]) -> str | None:
    """The KV cache dtype that a quantized checkpoint brings along, as vLLM resolves `auto`."""
    outer = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(outer, Mapping):
        return None
    inner = outer.get("quantization")
    for part in (outer, inner if isinstance(inner, Mapping) else {}):
        scheme = part.get("kv_cache_scheme")
        if isinstance(scheme, Mapping):
            if scheme.get("num_bits") == 8:
                return "int8" if scheme.get("type") == "int" else "fp8"
            return str(dict(scheme))
        algorithm = part.get("kv_cache_quant_algo")
        if isinstance(algorithm, str) and algorithm:
            return algorithm
    return None
