"""Measurements on disk: a small JSON file each, checksummed, written by rename; a damaged one is measured again."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from uniap_jax.core.serialize import write_atomically

log = logging.getLogger("uniap_jax")
SCHEMA = 1
MAX_ENTRY_BYTES = 1 << 20


def default_dir() -> Path:
    """The user's cache folder for profiles."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("uniap-jax")) / "profiles"


class Cache:
    """Numbers by facts: the facts (layer, strategy, shapes, versions, device kind) are the key.

    Args:
        folder: where files are kept; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, facts: Mapping[str, Any]) -> dict[str, Any] | None:
        """What was stored for these facts; None where nothing was, or where the file is damaged."""
        path = self._path(facts)
        if path is None or not path.is_file() or path.stat().st_size > MAX_ENTRY_BYTES:
            return None
        try:
            entry = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError) as error:
            log.warning("cached measurement %s cannot be read (%s); measuring again", path, error)
            return None
        numbers = entry.get("numbers")
        if entry.get("checksum") != _checksum(facts, numbers) or not isinstance(numbers, dict):
            log.warning("cached measurement %s is damaged; measuring again", path)
            return None
        return numbers

    def put(self, facts: Mapping[str, Any], numbers: Mapping[str, Any]) -> None:
        """Stores numbers; a folder that cannot be written costs the next run its time, not this one its result."""
        path = self._path(facts)
        if path is None:
            return
        entry = {"schema": SCHEMA, "facts": facts, "numbers": numbers, "checksum": _checksum(facts, numbers)}
        try:
            write_atomically(path, msgspec.json.encode(entry))
        except OSError as error:
            log.warning("measurement cannot be kept in %s (%s)", path, error)

    def _path(self, facts: Mapping[str, Any]) -> Path | None:
        return None if self._folder is None else self._folder / f"{_digest(facts)}.json"


def _digest(value: Any) -> str:
    text = msgspec.json.encode([SCHEMA, value], order="deterministic")
    return hashlib.sha256(text).hexdigest()[:32]


def _checksum(facts: Mapping[str, Any], numbers: Any) -> str:
    return _digest([facts, numbers])
