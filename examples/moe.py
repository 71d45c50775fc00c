"""A mixture of experts: every token goes to two of several networks, with a loss that keeps them equally busy.

python examples/moe.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

import uniap_jax as uniap


class Experts(nn.Module):
    experts: int
    top: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        width, init = x.shape[-1], nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (self.experts, width, 2 * width))
        down = self.param("down", init, (self.experts, 2 * width, width))
        share = nn.softmax(nn.Dense(self.experts, use_bias=False)(x))
        best, chosen = jax.lax.top_k(share, self.top)
        gate = (jax.nn.one_hot(chosen, self.experts) * best[..., None]).sum(-2)  # zero where not chosen
        hidden = nn.gelu(jnp.einsum("bsw,ewh->bseh", x, up))
        y = jnp.einsum("bseh,ehw,bse->bsw", hidden, down, gate)
        # per example, so that the loss stays a mean over examples and the batch may be cut into micro-batches
        busy = (gate > 0).astype(x.dtype).mean(1) * share.mean(1) * self.experts
        return y, busy.sum(-1)


class MoE(nn.Module):
    depth: int
    width: int
    experts: int
    vocabulary: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, balance = nn.Embed(self.vocabulary, self.width)(tokens), jnp.zeros(tokens.shape[0])
        for _ in range(self.depth):
            mask = nn.make_causal_mask(tokens)
            x = x + nn.MultiHeadDotProductAttention(self.width // 16)(nn.LayerNorm()(x), mask=mask)
            y, more = Experts(self.experts)(nn.LayerNorm()(x))
            x, balance = x + y, balance + more
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(x)), balance / self.depth


def train_step(state: train_state.TrainState, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
    def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
        logits, balance = state.apply_fn({"params": params}, batch["tokens"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
        return loss + 0.01 * balance.mean(), loss

    (_, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def build(
    depth: int = 12, width: int = 1024, experts: int = 8, vocabulary: int = 32000, sequence: int = 1024, size: int = 64
) -> tuple[train_state.TrainState, Any, dict[str, jax.Array]]:
    rows = (np.random.default_rng(0).integers(0, vocabulary, (size, 1)) + np.arange(sequence + 1)) % vocabulary
    batch = {"tokens": jnp.asarray(rows[:, :-1], jnp.int32), "targets": jnp.asarray(rows[:, 1:], jnp.int32)}
    model = MoE(depth, width, experts, vocabulary)
    params = jax.jit(model.init)(jax.random.key(0), batch["tokens"][:1])["params"]
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3)), train_step, batch


def main(steps: int = 10, **sizes: int) -> None:
    state, _, batch = build(**sizes)
    step = uniap.parallelize(train_step, source="described")
    state = step.place(state, batch)
    for number in range(steps):
        state, metrics = step(state, batch)
        print(f"step {number + 1:3d}  loss {float(metrics['loss']):.4f}")
    print(step.plan)


if __name__ == "__main__":
    main(depth=2, width=64, experts=4, vocabulary=64, sequence=16, size=16)
