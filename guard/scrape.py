"""One burst of scrapes: all peers at once, each on its own, none able to fail another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from guard.errors import SourceError
from guard.sources import lmcache_mp, vllm
from guard.sources.http import HttpClient
from guard.sources.samples import Sample, combine
from guard.view import SourceView


@dataclass(frozen=True, slots=True)
class Burst:
    """What one tick's three GETs gave. A peer that did not answer is None; `sources` says
    why. The queues of `status` are in `cache` too (`queue.…`), read in the same burst:
    apart, their difference lies. `engine` is None unless every engine answered."""

    engine: Sample | None
    cache: Sample | None
    status: lmcache_mp.CacheStatus | None
    sources: tuple[SourceView, ...]

    @property
    def blind(self) -> str | None:
        """Why the policy cannot see enough to change anything, or None."""
        peers = {
            "the cache": self.cache,
            "the engine": self.engine,
            "the cache's status": self.status,
        }
        silent = next((name for name, seen in peers.items() if seen is None), None)
        return None if silent is None else f"{silent} does not answer: holding"


class Scraper:
    """Reads engines and cache. `wall` and `monotonic` are the clocks, in seconds."""

    def __init__(
        self,
        client: HttpClient,
        engines: Sequence[str],
        cache: str | None,
        timeout_seconds: float,
        wall: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._client = client
        self._engines = [url.rstrip("/") for url in engines]
        self._cache = cache.rstrip("/") if cache else None
        self._timeout = timeout_seconds
        self._wall = wall
        self._monotonic = monotonic

    async def read(self) -> Burst:
        """One burst; never raises because of a peer."""
        engine_urls = [f"{url}/metrics" for url in self._engines]
        names = ["engine" if i == 0 else f"engine-{i + 1}" for i in range(len(engine_urls))]
        urls = list(zip(names, engine_urls, strict=True))
        if self._cache is not None:
            urls.append(("cache_metrics", f"{self._cache}/metrics"))
            urls.append(("cache_status", f"{self._cache}/status"))
        answers = await asyncio.gather(*(self._get(name, url) for name, url in urls))
        sources = [view for view, _ in answers]
        engines: list[Sample] = []
        cache: Sample | None = None
        status: lmcache_mp.CacheStatus | None = None
        for index, (view, body) in enumerate(answers):
            if body is None or view.at is None:
                continue
            try:
                if view.name == "cache_metrics":
                    cache = lmcache_mp.parse_metrics(view.url, body, view.at, self._monotonic())
                elif view.name == "cache_status":
                    status = lmcache_mp.parse_status(view.url, body)
                else:
                    engines.append(vllm.parse(view.url, body, view.at, self._monotonic()))
            except SourceError as error:
                sources[index] = replace(view, up=False, error=str(error))
        if cache is not None and status is not None:
            cache = replace(cache, values={**cache.values, **_queues(status)})
        whole = len(engines) == len(self._engines)
        return Burst(combine(engines) if whole else None, cache, status, tuple(sources))

    async def _get(self, name: str, url: str) -> tuple[SourceView, bytes | None]:
        begin = self._monotonic()
        try:
            body = await self._client.get(url, self._timeout)
        except SourceError as error:
            return SourceView(name, url, False, str(error), self._monotonic() - begin, None), None
        took = self._monotonic() - begin
        return SourceView(name, url, True, None, took, self._wall()), body


def _queues(status: lmcache_mp.CacheStatus) -> dict[str, float]:
    sizes = {
        "queue.submission": status.submission_queue_size,
        "queue.pending": status.pending_queue_size,
    }
    return {name: float(size) for name, size in sizes.items() if size is not None}
