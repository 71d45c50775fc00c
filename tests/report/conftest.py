"""A plan to show."""

from plan_support import plan

__all__ = ["plan"]
