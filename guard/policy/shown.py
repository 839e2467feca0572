"""A decision from a verdict: what is shown, and why."""

from __future__ import annotations

from guard.policy.types import Admission, Cause, Decision, State
from guard.policy.verdict import Verdict


def decision(
    shown: State,
    cause: Cause | None,
    admission: Admission | None,
    action: str | None,
    code: str,
    words: str,
    verdict: Verdict | None = None,
    probe: bool = False,
) -> Decision:
    """A Decision whose evidence is the verdict's."""
    evidence = verdict.evidence if verdict else {}
    return Decision(shown, cause, admission, action, code, words, evidence, probe)


def shown_state(verdict: Verdict) -> State:
    """How a verdict is called while L2 is in the path."""
    states: dict[str, State] = {
        "fine": "helping",
        "slow": "hurting",
        "frozen": "hurting",
        "overloaded": "overloaded",
        "idle": "idle",
        "unknown": "unknown",
    }
    return states[verdict.kind]
