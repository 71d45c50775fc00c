"""Time limits."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Counts from its creation.

    Attributes:
        limit_s: seconds until time is up.
        started: `time.monotonic` value.
    """

    limit_s: float
    started: float = field(default_factory=time.monotonic)

    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def left(self) -> float:
        """Seconds until time is up, at least zero."""
        return max(0.0, self.limit_s - self.spent())

    def expired(self) -> bool:
        """Whether time is up."""
        return self.spent() >= self.limit_s
