"""Settings: flags over environment (`KVGUARD_…`) over a YAML file over defaults.

All three speak the same tree: `policy.trip_ratio` is `trip_ratio` under `policy` in YAML
and `KVGUARD_POLICY__TRIP_RATIO` in the environment. A key nobody knows is an error that
names the nearest known one, wherever it stands.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from guard.addresses import listen_address, peer_url
from guard.control.token_file import read_token
from guard.errors import SettingsError
from guard.settings_errors import ENV_PREFIX, environment_keys, explain, unknown
from guard.yaml_file import read_yaml

DEFAULT_ENGINE = "http://127.0.0.1:8000"
DEFAULT_CACHE = "http://127.0.0.1:8080"


def _number(value: object) -> object:
    """A bool is an int to Python and a mistake in a settings file."""
    if isinstance(value, bool):
        raise ValueError("a number is wanted, not true or false")
    return value


def _items(value: object) -> object:
    """One string may hold several values, as environment variables must."""
    if isinstance(value, str):
        return [item for item in re.split(r"[,\s]+", value) if item]
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"text is wanted, not {type(value).__name__}")
    return value


def _holder(value: str) -> str:
    if not value.startswith("kvguard:") or not value.isprintable() or len(value) > 128:
        raise ValueError("a holder is 'kvguard:' and a name, at most 128 printable characters")
    return value


def _with_token(path: Path) -> Path:
    read_token(path)
    return path


def _known_objective(value: str) -> str:
    if value != "tail":
        raise ValueError(f"this version protects the tail only, not {value!r} yet; leave it out")
    return value


def _default_holder() -> str:
    name = "".join(c for c in socket.gethostname() if c.isprintable())
    return f"kvguard:{name or 'unnamed'}"[:128]


Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(_number)]
# One Annotated around the union: pydantic-settings before 2.5 cannot look into a nested one.
Known = Annotated[float | None, Field(gt=0, le=1e9), BeforeValidator(_number)]
Url = Annotated[str, BeforeValidator(lambda value: peer_url(_text(value)))]
Listen = Annotated[str, BeforeValidator(lambda value: listen_address(_text(value)))]


class PolicySettings(BaseModel):
    """The policy's constants; the only part that SIGHUP reloads."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    trip_ratio: Annotated[Number, Field(gt=0, le=1)] = 0.9
    """L2 is too slow when loads alone get less than this times break-even bandwidth."""
    return_ratio: Annotated[Number, Field(ge=1, le=10)] = 1.2
    """A probe or a load wins when it gets at least this times break-even bandwidth."""
    overload_trip: Annotated[Number, Field(gt=0, le=10)] = 1.0
    """Load utilisation ρ above which L2 is overloaded, if its backlog does not shrink."""
    overload_return: Annotated[Number, Field(gt=0, le=10)] = 0.7
    """Load utilisation ρ below which an overload counts as relieved."""
    min_loads: Annotated[Count, Field(ge=1, le=1000)] = 3
    """Loads needed in a window before it says anything about bandwidth."""
    window_seconds: Annotated[Number, Field(ge=5, le=600)] = 20.0
    """Length of the window that figures are taken over."""
    dwell_seconds: Annotated[Number, Field(ge=0, le=3600)] = 30.0
    """How long a bypass stands before the first probe; each further trip adds as much."""
    dwell_max_seconds: Annotated[Number, Field(ge=0, le=86400)] = 300.0
    """The longest dwell, however many trips there were."""
    confirm_seconds: Annotated[Number, Field(ge=0, le=300)] = 2.0
    """How long a verdict must hold before it is acted on."""
    probe_interval_seconds: Annotated[Number, Field(ge=1, le=3600)] = 5.0
    """Time between probes of a bypassed L2."""
    probe_interval_max_seconds: Annotated[Number, Field(ge=1, le=3600)] = 15.0
    """The longest time between probes, after losing ones."""
    probes_to_win: Annotated[Count, Field(ge=1, le=100)] = 3
    """Winning probes in a row before L2 is let back in."""
    return_shares: Annotated[
        tuple[Annotated[Number, Field(gt=0, le=1)], ...],
        BeforeValidator(_items),
        Field(min_length=1, max_length=20),
    ] = (0.05, 0.25, 0.5, 1.0)
    """Shares of lookups let through, step by step, on the way back; the last is 1."""
    return_step_seconds: Annotated[Number, Field(ge=1, le=3600)] = 5.0
    """How long each step of the way back lasts."""
    blind_after_seconds: Annotated[Number, Field(ge=1, le=3600)] = 10.0
    """Age of the evidence after which the guard is blind: it holds what is there."""
    stop_renewing_after_seconds: Annotated[Number, Field(ge=5, le=86400)] = 300.0
    """Age of the evidence after which a blind guard lets its lease run out."""

    @model_validator(mode="after")
    def _ordered(self) -> PolicySettings:
        for low, high in (
            ("trip_ratio", "return_ratio"),
            ("overload_return", "overload_trip"),
            ("dwell_seconds", "dwell_max_seconds"),
            ("probe_interval_seconds", "probe_interval_max_seconds"),
            ("blind_after_seconds", "stop_renewing_after_seconds"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} must not be above {high}")
        shares = self.return_shares
        if list(shares) != sorted(set(shares)) or shares[-1] != 1.0:
            raise ValueError("return_shares must rise and end with 1")
        return self


class GateSettings(BaseModel):
    """How the gate in the cache is led."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    lease_seconds: Annotated[Number, Field(ge=5, le=3600)] = 30.0
    """How long the gate keeps the guard's word without a renewal."""
    renew_seconds: Annotated[Number, Field(ge=1, le=1800)] = 5.0
    """Time between renewals; at most half the lease."""
    status_seconds: Annotated[Number, Field(ge=1, le=3600)] = 10.0
    """Time between reads of the gate's own status while nothing changes."""
    token_file: Annotated[Path, AfterValidator(_with_token)] | None = None
    """File with the token that the gate's `admission_token_file` asks for."""

    @model_validator(mode="after")
    def _renews_in_time(self) -> GateSettings:
        if self.renew_seconds > self.lease_seconds / 2:
            raise ValueError("renew_seconds must be at most half of lease_seconds")
        return self


class _Environment(EnvSettingsSource):
    """`KVGUARD_…`; a list may also be written as plain words, not only as JSON."""

    def decode_complex_value(self, field_name: str, field: Any, value: Any) -> Any:
        try:
            return json.loads(value)
        except ValueError:
            return value  # the field's own validation says what is wrong with it


class Settings(BaseSettings):
    """All settings of `kvguard run`. Build it with `load`, which turns every problem into
    a SettingsError of one line."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )

    engine: Annotated[list[Url], BeforeValidator(_items), Field(min_length=1, max_length=64)] = [
        DEFAULT_ENGINE
    ]
    """Base URLs of the engines to watch."""
    cache: Url | None = None
    """Base URL of LMCache's HTTP server; LMCache's default when no engine is given either."""
    mode: Literal["observe", "enforce"] = "observe"
    """`observe` decides and journals, `enforce` also acts."""
    objective: Annotated[
        Literal["tail", "median", "throughput"], AfterValidator(_known_objective)
    ] = "tail"
    """What the policy protects; this version knows `tail` only."""
    kv_bytes_per_token: Known = None
    """KV bytes a token takes in L2 (s), where it cannot be measured."""
    prefill_rate: Known = None
    """Prefill rate of the engine (R) in tokens per second, instead of measuring it."""
    interval: Annotated[Number, Field(ge=0.2, le=60)] = 1.0
    """Seconds between ticks."""
    listen: Listen = "127.0.0.1:9469"
    """Where the page, the API and the switch listen; loopback only."""
    metrics_listen: Listen = "0.0.0.0:9470"
    """Where /metrics, /healthz and /readyz listen for Prometheus and the kubelet."""
    token_file: Path | None = None
    """File with the token of a switch that is not on loopback."""
    state_dir: Path | None = None
    """Directory of journal and state; /var/lib/kvguard or ~/.local/state/kvguard if unset."""
    config: Path | None = None
    """The YAML file these settings were read from."""
    release_on_exit: bool = False
    """On SIGTERM give L2 back at once instead of leaving the lease to run out."""
    holder: Annotated[str, BeforeValidator(lambda value: _holder(_text(value)))] = Field(
        default_factory=_default_holder
    )
    """The name this guard signs its leases with."""
    policy: PolicySettings = PolicySettings()
    """The policy's constants."""
    gate: GateSettings = GateSettings()
    """How the gate in the cache is led."""

    @model_validator(mode="after")
    def _peers(self) -> Settings:
        if len(set(self.engine)) != len(self.engine):
            raise ValueError("the same engine is given twice")
        if not self.model_fields_set & {"engine", "cache"}:
            # Not through the model, so that the field still counts as not set by anyone.
            self.__dict__["cache"] = DEFAULT_CACHE
        return self

    @property
    def engine_is_default(self) -> bool:
        """Nobody named an engine: vLLM's default port is only where to look first."""
        return "engine" not in self.model_fields_set

    @property
    def cache_is_default(self) -> bool:
        """Nobody named a cache: LMCache's default port is only where to look first."""
        return self.cache is not None and "cache" not in self.model_fields_set

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then environment, then the YAML file that one of them names."""
        environment = _Environment(settings_cls)
        path = init_settings().get("config") or environment().get("config")
        layers: tuple[PydanticBaseSettingsSource, ...] = (init_settings, environment)
        if path:
            layers += (InitSettingsSource(settings_cls, init_kwargs=read_yaml(Path(path))),)
        return layers


def load(flags: Mapping[str, Any] | None = None) -> Settings:
    """The settings in force, `flags` (those that were given) first.

    Raises SettingsError: one line that names the key, where it stands, what is wrong,
    and for an unknown key the nearest known one.
    """
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    environment = environment_keys()
    for variable, key in environment.items():
        if key not in _KNOWN:
            raise SettingsError(unknown(key, f"environment variable {variable}", _KNOWN, variable))
    try:
        return Settings(**given)
    except ValidationError as error:
        raise SettingsError(explain(error, _KNOWN, given, environment)) from None


def known_keys() -> tuple[str, ...]:
    """Every setting by its dotted name."""
    return _KNOWN


def _walk(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _walk(field.annotation, f"{prefix}{name}.")


_KNOWN: tuple[str, ...] = tuple(_walk(Settings))


def describe_peers(settings: Settings) -> Sequence[str]:
    """The peers to watch, as lines for a person; says which are only default ports."""
    note = " (nobody named it: the default port)"
    lines = [f"engine {url}{note if settings.engine_is_default else ''}" for url in settings.engine]
    if settings.cache is None:
        return [*lines, "cache  none named: give --cache to measure L2"]
    return [*lines, f"cache  {settings.cache}{note if settings.cache_is_default else ''}"]
