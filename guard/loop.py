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

from guard.chronicle import Chronicle, JournalLike
from guard.control.lmcache_mp import GateControl
from guard.control.reconcile import Reconciler, Wanted
from guard.errors import ControlConflict
from guard.estimate.estimator import Estimator
from guard.estimate.figures import Configured
from guard.healer import PROBE_CHUNKS, PROBE_DEADLINE_SECONDS, PROBE_MAX_BYTES, Healer
from guard.memory import Memory, StateStore
from guard.policy.breaker import as_in_force, decide
from guard.policy.state import PolicySettings, Surroundings
from guard.policy.types import Admission, Decision, Healing, Mode, Override, OverrideMode
from guard.policy.verdict import judge
from guard.readings import Snapshot
from guard.scrape import Burst, Scraper
from guard.sources.gate import GateStatus
from guard.sources.http import HttpClient
from guard.sources.lmcache_mp import has_gate
from guard.view import OBSERVE_ONLY, View

DEFAULT_TTL_SECONDS = 1800.0
MAX_TTL_SECONDS = 86_400.0
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
        self._override: Override | None = recalled.override
        self._override_revision = recalled.override_revision
        if recalled.words is not None:
            journal.write("state", reason=recalled.words, state=asdict(recalled.state))
        self._wall, self._monotonic, self._chance = wall, monotonic, chance
        timeout = settings.interval_seconds * _TIMEOUT_OF_INTERVAL
        self._client = HttpClient()
        self._scraper = Scraper(
            self._client, settings.engines, settings.cache, timeout, wall, monotonic
        )
        self._reconciler = Reconciler(
            GateControl(self._client, settings.cache or "", timeout),
            settings.holder,
            monotonic,
            lease_seconds=settings.lease_seconds,
            renew_seconds=settings.renew_seconds,
            status_seconds=settings.status_seconds,
        )
        if self._override is not None:
            self._reconciler.own(self._override.who)
        self._healer = Healer(self._reconciler, journal, chance, recalled.healing)
        self._estimator = Estimator(settings.estimate)
        self._since = float("-inf")
        self._was_out: bool | None = None
        self._wanted: Wanted | None = None
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
            override=self._override,
            override_revision=self._override_revision,
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
            stop_renewing_after_seconds=settings.stop_renewing_after_seconds,
        )
        self._estimator.configure(
            min_loads=settings.estimate.min_loads,
            window_seconds=settings.estimate.window_seconds,
        )

    async def release(self) -> bool:
        """Give the gate back to its default at once (`--release-on-exit`): a short lease
        that admits all. True when the gate did so; a person's hold is not released."""
        if self._wanted is None or self._override is not None:
            return False
        wanted = Wanted(Admission(), self._settings.holder, "guard stopped: released", 1.0)
        done = await self._reconciler.apply(wanted, None)
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
        ttl = DEFAULT_TTL_SECONDS if ttl_seconds is None else ttl_seconds
        if not 0 < ttl <= MAX_TTL_SECONDS:
            raise ValueError(f"ttl_s must be above 0 and at most {MAX_TTL_SECONDS:g}, not {ttl:g}")
        if if_revision is not None and if_revision != self._override_revision:
            raise ControlConflict(
                f"the override changed meanwhile: revision is {self._override_revision}, "
                f"not {if_revision}; read it again"
            )
        before, now = self._override, self._wall()
        self._override_revision += 1
        if mode == "auto":
            self._override = None
        else:
            self._override = Override(mode, who, reason, now, now + ttl, self._override_revision)
        for word in (before, self._override):
            if word is not None:
                self._reconciler.own(word.who)
        self._journal.write(
            "override",
            action=mode,
            who=who,
            reason=reason,
            ttl_s=None if mode == "auto" else ttl,
            before=asdict(before) if before else None,
            after=asdict(self._override) if self._override else None,
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
        self._follow_share(gate)
        snapshot = Snapshot(
            now,
            monotonic,
            self._estimator.update(
                burst.engine,
                burst.cache,
                burst.status,
                now,
                monotonic,
                self._since,
                float(gate.max_loads) if gate else None,
            ),
        )
        self._expire_override(now)
        blind = self._blind(burst)
        if blind is None:
            self._evidence_at = monotonic
        around = Surroundings(
            mode=self._settings.mode,
            override=self._override,
            can_control=gate is not None,
            foreign_holder=self._reconciler.foreign_holder(self._override),
            share_in_force=gate.share if gate else None,
            can_probe=gate is not None and gate.can_probe,
            probe=self._healer.breakers_probe(),
            blind=blind if self._override is None else None,
            can_abort=gate is not None and bool(gate.can_abort),
            why_no_abort=gate.why_not.get("abort", "") if gate else "",
        )
        before, shown = self._state, self._view.decision
        unseen = monotonic - self._evidence_at
        if (
            around.blind
            and shown
            and self._decided_under == self._override_revision
            and unseen < self._settings.blind_after_seconds
        ):
            # One late answer is no blindness: what was decided stands for now.
            decision = replace(shown, action=None, probe=False, operation=None)
        else:
            decision, self._state = decide(
                snapshot, self._state, self._settings.policy, around, now, self._chance
            )
            self._decided_under = self._override_revision
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
        if await self._act(decision, burst, around, monotonic, now):
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

    def _blind(self, burst: Burst) -> str | None:
        """Why the policy cannot see enough to change anything, or None."""
        if burst.cache is None:
            return "the cache does not answer: holding"
        if burst.engine is None:
            return "the engine does not answer: holding"
        if burst.status is None:
            return "the cache's status does not answer: holding"
        return None

    async def _act(
        self,
        decision: Decision,
        burst: Burst,
        around: Surroundings,
        monotonic: float,
        now: float,
    ) -> bool:
        """Have the admission in force that was decided; True when the gate says it is."""
        if burst.cache is None or not has_gate(burst.cache) or self._reconciler.status is None:
            return False
        enforce = self._settings.mode == "enforce" and around.foreign_holder is None
        wanted: Wanted | None
        if decision.admission is not None and (enforce or self._override is not None):
            wanted = self._reconciler.wanted(
                decision.admission, decision.reason, self._override, now
            )
        elif (
            decision.admission is None
            and enforce
            and around.blind is not None
            and not self._persons_word_ended()
            and monotonic - self._evidence_at < self._settings.stop_renewing_after_seconds
        ):
            wanted = self._wanted  # hold what is there, and keep its lease
        elif self._must_let_go(around):
            wanted = Wanted(
                Admission(), self._settings.holder, "no longer held: back to the default", 1.0
            )
        else:
            return False
        if wanted is None:
            return False
        was = self._reconciler.status.share
        done = await self._reconciler.apply(
            wanted,
            burst.status.prefetch_slots(self._estimator.bytes_per_load) if burst.status else None,
        )
        self._wanted = wanted
        self._follow_share(self._reconciler.status)
        self._chronicle.outcome(wanted, was, None if done else self._reconciler.error)
        if decision.probe and done and enforce:
            await self._reconciler.probe(PROBE_CHUNKS, PROBE_MAX_BYTES, PROBE_DEADLINE_SECONDS)
        return done

    def _follow_share(self, gate: GateStatus | None) -> None:
        """Evidence on loads begins anew when L2 leaves the path and when it comes back,
        whoever did it: what loads did before says nothing about them now."""
        if gate is None:
            return
        out = gate.share == 0
        if self._was_out is not None and out != self._was_out:
            self._since = self._monotonic()
        self._was_out = out

    def _must_let_go(self, around: Surroundings) -> bool:
        """A hold that was set through this guard still stands, and nobody wants it: a
        person's word has ended, or the guard only observes."""
        status = self._reconciler.status
        if self._override is not None or around.foreign_holder is not None or status is None:
            return False
        if status.holder is None:
            return False
        observing = self._settings.mode == "observe" and self._wanted is not None
        return observing or self._persons_word_ended()

    def _persons_word_ended(self) -> bool:
        """The gate still holds what a person said through this guard, and they took it
        back or it ran out."""
        status = self._reconciler.status
        return (
            self._override is None
            and status is not None
            and status.holder is not None
            and status.holder.startswith("person:")
        )

    # memory and words ---------------------------------------------------------------

    def _expire_override(self, now: float) -> None:
        word = self._override
        if word is not None and now >= word.expires_at:
            self._override = None
            self._override_revision += 1
            self._journal.write(
                "override", action="expired", who=word.who, reason=f"{word.mode} ran out"
            )

    def _save(self) -> None:
        self._memory.save(self._state, self._override, self._override_revision, self._healer.state)

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
            override=self._override,
            override_revision=self._override_revision,
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
        if foreign := self._reconciler.foreign_holder(self._override):
            return f"held by {foreign}"
        if error := self._chronicle.control_error:
            return f"not in force: {error}"
        return "gate"
