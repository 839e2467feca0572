"""The gate's own configuration, and the adapter that it wraps.

The server must not start with a gate that is configured wrongly, so here, and only here,
everything raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry

from guard.gate.admission import Settings
from guard.gate.descriptors import above_floor
from guard.gate.store_link import StoreLink
from guard.gate.token import AdmissionToken
from guard.gate.validate import InvalidWrite, no_other_keys, shown, text

MAX_NAME = 64

_SETTINGS = {
    "max_loads": "max_loads",
    "default_share": "share",
    "default_min_chunks": "min_chunks",
    "default_writes": "writes",
    "default_lookup_deadline_s": "lookup_deadline_s",
    "default_load_deadline_s": "load_deadline_s",
}
_KEYS = frozenset({"inner", "name", "admission_token_file", *_SETTINGS})
MAX_PATH = 4096

# What LMCache's own fault_inject adapter parses for its inner adapter besides from_dict.
_PARSED_APART = (
    ("eviction_config", "_parse_eviction_config"),
    ("persist_config", "_parse_persist_config"),
)


@dataclass(frozen=True, slots=True)
class GateConfig:
    """`adapter_params`, checked: `name` is the `l2` label, `default` what is admitted while
    nobody holds a lease, `inner` the wrapped adapter's own spec with its `type`, `token` what
    every operation must bring."""

    name: str
    default: Settings
    inner_type: str
    inner: Mapping[str, Any]
    token: AdmissionToken

    @staticmethod
    def parse(params: Mapping[str, Any]) -> GateConfig:
        """Raises ValueError that names the key and what it may be."""
        try:
            no_other_keys(params, _KEYS)
            inner = params.get("inner")
            if not isinstance(inner, Mapping) or not isinstance(inner.get("type"), str):
                raise InvalidWrite(
                    f"inner must be the spec of the adapter to wrap, with its type; "
                    f"not {shown(inner)}"
                )
            if "serde" in inner:
                raise InvalidWrite(
                    "serde must stand beside adapter_params, not in inner, where LMCache "
                    "would not apply it"
                )
            name = text("name", params.get("name", inner["type"]), MAX_NAME)
            if not name:
                raise InvalidWrite("name must not be empty")
            default = Settings().changed(
                {field: params[key] for key, field in _SETTINGS.items() if key in params}
            )
            file = params.get("admission_token_file")
            if file is not None and not text("admission_token_file", file, MAX_PATH):
                raise InvalidWrite("admission_token_file must not be empty")
            token = AdmissionToken(file)
        except (InvalidWrite, ValueError) as error:
            raise ValueError(f"adapter_params of the kvguard gate: {error}") from error
        return GateConfig(name, default, inner["type"], dict(inner), token)


def builder(config: GateConfig, l1_memory_desc: Any) -> Callable[[], L2AdapterInterface]:
    """What builds an adapter of the inner spec through LMCache's own registry.

    Raises ValueError for a type LMCache does not know or a spec it does not accept.
    """
    try:
        cls = get_l2_adapter_config_class(config.inner_type)
    except ImportError as error:
        # For a type that nobody registers, too: LMCache names the last module it tried.
        raise ValueError(
            f"inner adapter {config.inner_type!r} is unknown to this LMCache, or lacks "
            f"what it needs ({error})"
        ) from error
    spec = {key: value for key, value in config.inner.items() if key != "affinity_tag"}
    inner_config = cls.from_dict(spec)
    inner_config.shared = bool(spec.get("shared", False))
    for attribute, parser in _PARSED_APART:
        parse = getattr(cls, parser, None)
        if parse is not None:
            setattr(inner_config, attribute, parse(spec))

    link = StoreLink.of(config.inner_type, config.inner)

    def build() -> L2AdapterInterface:
        if not link.host:
            return create_l2_adapter_from_registry(inner_config, l1_memory_desc)
        with above_floor(link, getattr(inner_config, "num_workers", 1)):
            return create_l2_adapter_from_registry(inner_config, l1_memory_desc)

    return build
