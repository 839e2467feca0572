"""The loop: one tick after another, left to right, whatever the peers do.

scrape -> estimate -> decide -> act -> journal -> show. Only this module knows the order;
each step lives in its own room.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from guard.chronicle import Chronicle, JournalLike
from guard.control.lmcache_mp import GateControl
from guard.control.reconcile import Reconciler
from guard.estimate.estimator import Estimator
from guard.estimate.figures import Configured
from guard.healer import Healer
from guard.holding import Holding, Sight
from guard.memory import Memory, StateStore
from guard.persons_word import PersonsWord
from guard.policy.breaker import as_in_force, decide
from guard.policy.state import PolicySettings, Surroundings
from guard.policy.types import Admission, Decision, Healing, Mode, OverrideMode
from guard.policy.verdict import judge
from guard.readings import Snapshot
from guard.scrape import Burst, Scraper
from guard.sources.http import HttpClient
from guard.sources.lmcache_mp import has_gate
from guard.view import OBSERVE_ONLY, View

_TIMEOUT_OF_INTERVAL = 0.45


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What the loop must be told; all times in seconds."""

    engines: tuple[str, ...] = ("http://127.0.0.1:8000",)
    cache: str | None = "http://127.0.0.1:8080"
    mode: Mode = "observe"
    interval_seconds: float = 1.0
    holder: str = "kvguard:local"
    estimate: Configured = field(default_factory=Configured)
    policy: PolicySettings = field(default_factory=PolicySettings)
    lease_seconds: float = 30.0
    renew_seconds: float = 5.0
    status_seconds: float = 10.0
    gate_token_file: Path | None = None
    blind_after_seconds: float = 10.0
    stop_renewing_after_seconds: float = 300.0


class Loop:
    """One guard. Clocks and chance are injected; `run` is the only endless thing."""

    def __init__(
        self,
        settings: LoopSettings,
        journal: JournalLike,
        store: StateStore,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings
        self._journal = journal
        self._memory = Memory(store)
        self._chronicle = Chronicle(journal)
        recalled = self._memory.recall()
        self._state = recalled.state
        if recalled.words is not None:
            journal.write("state", reason=recalled.words, state=asdict(recalled.state))
        self._wall, self._monotonic, self._chance = wall, monotonic, chance
        timeout = settings.interval_seconds * _TIMEOUT_OF_INTERVAL
        self._client = HttpClient()
        self._scraper = Scraper(
            self._client, settings.engines, settings.cache, timeout, wall, monotonic
        )
        self._reconciler = Reconciler(
            GateControl(self._client, settings.cache or "", timeout, settings.gate_token_file),
            settings.holder,
            monotonic,
            lease_seconds=settings.lease_seconds,
            renew_seconds=settings.renew_seconds,
            status_seconds=settings.status_seconds,
        )
        self._word = PersonsWord(
            journal, self._reconciler.own, recalled.override, recalled.override_revision
        )
        self._holding = Holding(
            self._reconciler,
            self._chronicle,
            monotonic,
            stop_renewing_after_seconds=settings.stop_renewing_after_seconds,
        )
        self._healer = Healer(self._reconciler, journal, chance, recalled.healing)
        self._estimator = Estimator(settings.estimate)
        self._evidence_at = monotonic()
        self._lock = asyncio.Lock()
        self._decisions: Counter[tuple[str, str]] = Counter()
        self._decided_under = 0
        self._cpu_seconds = 0.0
        self._view = View(
            started_at=wall(),
            ticks=0,
            last_tick_monotonic=None,
            mode=settings.mode,
            control="not seen yet",
            holder=None,
            admission=None,
            lease_expires_at=None,
            override=self._word.override,
            override_revision=self._word.revision,
            snapshot=None,
            decision=None,
        )

    # face ---------------------------------------------------------------------------

    def view(self) -> View:
        """The latest view; never blocks."""
        return self._view

    async def run(self, stop: asyncio.Event) -> None:
        """Tick every interval until `stop` is set; a tick that fails is journalled and
        the next one comes all the same."""
        interval = self._settings.interval_seconds
        due = self._monotonic()
        while not stop.is_set():
            try:
                await self.tick()
            except Exception as error:  # the loop outlives whatever one tick meets
                self._journal.write("fault", reason=f"a tick failed: {error!r}")
            due = max(due + interval, self._monotonic())
            try:
                await asyncio.wait_for(stop.wait(), max(0.0, due - self._monotonic()))
            except TimeoutError:
                continue

    async def close(self) -> None:
        """Close the connections to the peers; the last thing, after any `release`."""
        await self._client.close()

    def reload_policy(self, settings: LoopSettings) -> None:
        """Take the policy's constants from other settings, from the next tick on."""
        self._settings = replace(
            self._settings,
            policy=settings.policy,
            blind_after_seconds=settings.blind_after_seconds,
        )
        self._holding.stop_renewing_after_seconds = settings.stop_renewing_after_seconds
        self._estimator.configure(
            min_loads=settings.estimate.min_loads,
            window_seconds=settings.estimate.window_seconds,
        )

    async def release(self) -> bool:
        """Give the gate back to its default at once (`--release-on-exit`): a short lease
        that admits all. True when the gate did so; a person's hold is not released."""
        done = None if self._word.override is not None else await self._holding.release()
        if done is None:
            return False
        self._journal.write("release", reason="released on exit" if done else "release failed")
        return done

    async def set_override(
        self,
        mode: OverrideMode,
        *,
        who: str,
        reason: str,
        ttl_seconds: float | None,
        if_revision: int | None,
    ) -> View:
        """Set or clear (`auto`) the override, act on it at once, journal it.

        Raises ControlConflict when `if_revision` is given and stale, ValueError for a TTL
        out of (0, 24 h].
        """
        self._word.say(
            mode,
            who=who,
            reason=reason,
            ttl_seconds=ttl_seconds,
            if_revision=if_revision,
            now=self._wall(),
        )
        self._save()
        await self.tick()
        return self._view

    # one tick -----------------------------------------------------------------------

    async def tick(self) -> None:
        """One pass from scrape to view."""
        async with self._lock:
            begin = time.process_time()
            await self._tick()
            self._cpu_seconds += time.process_time() - begin
            self._view = replace(self._view, tick_cpu_seconds_total=self._cpu_seconds)

    async def _tick(self) -> None:
        burst = await self._scraper.read()
        await self._reconciler.refresh(burst.cache)
        now, monotonic = self._wall(), self._monotonic()
        gate = self._reconciler.status
        self._holding.follow_share(gate)
        snapshot = Snapshot(
            now,
            monotonic,
            self._estimator.update(
                burst.engine,
                burst.cache,
                burst.status,
                now,
                monotonic,
                self._holding.since,
                float(gate.max_loads) if gate else None,
            ),
        )
        self._word.expire(now)
        blind = burst.blind
        if blind is None:
            self._evidence_at = monotonic
        around = Surroundings(
            mode=self._settings.mode,
            override=self._word.override,
            can_control=gate is not None,
            foreign_holder=self._reconciler.foreign_holder(self._word.override),
            share_in_force=gate.share if gate else None,
            can_probe=gate is not None and gate.can_probe,
            probe=self._healer.breakers_probe(),
            blind=blind if self._word.override is None else None,
            can_abort=gate is not None and bool(gate.can_abort),
            why_no_abort=gate.why_not.get("abort", "") if gate else "",
        )
        before, shown = self._state, self._view.decision
        unseen = monotonic - self._evidence_at
        if (
            around.blind
            and shown
            and self._decided_under == self._word.revision
            and unseen < self._settings.blind_after_seconds
        ):
            # One late answer is no blindness: what was decided stands for now.
            decision = replace(shown, action=None, probe=False, operation=None)
        else:
            decision, self._state = decide(
                snapshot, self._state, self._settings.policy, around, now, self._chance
            )
            self._decided_under = self._word.revision
        healing: Healing | None = None
        if blind is None:
            verdict = judge(snapshot, self._settings.policy.limits)
            healing = self._healer.judge(
                snapshot, verdict, self._state.phase, around, decision, now
            )
        self._chronicle.sources(burst.sources)
        if burst.cache is not None:
            self._chronicle.gate(has_gate(burst.cache))
        if decision.action:
            self._decisions[decision.action, decision.reason_code] += 1
            self._chronicle.decision(
                decision,
                self._settings.mode,
                {"phase": before.phase, "share": gate.share if gate else None},
                {
                    "phase": self._state.phase,
                    "share": decision.admission.share if decision.admission else None,
                },
            )
        if await self._holding.act(
            decision, around, self._sight(burst, monotonic - self._evidence_at), now
        ):
            if decision.operation is not None:
                await self._healer.operate(decision.operation, decision.reason, now)
            elif healing is not None:
                await self._healer.act(healing, now)
        gate = self._reconciler.status if burst.cache is not None else None
        decision = as_in_force(
            decision, snapshot, self._settings.policy, gate.share if gate else None
        )
        self._save()
        self._show(burst, snapshot, decision, now, monotonic)

    def _sight(self, burst: Burst, blind_seconds: float) -> Sight:
        status = burst.status
        return Sight(
            burst.cache is not None and has_gate(burst.cache),
            status.prefetch_slots(self._estimator.bytes_per_load) if status else None,
            blind_seconds,
        )

    # memory and words ---------------------------------------------------------------

    def _save(self) -> None:
        self._memory.save(self._state, self._word.override, self._word.revision, self._healer.state)

    def _show(
        self,
        burst: Burst,
        snapshot: Snapshot,
        decision: Decision,
        now: float,
        monotonic: float,
    ) -> None:
        gate = self._reconciler.status if burst.cache is not None else None
        control = self._control_words(burst)
        lease = gate.lease_expires_in_seconds if gate else None
        self._view = View(
            started_at=self._view.started_at,
            ticks=self._view.ticks + 1,
            last_tick_monotonic=monotonic,
            mode=self._settings.mode,
            control=control,
            holder=gate.holder if gate else None,
            admission=Admission(gate.share, gate.min_chunks) if gate else None,
            lease_expires_at=now + lease if lease is not None else None,
            override=self._word.override,
            override_revision=self._word.revision,
            snapshot=snapshot,
            decision=decision,
            sources=burst.sources,
            decisions_total=dict(self._decisions),
            control_requests_total=dict(self._reconciler.requests),
            prefill_seconds_saved_total=self._estimator.prefill_seconds_saved,
            tick_cpu_seconds_total=self._cpu_seconds,
            journal_error=self._journal.error,
            healing=self._healer.shown,
            healing_attempts_total=dict(self._healer.attempts),
        )

    def _control_words(self, burst: Burst) -> str:
        if burst.cache is None:
            return "the cache does not answer"
        if not has_gate(burst.cache):
            return OBSERVE_ONLY
        if self._reconciler.status is None:
            return f"the gate's status cannot be read: {self._reconciler.error}"
        if foreign := self._reconciler.foreign_holder(self._word.override):
            return f"held by {foreign}"
        if error := self._chronicle.control_error:
            return f"not in force: {error}"
        return "gate"
