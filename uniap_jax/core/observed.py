"""What was seen of a plan after it was compiled and run, to be put beside what was predicted."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from uniap_jax.core.schedule import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Measurements of a plan; every field is empty where nobody looked.

    Attributes:
        compiled_bytes: per stage, peak bytes of one device by the compiled programs.
        live_bytes: per stage, most bytes that a device of it reported in use; () where the platform does not tell.
        step_times_s: of each step, the first one (which compiles) left out.
        events: passes of one step with a clock on each, in seconds from its start.
    """

    compiled_bytes: tuple[float, ...] = ()
    live_bytes: tuple[float, ...] = ()
    step_times_s: tuple[float, ...] = ()
    events: tuple[Event, ...] = ()

    @property
    def step_time_s(self) -> float | None:
        """Median of the steps, None where none was timed."""
        return statistics.median(self.step_times_s) if self.step_times_s else None


NOTHING = Observed()
