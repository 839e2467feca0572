"""A person's word: bypass or admit for a time, journalled, counted, and ended by its TTL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from guard.chronicle import JournalLike
from guard.errors import ControlConflict
from guard.policy.types import DEFAULT_TTL_SECONDS, MAX_TTL_SECONDS, Override, OverrideMode


class PersonsWord:
    """The override that lives, if any, and how often one was set, cleared or ran out.

    `own` is told who spoke, so that the hold they leave on the gate is known as one that
    was set through this guard.
    """

    def __init__(
        self,
        journal: JournalLike,
        own: Callable[[str], None],
        override: Override | None,
        revision: int,
    ) -> None:
        self._journal = journal
        self._own = own
        self.override = override
        self.revision = revision
        if override is not None:
            own(override.who)

    def say(
        self,
        mode: OverrideMode,
        *,
        who: str,
        reason: str,
        ttl_seconds: float | None,
        if_revision: int | None,
        now: float,
    ) -> None:
        """Set or clear (`auto`) the override; `now` is Unix time in seconds.

        Raises ControlConflict when `if_revision` is given and stale, ValueError for a TTL
        out of (0, 24 h].
        """
        ttl = DEFAULT_TTL_SECONDS if ttl_seconds is None else ttl_seconds
        if not 0 < ttl <= MAX_TTL_SECONDS:
            raise ValueError(f"ttl_s must be above 0 and at most {MAX_TTL_SECONDS:g}, not {ttl:g}")
        if if_revision is not None and if_revision != self.revision:
            raise ControlConflict(
                f"the override changed meanwhile: revision is {self.revision}, "
                f"not {if_revision}; read it again"
            )
        before = self.override
        self.revision += 1
        if mode == "auto":
            self.override = None
        else:
            self.override = Override(mode, who, reason, now, now + ttl, self.revision)
        for word in (before, self.override):
            if word is not None:
                self._own(word.who)
        self._journal.write(
            "override",
            action=mode,
            who=who,
            reason=reason,
            ttl_s=None if mode == "auto" else ttl,
            before=asdict(before) if before else None,
            after=asdict(self.override) if self.override else None,
        )

    def expire(self, now: float) -> None:
        """End it if its time is over."""
        word = self.override
        if word is not None and now >= word.expires_at:
            self.override = None
            self.revision += 1
            self._journal.write(
                "override", action="expired", who=word.who, reason=f"{word.mode} ran out"
            )
