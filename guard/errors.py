"""Every error kvguard raises on purpose.

    KvguardError
    ├── SettingsError            wrong settings: flags, environment, YAML file         exit 2
    ├── ModelConfigError         a model's config.json that s cannot be derived from   exit 2
    ├── ListenError              a listener's address cannot be bound, or is unsafe    exit 3
    ├── StateDirectoryError      the state directory cannot be used                    exit 4
    ├── ExpositionError          a body that is no Prometheus text exposition
    │   └── MalformedLineError   a line of a wanted metric that cannot be read
    ├── SourceError              a peer did not give its facts
    │   ├── SourceUnreachable    no connection, or no answer within the time limit
    │   ├── SourceRefused        an HTTP status other than 200, or a redirect elsewhere
    │   ├── SourceTooLarge       the body or its sample count is over the limit
    │   └── SourceUnreadable     the body is not what this peer is known to answer
    ├── ControlError             the gate did not do what it was asked
    │   ├── ControlUnreachable   no connection, or no answer within the time limit
    │   ├── ControlRefused       the gate said no (400, 403, 404); carries its reason
    │   └── ControlConflict      someone else wrote first (409); carries the current state
    └── GuardUnreachable         a command found no guard to talk to                   exit 12

Each message says what was wrong, where, and what to do. Only the command line turns
an error into an exit code; the loop never ends because of a peer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class KvguardError(Exception):
    """Base of all errors of kvguard; `exit_code` is what the command line ends with."""

    exit_code: ClassVar[int] = 1


class SettingsError(KvguardError):
    """Settings that cannot be used: an unknown key, a malformed URL, no YAML."""

    exit_code = 2


class ModelConfigError(KvguardError):
    """A model configuration from which KV bytes per token cannot be derived."""

    exit_code = 2


class ListenError(KvguardError):
    """A listen address that is taken, cannot be bound, or would expose the switch."""

    exit_code = 3


class StateDirectoryError(KvguardError):
    """The state directory cannot be created or written."""

    exit_code = 4


class ExpositionError(KvguardError):
    """A body that is not a Prometheus text exposition; says what came instead."""


class MalformedLineError(ExpositionError):
    """A sample line of a wanted metric that cannot be read; says which line."""


class SourceError(KvguardError):
    """A peer did not give its facts. `kind` is a short stable word for labels."""

    kind: ClassVar[str] = "error"


class SourceUnreachable(SourceError):
    """No connection to the peer, or no whole answer within the time limit."""

    kind = "unreachable"


class SourceRefused(SourceError):
    """The peer answered with a status other than 200, or sent us to another host."""

    kind = "refused"


class SourceTooLarge(SourceError):
    """The answer is larger than the body or sample limit."""

    kind = "too_large"


class SourceUnreadable(SourceError):
    """The answer is not what this peer is known to send."""

    kind = "unreadable"


class ControlError(KvguardError):
    """A control call did not have its effect. `kind` is a short stable word for labels."""

    kind: ClassVar[str] = "error"


class ControlUnreachable(ControlError):
    """The gate's control route did not answer in time; whether it acted is unknown."""

    kind = "unreachable"


class ControlRefused(ControlError):
    """The gate refused the call and said why."""

    kind = "refused"


class ControlConflict(ControlError):
    """Someone else wrote since the revision we had read; `current` is the state now."""

    kind = "conflict"

    def __init__(self, message: str, current: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.current: Mapping[str, Any] | None = current


class GuardUnreachable(KvguardError):
    """A command found no guard at its address."""

    exit_code = 12
