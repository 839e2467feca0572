"""Addresses that a person gives: peers' URLs and listeners' host:port."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")


def peer_url(text: str) -> str:
    """A peer's base URL without a slash at its end.

    Raises ValueError that says what is wrong: not http or https, no host, a bad port,
    credentials, a query or a fragment.
    """
    if not text or not text.isascii() or any(c.isspace() or not c.isprintable() for c in text):
        raise ValueError(f"{text!r} is no URL; write http://host:port")
    if "://" not in text:
        raise ValueError(f"{text!r} has no scheme; write http://{text}")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{text!r} is no URL: {error}") from None
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{text!r}: only http and https are spoken, not {parts.scheme!r}")
    if "@" in parts.netloc:
        raise ValueError("a URL with a user or password would be shown everywhere; leave them out")
    if not parts.hostname or not _is_host(parts.hostname):
        raise ValueError(f"{text!r} has no host that could be called")
    if port == 0 or parts.netloc.endswith(":"):
        raise ValueError(f"{text!r} has no port from 1 to 65535 after its ':'")
    if parts.query or parts.fragment or text.endswith(("?", "#")):
        raise ValueError(f"{text!r}: a base URL has no query and no fragment")
    return text.rstrip("/")


def listen_address(text: str) -> str:
    """A listener's `host:port`, checked; port 0 is any free one. Raises ValueError."""
    split_address(text)
    return text


def split_address(text: str) -> tuple[str, int]:
    """Host and port of a listener; IPv6 in brackets, an empty host is every interface.

    Raises ValueError when it is no host:port.
    """
    match = re.fullmatch(
        r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^\[\]:\s/]*)):(?P<port>\d{1,5})", text
    )
    if match is None or int(match["port"]) > 65535:
        raise ValueError(f"{text!r} is no host:port; write 127.0.0.1:9469 or [::1]:9469")
    host = match["v6"] or match["host"] or "0.0.0.0"
    if not _is_host(host):
        raise ValueError(f"{text!r} has no host that could be listened on")
    return host, int(match["port"])


def is_loopback(host: str) -> bool:
    """Whether only this machine (or this pod) can reach that host."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        # all digits and dots, and yet no address: a mistyped one, not a name
        return bool(_HOST_NAME.fullmatch(host)) and not re.fullmatch(r"[\d.]+", host)
    return True
