"""Which layers of a model keep every token: the rules that model families follow.

A rule gets a config's fields and the number of layers, and says of every layer whether it
keeps every token (FULL), those of a window or chunk (SLIDING), a state of constant size
(CONSTANT), or has no cache of its own (NOTHING). Sources are named in `kv_layouts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from guard.errors import ModelConfigError

INSTEAD = (
    "set --kv-bytes-per-token instead (kv_bytes_per_token in the configuration): the engine's "
    "KV cache bytes divided by the tokens that fit into it, both in its start-up log"
)


class Fields:
    """A config's fields under their several names, checked; a dot reaches into an object."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def get(self, name: str) -> Any:
        value: Any = self._raw
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def is_stated(self, name: str) -> bool:
        """Whether the field is there at all: null says 'none', absence says 'the default'."""
        return name in self._raw

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str) or not value:
            raise missing(name)
        return value

    def optional(self, *names: str, zero: bool = False) -> int | None:
        """The first of these fields that is not null, a positive integer (0 if `zero`)."""
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < (not zero):
                raise ModelConfigError(
                    f"{name} should be a positive whole number, got {value!r:.60}; {INSTEAD}"
                )
            return value
        return None

    def integer(self, *names: str, zero: bool = False) -> int:
        value = self.optional(*names, zero=zero)
        if value is None:
            raise missing(*names)
        return value

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            raise (
                missing(name)
                if value is None
                else ModelConfigError(
                    f"{name} should be true or false, got {value!r:.60}; {INSTEAD}"
                )
            )
        return value

    def items(self, name: str) -> list[Any] | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not value:
            raise ModelConfigError(f"{name} should be a list, got {value!r:.60}; {INSTEAD}")
        return value


def missing(*names: str) -> ModelConfigError:
    return ModelConfigError(f"the config has no {' or '.join(names)}; {INSTEAD}")


FULL, SLIDING, CONSTANT, NOTHING = "full", "sliding", "constant", "nothing"
_KINDS = {
    "full_attention": FULL,
    "attention": FULL,
    "hybrid": FULL,
    "sliding_attention": SLIDING,
    "chunked_attention": SLIDING,
    "linear_attention": CONSTANT,
    "mamba": CONSTANT,
    "conv": CONSTANT,
    "mlp": NOTHING,
    "moe": NOTHING,
}
_PATTERN_KINDS = {"*": FULL, "M": CONSTANT, "-": NOTHING, "E": NOTHING}

LayerRule = Callable[[Fields, int], list[str]]


def every_layer(fields: Fields, count: int) -> list[str]:
    return [FULL] * count


def _named(fields: Fields) -> list[str] | None:
    """The layers by the names in `layer_types`, or its older name; None without either."""
    names = fields.items("layer_types") or fields.items("layers_block_type")
    if names is None:
        return None
    for name in names:
        if not isinstance(name, str) or name not in _KINDS:
            raise ModelConfigError(f"layer type {name!r:.60} is not known; {INSTEAD}")
    no_window = fields.is_stated("sliding_window") and not fields.get("sliding_window")
    return [FULL if name == "sliding_attention" and no_window else _KINDS[name] for name in names]


def by_name(fields: Fields, count: int) -> list[str]:
    kinds = _named(fields)
    if kinds is None:
        raise missing("layer_types", "layers_block_type")
    return kinds


def window_if_set(fields: Fields, count: int) -> list[str]:
    """`layer_types`, else a `sliding_window` that holds for all layers."""
    kinds = _named(fields)
    if kinds is not None:
        return kinds
    return [SLIDING if fields.optional("sliding_window", zero=True) else FULL] * count


def window_stated(fields: Fields, count: int) -> list[str]:
    """The same where the default is a window: `sliding_window` must be there, null or not."""
    if not fields.is_stated("sliding_window") and _named(fields) is None:
        raise missing("sliding_window")
    return window_if_set(fields, count)


def window_if_used(fields: Fields, count: int) -> list[str]:
    """Qwen: a window only where `use_sliding_window`, from layer `max_window_layers` on."""
    if (kinds := _named(fields)) is not None:
        return kinds
    if not fields.flag("use_sliding_window", False):
        return [FULL] * count
    fields.integer("sliding_window")
    first = fields.integer("max_window_layers", zero=True)
    return [SLIDING if index >= first else FULL for index in range(count)]


def window_if_named(fields: Fields, count: int) -> list[str]:
    """The same, but which layers have the window is only known when `layer_types` say so."""
    if (kinds := _named(fields)) is not None:
        return kinds
    if fields.flag("use_sliding_window", False):
        raise missing("layer_types")
    return [FULL] * count


def full_every(default: int | None, *names: str) -> LayerRule:
    """One full layer after every so many windows, unless `layer_types` say it per layer.
    `default` is what the configuration class of the family fills in."""

    def rule(fields: Fields, count: int) -> list[str]:
        if (kinds := _named(fields)) is not None:
            return kinds
        if fields.is_stated("sliding_window") and not fields.get("sliding_window"):
            return [FULL] * count
        pattern = fields.get(names[0]) if names else None
        if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
            return [SLIDING if pattern[i % len(pattern)] == "L" else FULL for i in range(count)]
        every = fields.optional(*names) or default
        if every is None:
            raise missing("layer_types", *names)
        return [SLIDING if (index + 1) % every else FULL for index in range(count)]

    return rule


def linear_between(*names: str) -> LayerRule:
    """One full layer after every so many of linear attention, unless named per layer."""

    def rule(fields: Fields, count: int) -> list[str]:
        kinds = _named(fields)
        if kinds is not None:
            return kinds
        every = fields.integer(*names)
        return [CONSTANT if (index + 1) % every else FULL for index in range(count)]

    return rule


def listed(name: str, first: int = 0, other: str = CONSTANT) -> LayerRule:
    """The full layers by their numbers, counted from `first`."""

    def rule(fields: Fields, count: int) -> list[str]:
        kinds = _named(fields)
        if kinds is not None:
            return kinds
        numbers = fields.items(name)
        if numbers is None:
            raise missing(name)
        if not all(isinstance(n, int) and first <= n < count + first for n in numbers):
            raise ModelConfigError(f"{name} names layers that the model has not; {INSTEAD}")
        return [FULL if index + first in numbers else other for index in range(count)]

    return rule


def flagged(name: str, full: int, other: str, optional: bool = False) -> LayerRule:
    """A list of 0 and 1, one a layer; `full` says which of them is full attention."""

    def rule(fields: Fields, count: int) -> list[str]:
        kinds = _named(fields)
        if kinds is not None:
            return kinds
        flags = fields.items(name)
        if flags is None:
            if optional:
                return [FULL] * count
            raise missing("layer_types", name)
        if not all(flag in (0, 1) for flag in flags):
            raise ModelConfigError(f"{name} should be a list of 0 and 1; {INSTEAD}")
        return [FULL if flag == full else other for flag in flags]

    return rule


def chunked(fields: Fields, count: int) -> list[str]:
    """Llama 4: layers with rotary positions attend within a chunk, those without to all."""
    if not fields.optional("attention_chunk_size", zero=True):
        return [FULL] * count
    if fields.get("no_rope_layers"):
        return flagged("no_rope_layers", 0, SLIDING)(fields, count)
    kinds = _named(fields)
    if kinds is not None:
        return kinds
    every = fields.optional("no_rope_layer_interval") or 4
    return [SLIDING if (index + 1) % every else FULL for index in range(count)]


def jamba(fields: Fields, count: int) -> list[str]:
    period = fields.integer("attn_layer_period")
    offset = fields.integer("attn_layer_offset", zero=True)
    return [FULL if index % period == offset else CONSTANT for index in range(count)]


def nemotron_h(fields: Fields, count: int) -> list[str]:
    pattern = fields.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        return by_name(fields, count)
    unknown = set(pattern) - set(_PATTERN_KINDS)
    if unknown:
        raise ModelConfigError(
            f"hybrid_override_pattern has {sorted(unknown)[0]!r}, which is not known; {INSTEAD}"
        )
    attention = SLIDING if fields.optional("sliding_window", zero=True) else FULL
    return [attention if letter == "*" else _PATTERN_KINDS[letter] for letter in pattern]
