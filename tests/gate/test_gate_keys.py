"""Chunks behind LMCache's keys and bitmaps, against counting them one by one."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from guard.gate.lmcache_keys import (
    asked_chunks,
    bytes_by_rank,
    distinct_chunks,
    found_chunks,
    identities,
)


@dataclass(frozen=True)
class Key:
    """As lmcache's ObjectKey."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""


class Bits:
    """As lmcache's Bitmap, as far as it is used."""

    def __init__(self, bits: list[bool]) -> None:
        self.bits = bits

    def count_leading_ones(self) -> int:
        return next((at for at, bit in enumerate(self.bits) if not bit), len(self.bits))

    def get_indices_list(self) -> list[int]:
        return [at for at, bit in enumerate(self.bits) if bit]


def grid(chunks: int, ranks: int, groups: int) -> list[Key]:
    return [
        Key(chunk.to_bytes(4, "big"), "m", (ranks << 24) | (rank << 16), group)
        for group in range(groups)
        for rank in range(ranks)
        for chunk in range(chunks)
    ]


@given(st.integers(1, 70), st.integers(1, 4), st.integers(1, 3))
def test_the_chunks_of_a_grid(chunks: int, ranks: int, groups: int) -> None:
    keys = grid(chunks, ranks, groups)
    assert asked_chunks(keys) == chunks
    assert distinct_chunks(keys) == chunks


def test_no_keys_no_chunks() -> None:
    assert asked_chunks([]) == distinct_chunks([]) == 0


@given(st.integers(1, 12), st.integers(1, 4), st.data())
def test_found_is_the_prefix_that_every_row_has(chunks: int, rows: int, data) -> None:
    size = chunks * rows
    bits = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    leads = [Bits(bits[row : row + chunks]).count_leading_ones() for row in range(0, size, chunks)]
    assert found_chunks(Bits(bits), size, chunks) == min(leads)


@given(st.integers(1, 40), st.integers(1, 4), st.data())
def test_found_of_nearly_full_grids(chunks: int, rows: int, data) -> None:
    size = chunks * rows
    bits = [True] * size
    for hole in data.draw(st.lists(st.integers(0, size - 1), max_size=3)):
        bits[hole] = False
    leads = [Bits(bits[row : row + chunks]).count_leading_ones() for row in range(0, size, chunks)]
    assert found_chunks(Bits(bits), size, chunks) == min(leads)


def test_a_load_of_uneven_rows_counts_each_chunk_once() -> None:
    keys = grid(8, 2, 1)
    assert distinct_chunks(keys[2:11]) == 8  # chunks 2–7 of one rank, 0–2 of the other
    assert distinct_chunks(keys[10:16]) == 6


def test_bytes_go_to_their_rank() -> None:
    keys = grid(2, 2, 1)
    sizes = [1, 2, 10, 20]
    assert bytes_by_rank(keys, sizes) == {"02000000": 3, "02010000": 30}
    assert bytes_by_rank(keys[:2], sizes[:2]) == {"02000000": 3}
    assert bytes_by_rank([], []) == {}


@given(st.lists(st.builds(Key, st.binary(max_size=2), st.sampled_from("ab"), st.integers(0, 2))))
def test_identities_are_equal_where_keys_are(keys: list[Key]) -> None:
    found: list[Hashable] = identities(keys)
    assert [[a == b for b in found] for a in found] == [[a == b for b in keys] for a in keys]
