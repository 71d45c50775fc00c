"""The families of errors a user can meet; each is also the builtin it refines.

Every message says what happened, the values, the limit, the nearest thing that works and what to do.
The facts in the message are fields too, so that programs and tests need not parse prose.
"""

from __future__ import annotations

from typing import Any

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
"""What XLA's errors say where a program or an array found no memory."""


class UniapError(Exception):
    """Base of all errors raised on purpose by this package.

    Args:
        message: what happened, for people.
        **fields: the facts in the message, each readable as an attribute.
    """

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__} has no field {name!r}; it has {sorted(fields)}")


class TraceError(UniapError, ValueError):
    """The train step cannot be captured or cut into layers."""


class ProfileError(UniapError, ValueError):
    """A profile is missing, impossible, or belongs to something else."""


class InfeasibleError(UniapError, ValueError):
    """No plan satisfies the constraints; proved, not timed out."""


class NoPlanInTimeError(UniapError, TimeoutError):
    """The time limit passed before any plan was found; a plan may still exist."""


class SolverError(UniapError, RuntimeError):
    """The MIP solver crashed, lied or could not be loaded."""


class StrategyError(UniapError, ValueError):
    """A strategy is unknown, malformed or illegal for a layer or a sub-mesh."""


class PlanMismatchError(UniapError, ValueError):
    """A plan was made for another model, batch or set of devices."""


class ExecutionError(UniapError, RuntimeError):
    """A planned step could not be run."""


class OptionError(UniapError, ValueError):
    """An option has a value that does not exist; the message names the values that do."""
