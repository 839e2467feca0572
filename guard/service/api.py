"""The HTTP API of `--listen`: status, the switch, and what the metrics listener has too."""

from __future__ import annotations

import html
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from guard.errors import ControlConflict, KvguardError
from guard.policy.types import DEFAULT_TTL_SECONDS, MAX_TTL_SECONDS
from guard.service import status as document
from guard.service.guarding import LocalOnly
from guard.service.metrics_app import PATHS, MetricsApp
from guard.view import Guard, View

# Letters, digits, punctuation and plain spaces: nothing a terminal or a log would obey.
Words = Annotated[
    str,
    StringConstraints(max_length=128, strip_whitespace=True, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$"),
]


class OverrideRequest(BaseModel):
    """A person's word: take L2 out, let it in, or leave it to the policy again."""

    model_config = ConfigDict(extra="forbid", strict=True)

    mode: Literal["bypass", "admit", "auto"]
    ttl_s: Annotated[float, Field(gt=0, le=MAX_TTL_SECONDS, allow_inf_nan=False)] = (
        DEFAULT_TTL_SECONDS
    )
    reason: Words = ""
    who: Words = ""
    if_revision: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _said_why(self) -> OverrideRequest:
        if not (self.reason.isprintable() and self.who.isprintable()):
            raise ValueError("reason and who must be printable text")
        if self.mode != "auto" and not self.reason:
            raise ValueError(f"a reason is needed to {self.mode}: the next person will ask")
        return self


def build(
    guard: Guard,
    interval: float,
    version: str,
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """The application of `--listen`. `interval` is the loop's in seconds, `clock` the
    monotonic clock of the view (for /healthz)."""
    app = FastAPI(title="kvguard", version=version, docs_url=None, redoc_url=None)
    app.add_middleware(LocalOnly)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _problem)
    metrics = MetricsApp(guard.view, interval, version, clock)

    async def plain(request: Request) -> Response:
        answer = metrics.answer(request.url.path, request.headers.get("accept"))
        return Response(answer.body, answer.status, {"content-type": answer.content_type})

    for path in PATHS:
        app.add_route(path, plain, methods=["GET"])

    @app.get("/", include_in_schema=False)
    async def summary() -> HTMLResponse:
        return HTMLResponse(_summary(guard.view()))

    @app.get("/api/v1/status")
    async def read_status() -> JSONResponse:
        """State, cause, mode, admission, override, all readings, all sources."""
        return JSONResponse(document.status(guard.view(), version))

    @app.get("/api/v1/override")
    async def read_override() -> JSONResponse:
        """The override in force, null when the policy decides."""
        return JSONResponse(_override(guard.view()))

    @app.post("/api/v1/override")
    async def set_override(wanted: OverrideRequest) -> JSONResponse:
        """Set the override (`bypass`, `admit`) or end it (`auto`). 409 and the present
        one when `if_revision` is stale; 422 says what is wrong with the request."""
        try:
            view = await guard.set_override(
                wanted.mode,
                who=wanted.who or "unnamed",
                reason=wanted.reason,
                ttl_seconds=None if wanted.mode == "auto" else wanted.ttl_s,
                if_revision=wanted.if_revision,
            )
        except ControlConflict as conflict:
            state = _override(guard.view())
            return JSONResponse({"error": str(conflict), "state": state}, status_code=409)
        except KvguardError as error:
            state = _override(guard.view())
            return JSONResponse({"error": str(error), "state": state}, status_code=502)
        return JSONResponse(_override(view))

    return app


def _override(view: View) -> dict[str, Any]:
    return {
        "schema": document.SCHEMA,
        "override": document.override(view.override),
        "revision": view.override_revision,
        "mode": view.mode,
        "control": view.control,
    }


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"] if part != "body")
        words = str(problem["msg"]).removeprefix("Value error, ")
        if problem["type"] == "json_invalid":
            name, words = "", f"the body is no JSON: {problem.get('ctx', {}).get('error', '')}"
        problems.append(f"{name}: {words}" if name else words)
    return JSONResponse({"error": "; ".join(problems)}, status_code=422)


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(
        {"error": error.detail}, status_code=error.status_code, headers=error.headers
    )


def _summary(view: View) -> str:
    decision = view.decision
    state, cause = document.state_of(view), document.cause_of(view)
    words = decision.reason if decision else "no tick yet"
    rows = [
        f"state: {state}" + (f" ({cause})" if cause else ""),
        f"why: {words}",
        f"mode: {view.mode}",
        f"control: {view.control}",
    ]
    if view.healing is not None:
        rows.append(f"healing: {view.healing.ailment}: {view.healing.words}")
        if view.healing.incurable is not None:
            rows.append(f"cannot be healed: {view.healing.incurable}")
    if view.override is not None:
        rows.append(
            f"override: {view.override.mode} by {view.override.who}: {view.override.reason}"
        )
    links = ("/api/v1/status", "/api/v1/override", "/metrics", "/healthz", "/readyz")
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>kvguard</title>"
        f"<h1>kvguard: {html.escape(state)}</h1>"
        f"<ul>{''.join(f'<li>{html.escape(row)}</li>' for row in rows)}</ul>"
        f"<p>{' '.join(f'<a href={link}>{link}</a>' for link in links)}</p></html>\n"
    )
