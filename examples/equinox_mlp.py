"""An equinox model: the module itself is the pytree; what is no array stays outside the state.

python examples/equinox_mlp.py            # needs equinox
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import uniap_jax as uniap

TX = optax.adam(3e-3)


def build(depth: int = 8, width: int = 4096, size: int = 4096) -> tuple[Any, Any, dict[str, jax.Array]]:
    model = eqx.nn.MLP(8, "scalar", width, depth, activation=jax.nn.gelu, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def train_step(state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        def loss_fn(params: Any) -> jax.Array:
            predicted = jax.vmap(eqx.combine(params, static))(batch["x"])
            return jnp.mean((predicted - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
        return {"params": eqx.apply_updates(state["params"], updates), "opt_state": opt_state}, {"loss": loss}

    x = np.random.default_rng(0).normal(size=(size, 8)).astype(np.float32)
    batch = {"x": jnp.asarray(x), "y": jnp.asarray(np.sin(x[:, 0]) + x[:, 1])}
    return {"params": params, "opt_state": TX.init(params)}, train_step, batch


def main(steps: int = 20, **sizes: int) -> None:
    state, train_step, batch = build(**sizes)
    step = uniap.parallelize(train_step, source="described")
    state = step.place(state, batch)
    for number in range(steps):
        state, metrics = step(state, batch)
        print(f"step {number + 1:3d}  loss {float(metrics['loss']):.4f}")
    print(step.plan)


if __name__ == "__main__":
    main(depth=3, width=64, size=64)
