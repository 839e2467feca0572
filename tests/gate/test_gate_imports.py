"""What the gate's files import: they run in a program that has none of our dependencies."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GATE = ROOT / "guard" / "gate"
FILES = sorted(GATE.glob("*.py"))
HOSTS = ("lmcache",)


def host_of(path: Path) -> str | None:
    return next((h for h in HOSTS if path.stem == h or path.stem.startswith(h + "_")), None)


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            assert node.module is not None
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_only_the_standard_library_prometheus_client_and_the_own_host(path: Path) -> None:
    allowed = sys.stdlib_module_names | {"prometheus_client"}
    for name in imported(path):
        top = name.partition(".")[0]
        if top == "guard":
            assert name.startswith("guard.gate."), f"{path.name} imports {name}"
            target = host_of(GATE / (name.removeprefix("guard.gate.") + ".py"))
            assert target in (None, host_of(path)), f"{path.name} imports {name}"
        else:
            assert top in allowed or top == host_of(path), f"{path.name} imports {name}"


@pytest.mark.parametrize("name", ["ledger", "admission", "known", "probe_state"])
def test_what_knows_no_host_does_not_even_load_prometheus_client(name: str) -> None:
    code = (
        f"import sys; import guard.gate.{name}\n"
        "print(*sorted(m for m in sys.modules if m.partition('.')[0] in"
        " ('guard', 'prometheus_client')))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = ran.stdout.split()
    assert f"guard.gate.{name}" in loaded
    assert all(m in ("guard", "guard.gate") or m.startswith("guard.gate.") for m in loaded)


def test_the_packages_on_the_way_are_empty() -> None:
    for path in (ROOT / "guard" / "__init__.py", GATE / "__init__.py"):
        body = ast.parse(path.read_text()).body
        assert all(isinstance(node, ast.Expr) for node in body), f"{path} has code"
