"""From cost tables to a plan, with a proof. Knows no JAX."""

from uniap_jax.planner.engines import ENGINES
from uniap_jax.planner.executors import solve
from uniap_jax.planner.files import load_tables
from uniap_jax.planner.pins import Pinning
from uniap_jax.planner.search import Progress
from uniap_jax.planner.single import TablesResult, solve_file, solve_tables

__all__ = ["ENGINES", "Pinning", "Progress", "TablesResult", "load_tables", "solve", "solve_file", "solve_tables"]
