"""The planner and what it needs of the core load without JAX, and without the solver."""

import subprocess
import sys

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


def test_solver_child_imports_nothing_of_the_package(root):
    text = (root / "uniap_jax" / "planner" / "cbc.py").read_text()
    assert "uniap_jax" not in text.replace("uniap_jax.planner", "")
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='loaded'); print('uniap_jax' in sys.modules)"
    path = root / "uniap_jax" / "planner" / "cbc.py"
    done = subprocess.run([sys.executable, "-P", "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
