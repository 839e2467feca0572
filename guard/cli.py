"""The command line. Each command is declared here; its body is in guard.commands.

Every error that kvguard raises on purpose ends in one line on stderr and the exit code of
its class (docs/exit-codes.md); anything else is a defect and shows its traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from guard.errors import KvguardError

_DEFAULT_GUARD = "http://127.0.0.1:9469"
_EPILOG = (
    "Exit codes: 0 done; status: 0 idle or helping, 10 hurting, overloaded, bypassed or "
    "probing, 11 unknown; 12 no guard reachable; 1 refused or without effect; "
    "2 usage or settings; 3 a listener; 4 the state directory."
)

app = typer.Typer(
    name="kvguard",
    help="Guards an LLM engine against a KV cache tier (L2) that stopped paying.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

GuardUrl = Annotated[str, typer.Option("--guard", metavar="URL", help="the running guard")]
Json = Annotated[bool, typer.Option("--json", help="as JSON")]
Ttl = Annotated[
    str | None,
    typer.Option("--ttl", metavar="TIME", help="how long, at most 24h: 1800, 30m  [default: 30m]"),
]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="why, for the next person")]
Who = Annotated[str | None, typer.Option("--who", metavar="NAME", help="who  [default: you]")]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"kvguard {version('kvguard')}")
        raise typer.Exit(0)


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="show the version")
    ] = False,
) -> None:
    pass


@app.command(epilog=_EPILOG)
def run(
    engine: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="an engine; may be repeated  [http://127.0.0.1:8000]"),
    ] = None,
    cache: Annotated[str | None, typer.Option(metavar="URL", help="LMCache's HTTP server")] = None,
    mode: Annotated[
        str | None, typer.Option(metavar="observe|enforce", help="decide only, or also act")
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(metavar="tail|median|throughput", help="only tail yet"),
    ] = None,
    kv_bytes_per_token: Annotated[
        float | None, typer.Option(metavar="N", help="KV bytes per token, see kv-bytes")
    ] = None,
    prefill_rate: Annotated[
        float | None, typer.Option(metavar="N", help="tokens per second, instead of measuring")
    ] = None,
    interval: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="between ticks  [1]")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="API and switch  [127.0.0.1:9469]")
    ] = None,
    metrics_listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="metrics, health  [0.0.0.0:9470]")
    ] = None,
    token_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="not honoured yet: refused")
    ] = None,
    state_dir: Annotated[str | None, typer.Option(metavar="DIR", help="journal and state")] = None,
    holder: Annotated[
        str | None, typer.Option(metavar="NAME", help="signs leases  [kvguard:<hostname>]")
    ] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="settings as YAML")] = None,
    release_on_exit: Annotated[
        bool | None,
        typer.Option("--release-on-exit", help="give L2 back on SIGTERM, not when the lease ends"),
    ] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="log as JSON lines")] = False,
) -> int:
    """Watch an engine and its cache, and keep a slow L2 out of the request path."""
    from guard.commands.run import run as body

    flags: dict[str, Any] = {
        "engine": engine or None,
        "cache": cache,
        "mode": mode,
        "objective": objective,
        "kv_bytes_per_token": kv_bytes_per_token,
        "prefill_rate": prefill_rate,
        "interval": interval,
        "listen": listen,
        "metrics_listen": metrics_listen,
        "token_file": token_file,
        "state_dir": state_dir,
        "holder": holder,
        "config": config,
        "release_on_exit": release_on_exit,
    }
    return body({k: v for k, v in flags.items() if v is not None}, log_json)


@app.command(epilog=_EPILOG)
def status(guard: GuardUrl = _DEFAULT_GUARD, json: Json = False) -> int:
    """Is L2 helping? The verdict, its figures, and what is missing."""
    from guard.commands.client import show_status

    return show_status(guard, json)


@app.command(epilog=_EPILOG)
def bypass(
    ttl: Ttl = None,
    reason: Reason = "by hand, no reason given",
    who: Who = None,
    guard: GuardUrl = _DEFAULT_GUARD,
) -> int:
    """Take L2 out of the request path, for a while."""
    from guard.commands.client import set_override

    return set_override(guard, "bypass", ttl, reason, who)


@app.command(epilog=_EPILOG)
def admit(
    ttl: Ttl = None,
    reason: Reason = "by hand, no reason given",
    who: Who = None,
    guard: GuardUrl = _DEFAULT_GUARD,
) -> int:
    """Hold L2 in the request path, whatever the policy says, for a while."""
    from guard.commands.client import set_override

    return set_override(guard, "admit", ttl, reason, who)


@app.command(epilog=_EPILOG)
def auto(reason: Reason = "", who: Who = None, guard: GuardUrl = _DEFAULT_GUARD) -> int:
    """End an override: the policy decides again."""
    from guard.commands.client import set_override

    return set_override(guard, "auto", None, reason, who)


@app.command("kv-bytes", epilog=_EPILOG)
def kv_bytes(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="a model's config.json")],
    cache_dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="of the KV cache  [the model's]")
    ] = None,
    json: Json = False,
) -> int:
    """KV bytes per token (s) of a model."""
    from guard.commands.kv_bytes import show

    return show(config, cache_dtype, json)


def main() -> None:
    """The entry point `kvguard`."""
    try:
        code = app(standalone_mode=False)
    except KvguardError as error:
        _end(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:
        # Usage errors, whichever click typer brings; their text is a single line but for
        # the help page of a bare `kvguard`.
        words = getattr(error, "format_message", None)
        if words is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(words(), file=sys.stderr)
            sys.exit(2)
        _end(f"{words()} (see 'kvguard --help')", getattr(error, "exit_code", 2))
    sys.exit(code if isinstance(code, int) else 0)


def _end(words: str, code: int) -> None:
    print(f"kvguard: {' '.join(words.split())}", file=sys.stderr)
    sys.exit(code)
