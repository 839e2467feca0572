"""KV bytes per token: real models' configs, published figures, and everything that is refused.

tests/model_configs holds one config.json per case, with the fields of the released model
that have to do with its cache.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guard.errors import ModelConfigError
from guard.kv_bytes import KvBytes, from_config, from_file
from guard.kv_layouts import FAMILIES

CONFIGS = Path(__file__).parent / "model_configs"
# KVGUARD_FUZZ=50 tries fifty times as hard.
EFFORT = int(os.environ.get("KVGUARD_FUZZ", "1"))


def config(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return value


def changed(name: str, **fields: Any) -> dict[str, Any]:
    """The config with these fields set, in its text_config if it has one; ... removes one."""
    whole = config(name)
    text = whole.get("text_config", whole)
    for key, value in fields.items():
        if value is ...:
            del text[key]
        else:
            text[key] = value
    return whole


class TestPublishedFigures:
    """Every figure of the project's facts about vLLM."""

    @pytest.mark.parametrize(
        ("name", "cache_dtype", "expected"),
        [
            ("qwen2.5-1.5b", "auto", 28_672),
            ("qwen3-0.6b", "auto", 114_688),
            ("qwen3-0.6b", "fp8", 57_344),
            ("llama-3.1-8b", "auto", 131_072),
            ("deepseek-v3", "auto", 70_272),
            ("deepseek-v3", "fp8", 35_136),
            ("deepseek-v3", "fp8_ds_mla", 40_016),
            ("deepseek-v3.2", "auto", 78_324),
            ("deepseek-v3.2", "fp8_ds_mla", 48_068),
        ],
    )
    def test_it(self, name: str, cache_dtype: str, expected: int) -> None:
        assert from_file(CONFIGS / f"{name}.json", cache_dtype).kv_bytes_per_token == expected

    def test_fp8_ds_mla_is_656_bytes_a_layer_and_an_indexer_132(self) -> None:
        parts = {
            part.name: part for part in from_config(config("deepseek-v3.2"), "fp8_ds_mla").parts
        }
        assert parts["latent"].bytes_per_layer == 656
        assert parts["indexer"].bytes_per_layer == 132
        assert parts["latent"].layers == parts["indexer"].layers == 61

    def test_the_lab_model(self) -> None:
        tiny = {
            "model_type": "qwen3",
            "num_hidden_layers": 4,
            "hidden_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "torch_dtype": "bfloat16",
        }
        # What the engine of tests/captures moves per token (see the README there).
        assert from_config(tiny).kv_bytes_per_token == 2048

    def test_the_incident_papers_48_kilobytes(self) -> None:
        """GLM-5.3 FP8, 48.4 kB per token: GLM-5.2's layout, an indexer on every fourth layer,
        and its MTP layer with an indexer of its own."""
        result = from_config(config("glm-5.2"), "fp8", draft_layers=1)
        assert result.kv_bytes_per_token == pytest.approx(48.4e3, rel=0.001)
        assert result.kv_bytes_per_token == 79 * 576 + 22 * 132


# model, bytes per token at `auto`, attention, layers that grow, layers of constant state
CASES = [
    ("llama-7b", 32 * 32 * 256 * 2, "mha", 32, 0),
    ("llama-3.1-8b", 131_072, "gqa", 32, 0),
    ("qwen3-30b-a3b", 48 * 4 * 256 * 2, "gqa", 48, 0),
    ("starcoder", 40 * 1 * 256 * 2, "mqa", 40, 0),
    ("falcon-7b", 32 * 1 * 128 * 2, "mqa", 32, 0),
    ("falcon-40b", 60 * 8 * 128 * 2, "gqa", 60, 0),
    ("chatglm3-6b", 28 * 2 * 256 * 2, "gqa", 28, 0),
    ("dbrx", 40 * 8 * 256 * 2, "gqa", 40, 0),
    ("opt-125m", 12 * 12 * 128 * 2, "mha", 12, 0),
    ("bloom-7b1", 30 * 32 * 256 * 2, "mha", 30, 0),
    # The head size is stated and is not hidden size / heads.
    ("mistral-nemo", 40 * 8 * 256 * 2, "gqa", 40, 0),
    ("mistral-small-3.1", 40 * 8 * 256 * 2, "gqa", 40, 0),
    ("phi-3.5-mini", 32 * 32 * 192 * 2, "mha", 32, 0),
    ("minimax-m2", 62 * 8 * 256 * 2, "gqa", 62, 0),
    # Windows between full layers.
    ("qwen2-windowed", 70 * 8 * 256 * 2, "gqa", 70, 10),
    ("gemma-2-9b", 21 * 8 * 512 * 2, "gqa", 21, 21),
    ("gemma-3-1b", 4 * 1 * 512 * 2, "mqa", 4, 22),
    ("gemma-3-4b", 5 * 4 * 512 * 2, "gqa", 5, 29),
    ("gemma-3-27b", 10 * 16 * 256 * 2, "gqa", 10, 52),
    ("gemma-3n-e4b", 4 * 2 * 512 * 2, "gqa", 4, 16),
    ("gemma-4-26b-a4b", 5 * 2 * 1024 * 2, "gqa", 5, 25),
    ("gpt-oss-20b", 12 * 8 * 128 * 2, "gqa", 12, 12),
    ("command-r7b", 8 * 8 * 256 * 2, "gqa", 8, 24),
    ("exaone-4.0-32b", 16 * 8 * 256 * 2, "gqa", 16, 48),
    ("exaone-4.0-1.2b", 30 * 8 * 128 * 2, "gqa", 30, 0),
    ("olmo-3-7b", 8 * 32 * 256 * 2, "mha", 8, 24),
    ("llama-4-scout", 12 * 8 * 256 * 2, "gqa", 12, 36),
    ("mimo-v2-flash", 9 * 4 * (192 + 128) * 2, "gqa", 9, 39),
    ("step-3.5-flash", 12 * 8 * 256 * 2, "gqa", 12, 33),
    # Mamba, linear attention and convolutions between attention.
    ("jamba-1.5-mini", 4 * 8 * 256 * 2, "gqa", 4, 28),
    ("bamba-9b", 3 * 8 * 256 * 2, "gqa", 3, 29),
    ("granite-4.0-h-small", 4 * 8 * 256 * 2, "gqa", 4, 36),
    ("nemotron-h-8b", 4 * 8 * 256 * 2, "gqa", 4, 24),
    ("nemotron-3-nano-30b", 6 * 2 * 256 * 2, "gqa", 6, 23),
    ("falcon-h1-7b", 44 * 2 * 256 * 2, "gqa", 44, 0),
    ("zamba2-7b", 13 * 32 * 448 * 2, "mha", 13, 68),
    ("lfm2-350m", 6 * 8 * 128 * 2, "gqa", 6, 10),
    ("qwen3-next-80b-a3b", 12 * 2 * 512 * 2, "gqa", 12, 36),
    ("qwen3.5-397b-a17b", 15 * 2 * 512 * 2, "gqa", 15, 45),
    ("minimax-text-01", 10 * 8 * 256 * 2, "gqa", 10, 70),
    # Latent attention.
    ("deepseek-v2-lite", 27 * 576 * 2, "mla", 27, 0),
    ("deepseek-v3", 61 * 576 * 2, "mla", 61, 0),
    ("deepseek-v3.2", 61 * (576 * 2 + 132), "mla", 61, 0),
    ("glm-5", 78 * (576 * 2 + 132), "mla", 78, 0),
    ("glm-5.2", 78 * 576 * 2 + 21 * 132, "mla", 78, 0),
    ("glm-4.7-flash", 47 * 576 * 2, "mla", 47, 0),
    ("kimi-k2.5", 61 * 576 * 2, "mla", 61, 0),
    ("kimi-linear-48b-a3b", 7 * 576 * 2, "mla", 7, 20),
    ("longcat-flash", 56 * 576 * 2, "mla", 56, 0),
]


class TestModels:
    @pytest.mark.parametrize(
        ("name", "expected", "attention", "layers", "constant"), CASES, ids=lambda v: str(v)
    )
    def test_figures(
        self, name: str, expected: int, attention: str, layers: int, constant: int
    ) -> None:
        result = from_file(CONFIGS / f"{name}.json")
        assert result.kv_bytes_per_token == expected
        assert result.attention == attention
        assert result.layers == layers
        assert result.constant_layers == constant
        assert result.window is None
        assert sum(part.bytes_per_token for part in result.parts) == expected
        assert result.kv_bytes_per_token % result.layers == 0 or name == "glm-5.2"

    def test_every_config_is_a_case(self) -> None:
        tested = {case[0] for case in CASES}
        special = {"gpt2", "qwen2.5-1.5b", "qwen3-0.6b", "mistral-7b-v0.1", "phi-3-mini-4k"}
        names = {path.stem for path in CONFIGS.glob("*.json")}
        assert {name for name in names if not name.startswith("unknown-")} == tested | special

    @pytest.mark.parametrize(
        ("name", "window", "expected"),
        [("mistral-7b-v0.1", 4096, 131_072), ("phi-3-mini-4k", 2047, 393_216)],
    )
    def test_a_model_that_slides_everywhere_grows_up_to_its_window(
        self, name: str, window: int, expected: int
    ) -> None:
        result = from_file(CONFIGS / f"{name}.json")
        assert result.kv_bytes_per_token == expected
        assert result.window == window
        assert any(str(window) in note for note in result.notes)

    def test_gpt2_names_and_no_dtype(self) -> None:
        with pytest.raises(ModelConfigError, match="--cache-dtype"):
            from_config(config("gpt2"))
        assert from_config(config("gpt2"), "float16").kv_bytes_per_token == 12 * 12 * 128 * 2

    def test_parts_say_what_the_sum_is_made_of(self) -> None:
        result = from_config(config("mimo-v2-flash"))
        assert [(part.name, part.layers, part.bytes_per_layer) for part in result.parts] == [
            ("keys", 9, 4 * 192 * 2),
            ("values", 9, 4 * 128 * 2),
        ]
        names = [part.name for part in from_config(config("deepseek-v3.2")).parts]
        assert names == ["latent", "rope", "indexer"]

    def test_draft_layers_count_only_when_stated(self) -> None:
        plain = from_config(config("deepseek-v3"))
        assert any("MTP" in note for note in plain.notes)
        drafted = from_config(config("deepseek-v3"), draft_layers=1)
        assert drafted.kv_bytes_per_token == 62 * 576 * 2
        assert drafted.layers == 62
        assert not any("MTP" in note for note in drafted.notes)
        hybrid = from_config(config("qwen3.5-397b-a17b"), draft_layers=1)
        assert hybrid.kv_bytes_per_token == 16 * 2 * 512 * 2
        with pytest.raises(ModelConfigError, match="negative"):
            from_config(config("deepseek-v3"), draft_layers=-1)


class TestLayerRules:
    """The several ways in which the same layers are written down."""

    @pytest.mark.parametrize(
        ("name", "fields", "layers"),
        [
            ("gpt-oss-20b", {"layer_types": ...}, 12),
            ("gemma-3-1b", {"sliding_window_pattern": ...}, 4),
            ("gemma-3-1b", {"sliding_window_pattern": 2}, 13),
            ("gemma-3-1b", {"sliding_window": None}, 26),
            ("gemma-3n-e4b", {"layer_types": ...}, 4),
            ("olmo-3-7b", {"layer_types": ...}, 8),
            ("command-r7b", {"sliding_window_pattern": ...}, 8),
            (
                "command-r7b",
                {"sliding_window": None, "layer_types": ["sliding_attention"] * 32},
                32,
            ),
            ("exaone-4.0-32b", {"sliding_window_pattern": 4}, 16),
            ("llama-4-scout", {"no_rope_layers": [1, 1, 0] * 16}, 16),
            ("llama-4-scout", {"no_rope_layers": ..., "no_rope_layer_interval": 8}, 6),
            ("llama-4-scout", {"attention_chunk_size": None}, 48),
            (
                "llama-4-scout",
                {
                    "no_rope_layers": ...,
                    "layer_types": ["chunked_attention", "full_attention"] * 24,
                },
                24,
            ),
            ("qwen2-windowed", {"use_sliding_window": False}, 80),
            ("qwen2-windowed", {"max_window_layers": 80}, 80),
            ("qwen2-windowed", {"sliding_window": 131072}, 80),
            ("qwen2.5-1.5b", {"layer_types": ["full_attention"] * 28}, 28),
            ("qwen3-next-80b-a3b", {"full_attention_interval": 6}, 8),
            (
                "qwen3-next-80b-a3b",
                {"layer_types": ["linear_attention", "full_attention"] * 24},
                24,
            ),
            (
                "granite-4.0-h-small",
                {"layer_types": ..., "layers_block_type": ["mamba", "attention"] * 20},
                20,
            ),
            (
                "nemotron-h-8b",
                {
                    "hybrid_override_pattern": ...,
                    "layers_block_type": ["mamba", "mlp", "attention", "moe"] * 13,
                },
                13,
            ),
            ("zamba2-7b", {"layers_block_type": ...}, 13),
            (
                "lfm2-350m",
                {"full_attn_idxs": ..., "layer_types": ["conv", "full_attention"] * 8},
                8,
            ),
            (
                "minimax-text-01",
                {"attn_type_list": ..., "layer_types": ["linear_attention", "full_attention"] * 40},
                40,
            ),
            ("minimax-m2", {"attn_type_list": ...}, 62),
            ("llama-3.1-8b", {"layer_types": ["full_attention", "sliding_attention"] * 16}, 16),
            (
                "kimi-linear-48b-a3b",
                {"layer_types": ["linear_attention"] * 26 + ["full_attention"]},
                1,
            ),
            ("mistral-nemo", {"sliding_window": 0}, 40),
        ],
    )
    def test_variants(self, name: str, fields: dict[str, Any], layers: int) -> None:
        assert from_config(changed(name, **fields)).layers == layers

    @pytest.mark.parametrize(
        ("fields", "indexed"),
        [
            ({"indexer_types": ...}, 21),
            ({"indexer_types": ..., "index_topk_freq": 1}, 78),
            ({"indexer_types": ..., "index_topk_freq": ..., "index_skip_topk_offset": ...}, 78),
            ({"indexer_types": ..., "index_topk_pattern": "FSS" * 26}, 26),
            ({"indexer_types": ..., "index_skip_topk_offset": 2}, 21),
        ],
    )
    def test_indexers(self, fields: dict[str, Any], indexed: int) -> None:
        result = from_config(changed("glm-5.2", **fields), "bfloat16")
        assert result.kv_bytes_per_token == 78 * 576 * 2 + indexed * 132

    def test_two_ways_to_say_head_size(self) -> None:
        explicit = from_config(changed("llama-3.1-8b", head_dim=64))
        assert explicit.kv_bytes_per_token == 131_072 / 2
        assert from_config(changed("llama-3.1-8b", head_dim=None)).kv_bytes_per_token == 131_072

    def test_values_may_be_narrower_than_keys(self) -> None:
        result = from_config(changed("llama-3.1-8b", head_dim=192, v_head_dim=128))
        assert result.kv_bytes_per_token == 32 * 8 * (192 + 128) * 2

    def test_gemma_4_has_other_heads_on_its_full_layers(self) -> None:
        own = from_config(changed("gemma-4-26b-a4b", attention_k_eq_v=False))
        assert own.kv_bytes_per_token == 5 * 8 * 1024 * 2
        shared = from_config(changed("gemma-4-26b-a4b", num_kv_shared_layers=10))
        assert (shared.layers, shared.constant_layers) == (3, 17)

    def test_a_latent_model_ignores_its_heads(self) -> None:
        for fields in ({"head_dim": 64}, {"num_key_value_heads": 1}, {"num_attention_heads": 7}):
            assert from_config(changed("deepseek-v3", **fields)).kv_bytes_per_token == 70_272


class TestCacheDtype:
    @pytest.mark.parametrize(
        ("cache_dtype", "name", "size"),
        [
            ("auto", "bfloat16", 2),
            ("bfloat16", "bfloat16", 2),
            ("BF16", "bfloat16", 2),
            ("float16", "float16", 2),
            ("half", "float16", 2),
            ("fp16", "float16", 2),
            ("float32", "float32", 4),
            ("fp32", "float32", 4),
            ("fp8", "fp8", 1),
            ("fp8_e4m3", "fp8_e4m3", 1),
            ("fp8_e5m2", "fp8_e5m2", 1),
            ("fp8_inc", "fp8_inc", 1),
            ("int8", "int8", 1),
        ],
    )
    def test_sizes(self, cache_dtype: str, name: str, size: int) -> None:
        result = from_config(config("llama-3.1-8b"), cache_dtype)
        assert result.kv_bytes_per_token == 65_536 * size
        assert result.dtype == name

    @pytest.mark.parametrize(
        "fields",
        [
            {"torch_dtype": "float16"},
            {"torch_dtype": "torch.float16"},
            {"torch_dtype": ..., "dtype": "float16"},
            {"torch_dtype": "bfloat16", "dtype": "float16"},
        ],
    )
    def test_auto_is_the_models_own(self, fields: dict[str, Any]) -> None:
        assert from_config(changed("llama-3.1-8b", **fields)).dtype == "float16"

    def test_auto_of_a_nested_model(self) -> None:
        assert from_config(config("qwen3.5-397b-a17b")).dtype == "bfloat16"
        assert from_config(config("mistral-small-3.1")).dtype == "bfloat16"

    def test_a_float32_checkpoint_is_run_in_16_bits(self) -> None:
        """vLLM's `--dtype auto` casts float32 down; its KV cache follows."""
        result = from_config(changed("llama-3.1-8b", torch_dtype="float32"))
        assert result.kv_bytes_per_token == 131_072
        assert any("float32" in note for note in result.notes)
        assert from_config(config("llama-3.1-8b"), "float32").kv_bytes_per_token == 262_144

    @pytest.mark.parametrize(
        "quantization",
        [
            {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
            {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}},
            {
                "quant_method": "compressed-tensors",
                "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
            },
        ],
    )
    def test_auto_follows_a_checkpoint_that_asks_for_fp8(
        self, quantization: dict[str, Any]
    ) -> None:
        whole = changed("llama-3.1-8b", quantization_config=quantization)
        result = from_config(whole)
        assert result.kv_bytes_per_token == 65_536
        assert result.dtype == "fp8"
        assert from_config(whole, "bfloat16").kv_bytes_per_token == 131_072

    @pytest.mark.parametrize(
        "quantization",
        [
            {"quant_method": "fp8"},
            {"quant_method": "compressed-tensors", "kv_cache_scheme": None},
            {"quant_method": "modelopt", "kv_cache_quant_algo": None},
            None,
        ],
    )
    def test_quantized_weights_are_no_quantized_cache(self, quantization: Any) -> None:
        whole = changed("llama-3.1-8b", quantization_config=quantization)
        assert from_config(whole).kv_bytes_per_token == 131_072

    @pytest.mark.parametrize(
        "quantization",
        [
            {"kv_cache_quant_algo": "NVFP4"},
            {"kv_cache_scheme": {"num_bits": 4, "type": "float"}},
        ],
    )
    def test_a_quantized_cache_of_unknown_layout_is_refused(
        self, quantization: dict[str, Any]
    ) -> None:
        with pytest.raises(ModelConfigError, match="--kv-bytes-per-token"):
            from_config(changed("llama-3.1-8b", quantization_config=quantization))

    @pytest.mark.parametrize(
        "cache_dtype", ["", "fp4", "nvfp4", "turboquant_k8v4", "int8_per_token_head", "bf"]
    )
    def test_unknown_cache_dtypes(self, cache_dtype: str) -> None:
        with pytest.raises(ModelConfigError, match="not one of auto, bfloat16") as caught:
            from_config(config("llama-3.1-8b"), cache_dtype)
        assert "--kv-bytes-per-token" in str(caught.value)

    def test_fp8_ds_mla_is_for_its_own_latent_only(self) -> None:
        with pytest.raises(ModelConfigError, match="MLA"):
            from_config(config("llama-3.1-8b"), "fp8_ds_mla")
        with pytest.raises(ModelConfigError, match="512"):
            from_config(changed("deepseek-v3", kv_lora_rank=256), "fp8_ds_mla")


class TestRefused:
    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("unknown-llama-3.2-vision", "mllama"),
            ("unknown-t5", "encoder-decoder"),
            ("unknown-mamba2", "mamba2"),
            ("unknown-deepseek-v4", "deepseek_v4"),
            ("unknown-own-architecture", "acme_lm"),
        ],
    )
    def test_unknown_architectures(self, name: str, said: str) -> None:
        with pytest.raises(ModelConfigError, match=said) as caught:
            from_file(CONFIGS / f"{name}.json")
        assert "--kv-bytes-per-token" in str(caught.value)
        assert caught.value.exit_code == 2

    @pytest.mark.parametrize(
        ("name", "field"),
        [
            ("llama-3.1-8b", "num_hidden_layers"),
            ("llama-3.1-8b", "num_attention_heads"),
            ("llama-3.1-8b", "hidden_size"),
            ("llama-3.1-8b", "model_type"),
            ("qwen2.5-1.5b", "num_key_value_heads"),
            ("qwen3-0.6b", "head_dim"),
            ("mistral-nemo", "sliding_window"),
            ("deepseek-v3", "kv_lora_rank"),
            ("deepseek-v3", "qk_rope_head_dim"),
            ("deepseek-v3.2", "index_head_dim"),
            ("deepseek-v3.2", "index_topk"),
            ("starcoder", "multi_query"),
            ("chatglm3-6b", "multi_query_group_num"),
            ("dbrx", "attn_config"),
            ("jamba-1.5-mini", "attn_layer_period"),
            ("bamba-9b", "attn_layer_indices"),
            ("granite-4.0-h-small", "layer_types"),
            ("nemotron-h-8b", "hybrid_override_pattern"),
            ("qwen3-next-80b-a3b", "full_attention_interval"),
            ("minimax-text-01", "attn_type_list"),
            ("kimi-linear-48b-a3b", "linear_attn_config"),
            ("exaone-4.0-32b", "sliding_window_pattern"),
            ("gemma-3n-e4b", "num_kv_shared_layers"),
            ("gemma-4-26b-a4b", "global_head_dim"),
            ("qwen2-windowed", "max_window_layers"),
        ],
    )
    def test_a_missing_field_is_named(self, name: str, field: str) -> None:
        said = {
            "granite-4.0-h-small": "layer_types",
            "nemotron-h-8b": "layer_types",
            "dbrx": "kv_n_heads",
            "kimi-linear-48b-a3b": "full_attn_layers",
        }.get(name, field)
        with pytest.raises(ModelConfigError, match=said) as caught:
            from_config(changed(name, **{field: ...}))
        assert "the config has no" in str(caught.value)
        assert "--kv-bytes-per-token" in str(caught.value)

    @pytest.mark.parametrize(
        ("name", "fields"),
        [
            ("llama-3.1-8b", {"num_hidden_layers": 0}),
            ("llama-3.1-8b", {"num_hidden_layers": -1}),
            ("llama-3.1-8b", {"num_hidden_layers": True}),
            ("llama-3.1-8b", {"num_hidden_layers": 32.0}),
            ("llama-3.1-8b", {"num_hidden_layers": "32"}),
            ("llama-3.1-8b", {"num_key_value_heads": [8] * 32}),
            ("llama-3.1-8b", {"num_key_value_heads": 7}),
            ("llama-3.1-8b", {"num_key_value_heads": 64}),
            ("llama-3.1-8b", {"hidden_size": 4097}),
            ("llama-3.1-8b", {"torch_dtype": "int4"}),
            ("llama-3.1-8b", {"torch_dtype": "auto"}),
            ("llama-3.1-8b", {"model_type": ["llama"]}),
            ("gpt-oss-20b", {"layer_types": ["full_attention"] * 23}),
            ("gpt-oss-20b", {"layer_types": ["no_such_attention"] * 24}),
            ("gpt-oss-20b", {"layer_types": "full_attention"}),
            ("nemotron-h-8b", {"hybrid_override_pattern": "M-M*X"}),
            ("nemotron-h-8b", {"hybrid_override_pattern": "M-M*"}),
            ("bamba-9b", {"attn_layer_indices": [9, 32]}),
            ("bamba-9b", {"attn_layer_indices": []}),
            ("jamba-1.5-mini", {"attn_layer_offset": 9}),
            ("minimax-text-01", {"attn_type_list": [2] * 80}),
            ("qwen3-30b-a3b", {"use_sliding_window": True}),
            ("deepseek-v3", {"use_mla": False}),
            ("glm-5.2", {"indexer_types": ["full"]}),
            ("glm-5.2", {"indexer_types": ["other"] * 78}),
            ("gemma-3n-e4b", {"num_kv_shared_layers": 35}),
        ],
    )
    def test_a_field_that_makes_no_sense(self, name: str, fields: dict[str, Any]) -> None:
        with pytest.raises(ModelConfigError):
            from_config(changed(name, **fields))

    def test_a_wrapper_counts_only_when_it_is_known(self) -> None:
        whole = config("mistral-small-3.1")
        whole["model_type"] = "acme_vision"
        with pytest.raises(ModelConfigError, match="acme_vision"):
            from_config(whole)
        whole = config("mistral-small-3.1")
        whole["llm_config"] = whole["text_config"]
        with pytest.raises(ModelConfigError, match="text_config and llm_config"):
            from_config(whole)

    def test_a_wrapper_within_a_wrapper(self) -> None:
        inner = config("mistral-small-3.1")
        whole = {"model_type": "qwen2_5_omni", "thinker_config": inner}
        assert from_config(whole).kv_bytes_per_token == 163_840

    @pytest.mark.parametrize("value", [None, [], "llama", 3])
    def test_no_object(self, value: Any) -> None:
        with pytest.raises(ModelConfigError, match="JSON object"):
            from_config(value)


class TestFiles:
    def test_file_and_directory(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config("llama-3.1-8b")))
        for path in (tmp_path, str(tmp_path), tmp_path / "config.json"):
            assert from_file(path).kv_bytes_per_token == 131_072

    def test_quantization_in_a_file_of_its_own(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config("llama-3.1-8b")))
        beside = tmp_path / "hf_quant_config.json"
        beside.write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}))
        assert from_file(tmp_path).kv_bytes_per_token == 65_536
        beside.write_text("[]")
        with pytest.raises(ModelConfigError, match="hf_quant_config"):
            from_file(tmp_path)

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"", "no JSON"),
            (b"{", "no JSON"),
            (b"<html>", "no JSON"),
            (b"\xff\xfe{}", "no JSON"),
            (b"[" * 100_000, "no JSON"),
            (b"[]", "not a JSON object"),
            (b"{}", "model_type"),
        ],
    )
    def test_what_is_no_config(self, tmp_path: Path, content: bytes, said: str) -> None:
        path = tmp_path / "config.json"
        path.write_bytes(content)
        with pytest.raises(ModelConfigError, match=said) as caught:
            from_file(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ModelConfigError, match="No such file"):
            from_file(tmp_path)


NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(-1, 3) | st.text(max_size=3) | st.none(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


class TestLaws:
    @settings(max_examples=300 * EFFORT, deadline=None)
    @given(st.sampled_from(NAMES), st.data())
    def test_a_damaged_config_gives_a_figure_or_a_clear_error(
        self, name: str, data: st.DataObject
    ) -> None:
        whole = copy.deepcopy(config(name))
        parts = [whole, *(part for part in whole.values() if isinstance(part, dict))]
        for _ in range(data.draw(st.integers(1, 3))):
            part = data.draw(st.sampled_from(parts))
            key = data.draw(st.sampled_from(sorted(part)))
            if data.draw(st.booleans()):
                part[key] = data.draw(junk)
            elif len(part) > 1:
                del part[key]
        outcome: KvBytes | str
        try:
            outcome = from_config(whole, data.draw(st.sampled_from(["auto", "fp8", "fp8_ds_mla"])))
        except ModelConfigError as error:
            outcome = str(error)
        if isinstance(outcome, str):
            assert "\n" not in outcome
            assert len(outcome) < 700
        else:
            self.check(outcome)

    @settings(max_examples=100 * EFFORT, deadline=None)
    @given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.text(max_size=5), junk))
    def test_a_known_model_type_alone_is_never_enough(
        self, model_type: str, fields: dict[str, Any]
    ) -> None:
        with pytest.raises(ModelConfigError, match="--kv-bytes-per-token"):
            from_config({**fields, "model_type": model_type}, "bfloat16")

    @given(st.integers(1, 200), st.sampled_from([1, 2, 4, 8]), st.sampled_from([64, 80, 128]))
    def test_proportional_to_layers_heads_head_size_and_dtype(
        self, layers: int, kv_heads: int, head_dim: int
    ) -> None:
        whole = changed(
            "llama-3.1-8b",
            num_hidden_layers=layers,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
        )
        wide = from_config(whole, "bfloat16")
        assert wide.kv_bytes_per_token == layers * kv_heads * head_dim * 4
        assert from_config(whole, "fp8").kv_bytes_per_token * 2 == wide.kv_bytes_per_token

    def check(self, result: KvBytes) -> None:
        assert result.kv_bytes_per_token > 0
        assert result.layers > 0
        assert result.constant_layers >= 0
        assert result.kv_bytes_per_token == sum(part.bytes_per_token for part in result.parts)
        assert all(part.layers > 0 and part.bytes_per_layer > 0 for part in result.parts)
