"""The guard beside a real engine, end to end. STRICT=1 takes the limits as written."""

from __future__ import annotations

import os
from pathlib import Path

from .acceptance import AcceptanceFailed, accept
from .stack import LAB_RUN, Stack


def test_the_guard_takes_a_slow_l2_out_and_lets_it_back_in(gated_stack: Stack) -> None:
    path = Path(os.environ.get("LAB_REPORT") or LAB_RUN / "acceptance.md")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        report = accept(gated_stack, strict=os.environ.get("STRICT") == "1").as_markdown()
    except AcceptanceFailed as failed:
        path.write_text(f"{failed}\n")
        raise
    path.write_text(report)
    print(f"\n{report}")
