"""GPipe by hand for the GPT of the demo: two equal stages of blocks, four data ways, embedding and head everywhere.

What `shard_map` tutorials show: stacked blocks split over an axis `stage`, a scan over ticks with `ppermute`, and
`jax.value_and_grad` through it. Dropout draws a key for each tick and stage, so losses are not those of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.by_hand import ByHand
from uniap_jax.demo_gpt import FULL, Block, Size

STAGES = 2


def gpipe(state: Any, batch: Any, devices: Sequence[jax.Device], *, pieces: int, size: Size = FULL) -> ByHand:
    """The jitted step with its state and batch in place.

    Args:
        state: of `demo_gpt.build`.
        batch: of it.
        devices: an even number.
        pieces: micro-batches.
        size: of the model.

    Raises:
        ValueError: blocks, devices or batch do not divide.
    """
    data = len(devices) // STAGES
    if size.num_layers % STAGES or len(devices) % STAGES or size.batch % (pieces * data):
        raise ValueError(f"{size.num_layers} blocks, {len(devices)} devices or batch {size.batch} do not divide")
    mesh = Mesh(np.asarray(devices, dtype=object).reshape(STAGES, data), ("stage", "data"))
    params = state.params
    blocks = [params[f"block_{i}"] for i in range(size.num_layers)]
    rest = {name: value for name, value in params.items() if not name.startswith("block_")}
    stacked = {"blocks": jax.tree.map(lambda *xs: jnp.stack(xs), *blocks), "rest": rest}

    def home(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        spec = PartitionSpec("stage") if any(getattr(p, "key", None) == "blocks" for p in path) else PartitionSpec()
        return NamedSharding(mesh, spec)

    start = {"params": stacked, "opt": state.tx.init(stacked), "step": jnp.zeros((), jnp.int32)}
    homes = jax.tree_util.tree_map_with_path(home, start)
    step = _train_step(mesh, state.tx, pieces, size)
    jitted = jax.jit(step, out_shardings=(homes, None), donate_argnums=0)
    placed = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(("stage", "data"))))
    return ByHand(step=jitted, state=jax.device_put(start, homes), batch=placed)


def _train_step(mesh: Mesh, tx: optax.GradientTransformation, pieces: int, size: Size) -> Any:
    run, norm = _pipeline(mesh, pieces, size), nn.LayerNorm()

    def head(rest: Any, x: jax.Array) -> jax.Array:
        normed: jax.Array = norm.apply({"params": rest["norm"]}, x)
        return normed @ rest["embed"]["embedding"].T

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        key = jax.random.fold_in(jax.random.key(2), state["step"])

        def loss(params: Any) -> jax.Array:
            rest = params["rest"]
            x = rest["embed"]["embedding"][batch["tokens"]] + rest["positions"]
            x = x.reshape(pieces, -1, *x.shape[1:])
            x = lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(None, "data")))
            x = run(params["blocks"], x, key)[-1].reshape(-1, *x.shape[2:])
            x = lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(("stage", "data"))))
            logits = head(rest, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "step": state["step"] + 1}, {"loss": value}

    return train_step


def _pipeline(mesh: Mesh, pieces: int, size: Size) -> Any:
    """`(blocks, [pieces, rows, sequence, width], key) -> [stages, pieces, rows, sequence, width]`; the last counts."""
    block, up = Block(size), [(s, s + 1) for s in range(STAGES - 1)]

    def stage(own: Any, entering: jax.Array, key: jax.Array) -> jax.Array:
        number = lax.axis_index("stage")

        def tick(held: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            fed = lax.dynamic_index_in_dim(entering, jnp.minimum(t, pieces - 1), 0, keepdims=False)
            keys = jax.random.split(jax.random.fold_in(key, t * STAGES + number), size.num_layers // STAGES)

            def one(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
                weights, dropout = layer
                return block.apply({"params": weights}, x, rngs={"dropout": dropout}), None

            x, _ = lax.scan(one, jnp.where(number == 0, fed, held), (own, keys))
            return lax.ppermute(x, "stage", up), x

        _, outs = lax.scan(tick, jnp.zeros_like(entering[0]), jnp.arange(pieces + STAGES - 1))
        return outs[STAGES - 1 :][None]

    whole, split = PartitionSpec(), PartitionSpec("stage")
    return jax.shard_map(
        stage, mesh=mesh, in_specs=(split, whole, whole), out_specs=split, axis_names={"stage"}, check_vma=False
    )
