"""The guard beside a real engine, end to end. STRICT=1 takes the limits as written."""

from __future__ import annotations

import os
from pathlib import Path

from .acceptance import AcceptanceFailed, accept
from .stack import LAB_RUN, Stack

HEAD = """# The last acceptance run

`make soak` writes this page; `make lab-test` does the same run with its limits times 1.5.
The real stack of `tests/lab` on two cores: vLLM, LMCache with the gate, Redis behind a link
that is throttled and frozen; six prefixes of 1 000 to 3 000 tokens, two requests at a time.
P is the median time to first token while L2 is bypassed by hand, so what recomputing costs.

"""


def test_the_guard_takes_a_slow_l2_out_and_lets_it_back_in(gated_stack: Stack) -> None:
    path = Path(os.environ.get("LAB_REPORT") or LAB_RUN / "acceptance.md")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        report = accept(gated_stack, strict=os.environ.get("STRICT") == "1").as_markdown()
    except AcceptanceFailed as failed:
        path.write_text(f"{failed}\n")
        raise
    path.write_text(HEAD + report)
    print(f"\n{report}")
