"""What a fault must show, from what was seen while it lasted and after."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..load import Load, Request, quantile, summarize
from ..watch import Look
from .lookout import HEALTH_LIMIT_S, Lookout
from .outcome import Outcome
from .witness import Witness

SETTLED_SECONDS = 10.0
SERVED_RATIO = 1.4
BACK_SECONDS = 60.0
KV_SECONDS = 20.0
INCURABLE = "incurable"
RIGHT, WRONG, NOT_ASKED = "right", "WRONG", "not asked"
_FIGURE = re.compile(r"\d+(?:\.\d+)?")


def told(status: dict[str, Any]) -> str:
    """What a guard's status says of an ailment; empty when it says nothing."""
    healing = status.get("healing")
    if not isinstance(healing, dict):
        return ""
    words = [str(healing[name]) for name in ("ailment", "words") if healing.get(name)]
    if healing.get(INCURABLE):
        words.insert(0, f"{INCURABLE}: {healing[INCURABLE]}")
    return ": ".join(dict.fromkeys(words))


def judge_service(
    outcome: Outcome,
    load: Load,
    begin: float,
    settled: tuple[float, float],
    over: float,
    factor: float,
) -> None:
    """The median is of what began in `settled`: some time after the fault did, until L2
    worked again. `over` is when nobody looked any more; a request without a token by then
    counts with what it had waited, or a hang would look like no request at all."""
    asked = load.began(begin, over)
    # The last ones had no time to show anything.
    counted = [each for each in load.began(*settled) if each.first_token or over - each.start > 5]
    outcome.summary = summarize(asked)
    waiting = [each for each in load.in_flight(begin) if each.start < begin]
    outcome.worst_s = max((_waited(each, over) for each in [*waiting, *asked]), default=None)
    outcome.settled_p50 = quantile([_waited(each, over) for each in counted], 0.5)
    limit, ratio = SERVED_RATIO * factor, outcome.ratio
    outcome.check(
        f"served on: p50 from {SETTLED_SECONDS:.0f} s after it began",
        "no request" if ratio is None else f"{ratio:.2f} P of {len(counted)} requests",
        f"≤ {limit:.2g} P",
        ratio is not None and ratio <= limit,
    )


def judge_failed(outcome: Outcome, load: Load) -> None:
    """To be asked when the load has ended: none may have failed, those in flight included."""
    failed = [each for each in load.requests if each.error is not None]
    first = f": {failed[0].error}" if failed else ""
    outcome.failed = len(failed)
    outcome.check("no request failed", f"{len(failed)}{first}", "0", not failed)


def judge_health(
    outcome: Outcome, lookout: Lookout, begin: float, over: float, factor: float
) -> None:
    worst = lookout.worst_health(begin, over)
    limit = HEALTH_LIMIT_S * factor
    if worst is not None:
        asked = [each for each in lookout.health if begin <= each.at < over]
        unanswered = sum(each.error is not None for each in asked)
        outcome.health = f"{worst.seconds:.2f} s"
        if unanswered:
            outcome.health += f", {unanswered} of {len(asked)} not answered: {worst.error}"
    outcome.check(
        "the LMCache server answers /healthcheck",
        outcome.health,
        f"within {limit:g} s",
        worst is not None and worst.error is None and worst.seconds <= limit,
    )


def judge_told(outcome: Outcome, looks: Sequence[Look], factor: float) -> None:
    """L2 works again, or a page says why not; and what only a person can end is told."""
    said = list(dict.fromkeys(words for look in looks if (words := told(look.status))))
    # Words that differ in their figures alone are shown once.
    outcome.told = list({_FIGURE.sub("#", words): words for words in reversed(said)}.values())[::-1]
    pages = [words for words in said if words.startswith(INCURABLE)]
    limit, back = BACK_SECONDS * factor, outcome.back_after_s
    outcome.check(
        "L2 works again, or a page says why not",
        ("never" if back is None else f"{back:.1f} s") + "".join(f"; {words}" for words in pages),
        f"≤ {limit:g} s",
        back <= limit if back is not None else bool(pages),
    )
    if (wanted := outcome.fault.tells) is not None:
        outcome.check(
            "the guard tells what only a person can end",
            "; ".join(said) or "nothing",
            f"/{wanted}/",
            any(re.search(wanted, words, re.IGNORECASE) for words in said),
        )


def kv_state(witness: Witness) -> str:
    """RIGHT, WRONG, or that nothing could be loaded, which shows nothing."""
    if witness.loads_right(KV_SECONDS):
        return RIGHT
    return WRONG if witness.said[-1].intact is False else "not loaded"


def judge_kv(outcome: Outcome, witness: Witness, before: str, after: str, begin: float) -> None:
    """Right before and after, and nothing wrong in all that came back between."""
    between = [each for each in witness.said if each.at >= begin]
    loaded = [each for each in between if each.intact is not None]
    wrong = [each for each in loaded if not each.intact]
    words = [f"before {before}", f"{len(wrong)} of {len(loaded)} loads wrong", f"after {after}"]
    if witness.broken:
        words.append(f"the witness broke off: {witness.broken}")
    outcome.kv = ", ".join(words)
    right = before == RIGHT and after in (RIGHT, NOT_ASKED) and not wrong
    outcome.check("KV is right", outcome.kv, "right", right)


def _waited(request: Request, over: float) -> float:
    return (request.first_token or request.end or over) - request.start
