"""How model families lay out their KV cache, as data: which layers grow, and by what.

Each row of `FAMILIES` says for some model types which rule tells the growing layers and what
such a layer keeps of a token. Sources: vLLM's models and KV cache specifications, and the
models' configuration classes in transformers, whose documented defaults are used only where
released config.json files rely on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from guard.errors import ModelConfigError
from guard.kv_layers import (
    CONSTANT,
    FULL,
    INSTEAD,
    NOTHING,
    SLIDING,
    Fields,
    LayerRule,
    by_name,
    chunked,
    every_layer,
    flagged,
    full_every,
    jamba,
    linear_between,
    listed,
    missing,
    nemotron_h,
    window_if_named,
    window_if_set,
    window_if_used,
    window_stated,
)


@dataclass(frozen=True, slots=True)
class KvPart:
    """One kind of data that the cache keeps of every token, in bytes."""

    name: str
    layers: int
    bytes_per_layer: int

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.bytes_per_layer


@dataclass(frozen=True, slots=True)
class Heads:
    """Keys and values of every KV head. Of a full-attention layer, where layers differ."""

    attention: str
    kv_heads: int
    key_dim: int
    value_dim: int

    def parts(
        self, layers: list[int], draft: int, dtype: str, size: int, notes: list[str]
    ) -> list[KvPart]:
        if dtype == "fp8_ds_mla":
            raise ModelConfigError("fp8_ds_mla is a layout of MLA models only")
        parts = []
        for name, count in (("", len(layers)), ("draft_", draft)):
            if count:
                parts.append(KvPart(f"{name}keys", count, self.kv_heads * self.key_dim * size))
                parts.append(KvPart(f"{name}values", count, self.kv_heads * self.value_dim * size))
        return parts


@dataclass(frozen=True, slots=True)
class Latent:
    """MLA: one latent vector for all heads and its rotary part; with sparse attention also
    the indexer's key (fp8, with a float32 scale for every 128 values) on `indexed` layers."""

    rank: int
    rope_dim: int
    index_dim: int | None
    indexed: frozenset[int] | None
    attention: str = "mla"

    def parts(
        self, layers: list[int], draft: int, dtype: str, size: int, notes: list[str]
    ) -> list[KvPart]:
        if dtype == "fp8_ds_mla" and (self.rank, self.rope_dim) != (512, 64):
            raise ModelConfigError(
                f"fp8_ds_mla is laid out for a latent of 512 + 64, not {self.rank} + "
                f"{self.rope_dim}; {INSTEAD}"
            )
        parts = []
        for name, count in (("", len(layers)), ("draft_", draft)):
            if not count:
                continue
            if dtype == "fp8_ds_mla":
                parts.append(KvPart(f"{name}latent", count, size))
            else:
                parts.append(KvPart(f"{name}latent", count, self.rank * size))
                if self.rope_dim:
                    parts.append(KvPart(f"{name}rope", count, self.rope_dim * size))
            if self.index_dim is not None:
                if not name and self.indexed is not None:
                    count = len(self.indexed.intersection(layers))
                    notes.append(f"{count} of {len(layers)} layers have an indexer of their own")
                row = self.index_dim + self.index_dim // 128 * 4
                parts.append(KvPart(f"{name}indexer", count, row))
        if self.index_dim is not None and dtype.startswith("fp8") and dtype != "fp8_ds_mla":
            notes.append(
                "some backends keep fp8 of a sparse model as fp8_ds_mla, 656 bytes a layer"
            )
        return parts


_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_HEAD_DIM = ("head_dim", "attention_head_dim")
_HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")


def _of_heads(fields: Fields, kv_heads: int) -> Heads:
    heads = fields.integer(*_HEADS)
    if kv_heads > heads or heads % kv_heads:
        raise ModelConfigError(f"{heads} heads do not share {kv_heads} KV heads; {INSTEAD}")
    key_dim = fields.optional(*_HEAD_DIM)
    if key_dim is None:
        hidden = fields.integer(*_HIDDEN)
        if hidden % heads:
            raise ModelConfigError(
                f"no head_dim, and hidden size {hidden} is no multiple of {heads} heads; {INSTEAD}"
            )
        key_dim = hidden // heads
    value_dim = fields.optional("v_head_dim") or key_dim
    return Heads(_attention(heads, kv_heads), kv_heads, key_dim, value_dim)


def _attention(heads: int, kv_heads: int) -> str:
    return "mha" if kv_heads == heads else "mqa" if kv_heads == 1 else "gqa"


def _grouped(fields: Fields) -> Heads:
    return _of_heads(fields, fields.integer(*_KV_HEADS))


def _stated(fields: Fields) -> Heads:
    """Families whose head size does not follow from the hidden size when it is left out."""
    fields.integer(*_HEAD_DIM)
    return _grouped(fields)


def _grouped_or_all(fields: Fields) -> Heads:
    """Families whose configuration class takes a missing KV head count for 'as many as heads'."""
    return _of_heads(fields, fields.optional(*_KV_HEADS) or fields.integer(*_HEADS))


def _all_heads(fields: Fields) -> Heads:
    return _of_heads(fields, fields.integer(*_HEADS))


def _multi_query(fields: Fields) -> Heads:
    return _of_heads(fields, 1 if fields.flag("multi_query") else fields.integer(*_HEADS))


def _falcon(fields: Fields) -> Heads:
    """`multi_query` counts only without the newer decoder, which groups its heads."""
    if fields.flag("new_decoder_architecture", False):
        return _grouped(fields)
    return _multi_query(fields)


def _chatglm(fields: Fields) -> Heads:
    if fields.flag("multi_query_attention"):
        return _of_heads(fields, fields.integer("multi_query_group_num"))
    return _all_heads(fields)


def _dbrx(fields: Fields) -> Heads:
    return _of_heads(fields, fields.integer("attn_config.kv_n_heads"))


def _step(fields: Fields) -> Heads:
    fields.integer(*_HEAD_DIM)
    return _of_heads(fields, fields.integer("num_attention_groups"))


def _gemma3(fields: Fields) -> Heads:
    """Released Gemma 3 files leave out what equals the configuration class's defaults."""
    heads = fields.optional("num_attention_heads") or 8
    kv_heads = fields.optional("num_key_value_heads") or 4
    head_dim = fields.optional("head_dim") or 256
    return Heads(_attention(heads, kv_heads), kv_heads, head_dim, head_dim)


def _gemma4(fields: Fields) -> Heads:
    """Full layers have heads of their own size, and of their own number where K equals V
    (which are cached both all the same)."""
    head_dim = fields.integer("global_head_dim")
    kv_heads = fields.integer("num_key_value_heads")
    if fields.flag("attention_k_eq_v", False):
        kv_heads = fields.optional("num_global_key_value_heads") or kv_heads
    heads = fields.integer("num_attention_heads")
    return Heads(_attention(heads, kv_heads), kv_heads, head_dim, head_dim)


def _latent(fields: Fields) -> Latent:
    if fields.get("use_mla") is False:
        raise ModelConfigError(f"use_mla is false: such a model is not known; {INSTEAD}")
    sparse = fields.get("index_topk") is not None
    return Latent(
        rank=fields.integer("kv_lora_rank"),
        rope_dim=fields.integer("qk_rope_head_dim", zero=True),
        index_dim=fields.integer("index_head_dim") if sparse else None,
        indexed=_indexed_layers(fields) if sparse else None,
    )


def _sparse_latent(fields: Fields) -> Latent:
    fields.integer("index_topk")
    return _latent(fields)


def _indexed_layers(fields: Fields) -> frozenset[int] | None:
    """The layers with an indexer of their own; None for all. The others share an earlier one's."""
    count = fields.integer("num_hidden_layers")
    types = fields.items("indexer_types") or fields.get("index_topk_pattern")
    if types is not None:
        if not isinstance(types, str | list) or len(types) < count:
            raise ModelConfigError(f"too few indexer types for {count} layers; {INSTEAD}")
        if not all(kind in ("full", "shared", "F", "S") for kind in types):
            raise ModelConfigError(f"an indexer type is neither full nor shared; {INSTEAD}")
        own = frozenset(index for index in range(count) if types[index] in ("full", "F"))
    else:
        every = fields.optional("index_topk_freq") or 1
        offset = fields.optional("index_skip_topk_offset", zero=True)
        offset = 2 if offset is None else offset
        own = frozenset(i for i in range(count) if max(i - offset + 1, 0) % every == 0)
    return own if len(own) < count else None


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of one kind cache: which layers, and what of a token in each."""

    layers: LayerRule
    shape: Callable[[Fields], Heads | Latent]
    layer_fields: tuple[str, ...] = ("num_hidden_layers",)
    caches_per_layer: int = 1
    shares_kv: bool = False


def layer_kinds(fields: Fields, family: Family, notes: list[str]) -> list[str]:
    """The kind of every layer of the model itself, in order."""
    count = fields.integer(*family.layer_fields) * family.caches_per_layer
    kinds = family.layers(fields, count)
    mtp = fields.optional("num_nextn_predict_layers", zero=True) or 0
    if len(kinds) not in (count, count + mtp):
        raise ModelConfigError(f"{len(kinds)} layer types for {count} layers; {INSTEAD}")
    kinds = kinds[:count]
    longest = fields.optional("max_position_embeddings", zero=True)
    window = fields.get("sliding_window")
    if SLIDING in kinds and longest and isinstance(window, int) and window >= longest:
        notes.append(f"the window of {window} tokens is as long as the longest prompt")
        kinds = [FULL if kind == SLIDING else kind for kind in kinds]
    shared = fields.optional("num_kv_shared_layers", zero=True)
    if shared is None and family.shares_kv:
        raise missing("num_kv_shared_layers")
    if shared:
        notes.append(f"the last {shared} layers read the KV of earlier ones and add none")
        kinds[max(0, count - shared) :] = [NOTHING] * min(count, shared)
    return kinds


def _table(rows: Iterable[tuple[str, Family]]) -> dict[str, Family]:
    return {name: family for names, family in rows for name in names.split()}


FAMILIES: dict[str, Family] = _table(
    [
        # Every layer alike.
        (
            "apertus arcee baichuan cohere deepseek granite granitemoe granitemoeshared internlm "
            "internlm2 internlm3 minicpm olmo olmo2 olmoe opt orion persimmon phi qwen solar "
            "xverse",
            Family(window_if_set, _grouped_or_all),
        ),
        (
            "bailing_moe ernie4_5_moe glm4_moe glm4v_text glm4v_moe_text mimo nemotron stablelm",
            Family(every_layer, _grouped),
        ),
        ("ernie4_5 gemma glm glm4 seed_oss", Family(every_layer, _stated)),
        ("gpt2 gptj", Family(every_layer, _all_heads, ("n_layer", "num_hidden_layers"))),
        ("gpt_neox", Family(every_layer, _all_heads)),
        ("bloom", Family(every_layer, _all_heads, ("n_layer", "num_hidden_layers"))),
        ("gpt_bigcode", Family(every_layer, _multi_query, ("n_layer", "num_hidden_layers"))),
        ("falcon", Family(every_layer, _falcon, ("num_hidden_layers", "n_layer"))),
        ("chatglm", Family(every_layer, _chatglm, ("num_layers", "num_hidden_layers"))),
        ("dbrx", Family(every_layer, _dbrx, ("n_layers",))),
        ("exaone", Family(window_if_set, _grouped_or_all, ("num_hidden_layers", "num_layers"))),
        # A window for all layers, or for those that layer_types name.
        ("llama phi3", Family(window_if_set, _grouped_or_all)),
        ("mixtral phimoe starcoder2", Family(window_if_set, _grouped)),
        ("ministral3", Family(window_if_set, _stated)),
        ("ministral mistral", Family(window_stated, _grouped)),
        # A window only where it is switched on.
        (
            "qwen2 qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen2_5_omni_text",
            Family(window_if_used, _grouped),
        ),
        ("qwen3 qwen3_vl_text", Family(window_if_used, _stated)),
        ("qwen2_moe qwen3_moe qwen3_omni_moe_text smollm3", Family(window_if_named, _grouped)),
        ("qwen3_vl_moe_text", Family(window_if_named, _stated)),
        # Windows and full attention in turn.
        ("gemma2", Family(full_every(2), _stated)),
        ("gemma3_text", Family(full_every(6, "sliding_window_pattern"), _gemma3)),
        ("gemma3n_text", Family(full_every(5), _stated, shares_kv=True)),
        ("gemma4_text", Family(by_name, _gemma4)),
        ("gpt_oss", Family(full_every(2), _stated)),
        ("cohere2", Family(full_every(4, "sliding_window_pattern"), _grouped_or_all)),
        ("olmo3", Family(full_every(4), _grouped_or_all)),
        ("exaone4", Family(full_every(None, "sliding_window_pattern"), _grouped)),
        ("afmoe", Family(full_every(None, "global_attn_every_n_layers"), _stated)),
        ("llama4_text", Family(chunked, _stated)),
        ("mimo_v2 mimo_v2_flash", Family(flagged("hybrid_layer_pattern", 0, SLIDING), _stated)),
        ("step3p5", Family(by_name, _step)),
        # Attention among layers of constant state.
        ("jamba", Family(jamba, _grouped)),
        ("bamba", Family(listed("attn_layer_indices"), _grouped)),
        ("granitemoehybrid olmo_hybrid", Family(by_name, _grouped_or_all)),
        ("nemotron_h", Family(nemotron_h, _stated)),
        ("falcon_h1", Family(every_layer, _grouped)),
        ("zamba2", Family(listed("hybrid_layer_ids"), _stated)),
        (
            "qwen3_next qwen3_5_text qwen3_5_moe_text",
            Family(linear_between("full_attention_interval"), _stated),
        ),
        ("lfm2 lfm2_moe", Family(listed("full_attn_idxs"), _grouped)),
        (
            "minimax minimax_text_01 minimax_m1",
            Family(flagged("attn_type_list", 1, CONSTANT), _grouped),
        ),
        ("minimax_m2", Family(flagged("attn_type_list", 1, CONSTANT, optional=True), _stated)),
        # Latent attention.
        (
            "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite kimi_k2 pangu_ultra_moe",
            Family(every_layer, _latent),
        ),
        ("deepseek_v32 glm_moe_dsa", Family(every_layer, _sparse_latent)),
        ("longcat_flash", Family(every_layer, _latent, ("num_layers",), caches_per_layer=2)),
        ("kimi_linear", Family(listed("linear_attn_config.full_attn_layers", 1), _latent)),
    ]
)
