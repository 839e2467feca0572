"""A settings file: YAML that holds one mapping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from guard.errors import SettingsError

_LIMIT_BYTES = 1024 * 1024


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping a YAML file holds; an empty file is an empty mapping.

    Raises SettingsError: cannot be read, no YAML, no mapping, a key that is no text.
    """
    import yaml  # only who has a file pays for the parser

    try:
        with path.open("rb") as file:
            content = file.read(_LIMIT_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(content) > _LIMIT_BYTES:
        raise SettingsError(f"{path} is larger than 1 MiB: that is no settings file")
    try:
        document = yaml.safe_load(content)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise SettingsError(f"{path} is no YAML{where}: {' '.join(str(problem).split())}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise SettingsError(
            f"{path} must hold settings as 'key: value', it holds a {type(document).__name__}"
        )
    for part in (document, *(value for value in document.values() if isinstance(value, dict))):
        for key in part:
            if not isinstance(key, str):
                raise SettingsError(f"{path}: a setting's name must be text, not {key!r}")
    return document
