"""LMCache's keys and bitmaps: how many chunks they stand for, without a step for each bit.

A lookup names its keys row by row, a row for each object group on each rank, and a column
for each chunk. So keys are chunks × ranks × groups, and must not be counted as chunks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import Any

Keys = Sequence[Any]
"""`lmcache.v1.distributed.api.ObjectKey`s."""


def identities(keys: Keys) -> list[Hashable]:
    """What the keys are equal by, hashed several times faster than the keys themselves."""
    return [(k.chunk_hash, k.kv_rank, k.object_group_id, k.cache_salt, k.model_name) for k in keys]


def asked_chunks(keys: Keys) -> int:
    """The chunks that a lookup asks for: the length of its first row."""
    count = len(keys)
    if count < 2:
        return count
    first, last = keys[0], keys[-1]
    rank, group = first.kv_rank, first.object_group_id
    if last.kv_rank == rank and last.object_group_id == group:
        return count
    same, other = 0, count - 1
    while other - same > 1:
        middle = (same + other) // 2
        key = keys[middle]
        if key.kv_rank == rank and key.object_group_id == group:
            same = middle
        else:
            other = middle
    return other


def distinct_chunks(keys: Keys) -> int:
    """The different chunks among the keys of a load, whose rows may differ in length."""
    return len({key.chunk_hash for key in keys})


def found_chunks(found: Any, keys: int, chunks: int) -> int:
    """The chunks from the first on that every row of a lookup's answer has."""
    leading = int(found.count_leading_ones())
    if leading >= keys:
        return chunks
    best = min(leading, chunks)
    if best == 0 or keys <= chunks:
        return best
    indices = found.get_indices_list()
    for row in range(chunks, keys, chunks):
        best = _run(indices, row, best)
        if best == 0:
            break
    return best


def _run(indices: Sequence[int], start: int, longest: int) -> int:
    """How many of start, start + 1, … stand in the sorted `indices`, `longest` at most."""
    at = bisect_left(indices, start)
    low, high = 0, min(longest, len(indices) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if indices[at + middle - 1] == start + middle - 1:
            low = middle
        else:
            high = middle - 1
    return low


def bytes_by_rank(keys: Keys, sizes: Sequence[int]) -> dict[str, int]:
    """Bytes by rank, written as in LMCache's own key strings (eight hexadecimal digits)."""
    ranks = [key.kv_rank for key in keys]
    if ranks and ranks.count(ranks[0]) == len(ranks):
        return {f"{ranks[0]:08x}": sum(sizes)}
    totals: dict[int, int] = {}
    for rank, size in zip(ranks, sizes, strict=True):
        totals[rank] = totals.get(rank, 0) + size
    return {f"{rank:08x}": total for rank, total in totals.items()}
