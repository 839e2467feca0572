"""`kvguard kv-bytes`: KV bytes per token from a model's config.json."""

from __future__ import annotations

import json
from pathlib import Path

from guard.journal.decisions import plain


def show(config: Path, cache_dtype: str | None, as_json: bool) -> int:
    """Print s of that model and how it comes about. Raises ModelConfigError, which says
    what to configure instead."""
    from guard import kv_bytes

    result = kv_bytes.from_file(config, cache_dtype=cache_dtype or "auto")
    if as_json:
        print(json.dumps(plain(result)))
        return 0
    print(f"{result.kv_bytes_per_token} bytes per token")
    print(f"  {result.model_type}, {result.attention}, cache dtype {result.dtype}")
    for part in result.parts:
        print(f"  {part.name}: {part.layers} layers x {part.bytes_per_layer} bytes")
    if result.constant_layers:
        print(f"  {result.constant_layers} layers keep a constant state: not counted")
    if result.window is not None:
        print(f"  every layer slides: holds up to {result.window} tokens")
    for note in result.notes:
        print(f"  {note}")
    return 0
