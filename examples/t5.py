"""T5 from transformers, trained as its users do: encoder and decoder, one embedding used three times.

python examples/t5.py            # needs transformers==4.57.6, the last line with Flax classes
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformers
from flax.training import train_state
from transformers.models.t5 import modeling_flax_t5

import uniap_jax as uniap


class _Numpy:
    """jax.numpy for transformers 4.57.6, which calls `clip` with an argument that JAX has dropped."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    @staticmethod
    def clip(x: jax.Array, a_min: Any = None, a_max: Any = None) -> jax.Array:
        return jnp.clip(x, a_min, a_max)


modeling_flax_t5.jnp = _Numpy()


class State(train_state.TrainState):
    rng: jax.Array


def train_step(state: State, batch: dict[str, jax.Array]) -> tuple[State, dict[str, jax.Array]]:
    rng = jax.random.fold_in(state.rng, state.step)

    def loss_fn(params: Any) -> jax.Array:
        inputs = {"input_ids": batch["source"], "decoder_input_ids": batch["decoder"]}
        logits = state.apply_fn(**inputs, params=params, dropout_rng=rng, train=True).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def make_batch(seed: int, size: int, vocabulary: int, length: int) -> dict[str, jax.Array]:
    source = np.random.default_rng(seed).integers(2, vocabulary, (size, length)).astype(np.int32)
    target = source[:, ::-1].copy()  # to be learned: the source backwards
    decoder = np.pad(target[:, :-1], ((0, 0), (1, 0)))
    return {"source": jnp.asarray(source), "decoder": jnp.asarray(decoder), "target": jnp.asarray(target)}


def build(
    depth: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 32128, length: int = 512, size: int = 32
) -> tuple[State, Any, dict[str, jax.Array]]:
    config = transformers.T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=width // heads,
        d_ff=4 * width,
        num_layers=depth,
        num_heads=heads,
        decoder_start_token_id=0,
    )
    model = transformers.FlaxT5ForConditionalGeneration(config, _do_init=False)
    params = jax.jit(lambda key: model.init_weights(key, model.input_shape))(jax.random.key(0))
    state = State.create(apply_fn=model.__call__, params=params, tx=optax.adafactor(1e-2), rng=jax.random.key(1))
    return state, train_step, make_batch(0, size, vocabulary, length)


def main(steps: int = 10, **sizes: int) -> None:
    state, _, batch = build(**sizes)
    step = uniap.parallelize(train_step, source="described")
    state = step.place(state, batch)
    for number in range(steps):
        state, metrics = step(state, batch)
        print(f"step {number + 1:3d}  loss {float(metrics['loss']):.4f}")
    print(step.plan)


if __name__ == "__main__":
    main(depth=2, width=64, heads=4, vocabulary=128, length=16, size=16)  # leave the numbers out for T5 base
