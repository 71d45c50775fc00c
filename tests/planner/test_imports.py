"""The planner and what it needs of the core load without JAX, and without the solver."""

import subprocess
import sys

import pytest

CODE = """
import sys, types
package = types.ModuleType("uniap_jax")
package.__path__ = [{path!r}]
sys.modules["uniap_jax"] = package  # the package's own face may import jax; the planner may not
import uniap_jax.planner
found = sorted(m for m in ("jax", "jaxlib", "flax", "optax", "mip", "scipy") if m in sys.modules)
print(found)
"""


def test_planner_loads_no_jax_and_no_solver(root):
    code = CODE.format(path=str(root / "uniap_jax"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["child", "cbc", "highs"])
def test_a_solver_imports_nothing_of_the_package(root, name):
    path = root / "uniap_jax" / "planner" / f"{name}.py"
    assert "import uniap_jax" not in path.read_text()
    assert "from uniap_jax" not in path.read_text()
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='loaded'); print('uniap_jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
