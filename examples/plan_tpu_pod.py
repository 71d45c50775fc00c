"""Plans a GPT of 1.3 billion parameters for TPU v5e:4x4 and compiles the plan, on a machine that has no TPU.

    python examples/plan_tpu_pod.py                      # needs jax[tpu] for the compiler; without it, the plan alone
    python examples/plan_tpu_pod.py --topology v5p:2x2x4
    python examples/plan_tpu_pod.py --topology h100:2x8  # needs jax[cuda13], and JAX_PLATFORMS=cpu where no driver is
    uniap-jax plan --step examples/plan_tpu_pod.py:build --topology v5e:4x4 --verify

Nothing is allocated: the state is described by `jax.eval_shape`. The layers are one `nn.scan`, so that sixteen chips on
four hosts run one program whose stages hold equal shares of it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state

import uniap_jax as uniap
from uniap_jax.core.absent import absent_devices
from uniap_jax.core.errors import ProfileError
from uniap_jax.runtime.verify import verify


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        width, kind = x.shape[-1], jnp.bfloat16
        attention = nn.MultiHeadDotProductAttention(self.heads, dtype=kind)
        x = x + attention(nn.LayerNorm(dtype=kind)(x), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * width, dtype=kind)(nn.LayerNorm(dtype=kind)(x)))
        return x + nn.Dense(width, dtype=kind)(hidden), None


class GPT(nn.Module):
    depth: int
    width: int
    heads: int
    vocabulary: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.width, dtype=jnp.bfloat16)(tokens)
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=self.depth,
        )
        x, _ = layers(self.heads)(x, nn.make_causal_mask(tokens))
        return nn.Dense(self.vocabulary, dtype=jnp.bfloat16)(nn.LayerNorm()(x))


def train_step(state: train_state.TrainState, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["tokens"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def build(
    depth: int = 24, width: int = 2048, heads: int = 16, vocabulary: int = 50304, sequence: int = 1024, size: int = 128
) -> tuple[Any, Any, dict[str, jax.ShapeDtypeStruct]]:
    """State, train step and batch, as shapes."""
    model = GPT(depth, width, heads, vocabulary)

    def create() -> train_state.TrainState:
        params = model.init(jax.random.key(0), jnp.zeros((1, sequence), jnp.int32))["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-4))

    rows = jax.ShapeDtypeStruct((size, sequence), jnp.int32)
    return jax.eval_shape(create), train_step, {"tokens": rows, "targets": rows}


def main(topology: str = "v5e:4x4", *, num_stages: int | str = 4, compiles: bool = True, **sizes: int) -> None:
    state, _, batch = build(**sizes)
    count = sum(x.size for x in jax.tree.leaves(state.params))
    started = time.perf_counter()
    cluster = uniap.load_cluster(topology)
    graph = uniap.trace(train_step, state, batch)
    plan = uniap.solve(uniap.estimate(graph, cluster), executor="program", num_stages=num_stages)
    print(f"{count / 1e9:.2f} billion parameters, planned in {time.perf_counter() - started:.0f} s")
    print(plan)
    if not compiles:
        return
    started = time.perf_counter()
    try:
        devices = absent_devices(cluster)
    except ProfileError as error:
        print(error)
        return
    found = verify(uniap.compile_plan(graph, plan, devices=devices), full_copies=False)
    print(f"compiled for {topology} in {time.perf_counter() - started:.0f} s")
    stage = found.stages[0]
    print(f"peak memory per device: {stage.compiled_bytes / 2**30:.2f} GiB compiled, ", end="")
    print(f"{stage.predicted_bytes / 2**30:.2f} GiB predicted")
    for what, number in found.programs[0].axes.items():
        print(f"{number:4d} {what}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e:4x4")
    main(parser.parse_args().topology)
