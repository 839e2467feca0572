"""An L2 adapter that forwards everything to the inner one, for the gate to build on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface


def _forwarders() -> dict[str, Any]:
    """The whole public interface of an adapter, by forwarding to the inner one: also what
    versions of LMCache newer than this gate add to it."""
    namespace: dict[str, Any] = {}
    for name in dir(L2AdapterInterface):
        if name.startswith("_"):
            continue
        member = inspect.getattr_static(L2AdapterInterface, name)
        if isinstance(member, property):
            namespace[name] = property(_getter(name))
        elif callable(member):
            namespace[name] = _method(name)
    return namespace


def _getter(name: str) -> Callable[[Any], Any]:
    return lambda self: getattr(self._inner, name)


def _method(name: str) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, name)(*args, **kwargs)

    forward.__name__ = name
    return forward


ForwardingAdapter: Any = type(L2AdapterInterface)(
    "ForwardingAdapter", (L2AdapterInterface,), _forwarders()
)
"""Made, not written, so that methods which a newer LMCache adds to the interface, abstract
ones included, reach the inner adapter too. The inner adapter is `self._inner`."""
