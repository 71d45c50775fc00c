"""A haiku model: `hk.transform` gives plain functions, and these are planned as any other.

python examples/haiku_lm.py            # needs dm-haiku
"""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import uniap_jax as uniap

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))


def build(
    depth: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50304, sequence: int = 512, size: int = 32
) -> tuple[Any, Any, dict[str, jax.Array]]:
    def logits_of(tokens: jax.Array) -> jax.Array:
        init = hk.initializers.VarianceScaling(1.0 / depth)
        x = hk.Embed(vocabulary, width)(tokens)
        mask = jnp.tril(jnp.ones((1, 1, sequence, sequence)))
        for _ in range(depth):
            h = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
            x = x + hk.MultiHeadAttention(heads, width // heads, w_init=init, model_size=width)(h, h, h, mask)
            h = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
            x = x + hk.Linear(width)(jax.nn.gelu(hk.Linear(4 * width)(h)))
        return hk.Linear(vocabulary)(hk.LayerNorm(-1, create_scale=True, create_offset=True)(x))

    model = hk.without_apply_rng(hk.transform(logits_of))

    def train_step(state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        def loss_fn(params: Any) -> jax.Array:
            logits = model.apply(params, batch["tokens"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, {"loss": loss}

    rows = (np.random.default_rng(0).integers(0, vocabulary, (size, 1)) + np.arange(sequence + 1)) % vocabulary
    batch = {"tokens": jnp.asarray(rows[:, :-1], jnp.int32), "targets": jnp.asarray(rows[:, 1:], jnp.int32)}
    params = jax.jit(model.init)(jax.random.key(0), batch["tokens"][:1])
    return {"params": params, "opt_state": TX.init(params)}, train_step, batch


def main(steps: int = 10, **sizes: int) -> None:
    state, train_step, batch = build(**sizes)
    step = uniap.parallelize(train_step, source="described")
    state = step.place(state, batch)
    for number in range(steps):
        state, metrics = step(state, batch)
        print(f"step {number + 1:3d}  loss {float(metrics['loss']):.4f}")
    print(step.plan)


if __name__ == "__main__":
    main(depth=2, width=64, heads=4, vocabulary=64, sequence=16, size=16)
