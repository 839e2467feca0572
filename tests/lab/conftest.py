"""One real stack for as many tests as can share it: a start takes most of a minute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .stack import Stack

_SHARING_ORDER = ("gated_stack", "stock_stack", "runners")


class Bench:
    """Holds at most one running stack: two would not fit beside each other."""

    def __init__(self) -> None:
        self._stack: Stack | None = None

    def stack(self, *, gated: bool) -> Stack:
        if self._stack is not None and self._stack.gated != gated:
            self.close()
        if self._stack is None:
            self._stack = Stack(gated=gated)
            try:
                self._stack.start()
            except BaseException:
                self.close()
                raise
            times = ", ".join(f"{k} {v:.0f} s" for k, v in self._stack.start_seconds.items())
            print(f"\nlab stack ({'gated' if gated else 'stock'}): {times}")
        return self._stack

    def close(self) -> None:
        if self._stack is not None:
            stack, self._stack = self._stack, None
            stack.close()


@pytest.fixture(scope="session")
def bench() -> Iterator[Bench]:
    """Ends whatever runs when the session is over."""
    held = Bench()
    yield held
    held.close()


@pytest.fixture
def gated_stack(bench: Bench) -> Stack:
    """The whole stack with the gate; earlier tests may have used it."""
    return bench.stack(gated=True)


@pytest.fixture
def stock_stack(bench: Bench) -> Stack:
    """The whole stack as LMCache comes, without a gate."""
    return bench.stack(gated=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one kind of stack one after the other, those without a stack first, faults
    last."""

    def place(item: pytest.Item) -> int:
        names = getattr(item, "fixturenames", ())
        wanted = [i + 1 for i, name in enumerate(_SHARING_ORDER) if name in names]
        return max(wanted, default=0)

    items.sort(key=place)
