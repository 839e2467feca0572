"""A model directory without weights: a Qwen3-style configuration and its own tokenizer.

The lab starts the engine with `--load-format dummy`, so nothing is downloaded. 12 layers,
hidden 512 and 8 KV heads of 64 in bf16 give s = 24 576 bytes per token: large enough
beside a small CPU's prefill rate that a slow store loses, as in production. A CPU without
instructions for bf16 multiplies it four to ten times slower than float32 (7 s for a prompt
of 2 000 tokens with plain AVX-512, 13 s without), so that 12 MB/s would hardly lose; there
the model is smaller and in float32, with half the heads, and s is the same.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

LAYERS = 12
HIDDEN = 512
HEAD_DIM = 64
VOCABULARY = 2048
FIRST_PLAIN_TOKEN = 3  # 0, 1 and 2 are the special tokens
END_TOKEN = 2


def _fast_type() -> tuple[str, int]:
    """The element type that this CPU computes fast in, and its bytes."""
    flags = Path("/proc/cpuinfo").read_text().split()
    native = not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags)
    return ("bfloat16", 2) if native else ("float32", 4)


ELEMENT_TYPE, ELEMENT_BYTES = _fast_type()
HEADS = 16 // ELEMENT_BYTES
KV_HEADS = HEADS
KV_BYTES_PER_TOKEN = 2 * LAYERS * KV_HEADS * HEAD_DIM * ELEMENT_BYTES

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_model(directory: Path) -> Path:
    """Writes config, generation config and tokenizer; the same bytes every time."""
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / "config.json", _config())
    _write(directory / "generation_config.json", {"bos_token_id": 0, "eos_token_id": END_TOKEN})
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": _SPECIAL[END_TOKEN],
            "pad_token": _SPECIAL[0],
            "model_max_length": 32768,
        },
    )
    _train_tokenizer().save(str(directory / "tokenizer.json"))  # type: ignore[attr-defined]
    return directory


def _config() -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN * 4 // ELEMENT_BYTES,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "vocab_size": VOCABULARY,
        "torch_dtype": ELEMENT_TYPE,
        "bos_token_id": 0,
        "eos_token_id": END_TOKEN,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
    }


def _train_tokenizer() -> object:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    choose = random.Random(0)
    syllables = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = ["".join(choose.choices(syllables, k=choose.randint(1, 4))) for _ in range(3000)]
    corpus = [" ".join(choose.choices(words, k=40)) for _ in range(2000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 48,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
