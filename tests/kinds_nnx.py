"""Small nnx models for `model_kinds`: experts of several ways to route, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from kinds_support import VOCABULARY, WIDTH, Built, cross_entropy, normal, tokens


class Experts(nnx.Module):
    """Four experts, two for each token, and a loss that balances them over the batch."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.router = nnx.Linear(WIDTH, 4, use_bias=False, rngs=rngs)
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Param(init(rngs.params(), (4, WIDTH, 2 * WIDTH)))
        self.down = nnx.Param(init(rngs.params(), (4, 2 * WIDTH, WIDTH)))

    def __call__(self, x: Any) -> tuple[Any, Any]:
        chances = jax.nn.softmax(self.router(x))
        weight, chosen = jax.lax.top_k(chances, 2)
        picked = jax.nn.one_hot(chosen, 4)
        gate = jnp.einsum("bsk,bske->bse", weight / weight.sum(-1, keepdims=True), picked)
        hidden = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, self.up[...]))
        out = jnp.einsum("bsef,efd,bse->bsd", hidden, self.down[...], gate)
        return out, 4.0 * (chances.mean((0, 1)) * picked.sum(2).mean((0, 1))).sum()


class Mixture(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(3)])
        self.experts = nnx.List([Experts(rngs) for _ in range(3)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, x: Any) -> tuple[Any, Any]:
        x, balance = self.table(x), jnp.float32(0.0)
        for norm, experts in zip(self.norms, self.experts, strict=True):
            out, extra = experts(norm(x))
            x, balance = x + out, balance + extra
        return self.head(x), balance


def nnx_step(loss_of: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def train_step(state: Any, batch: Any) -> Any:
        model, optimizer = state
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        return (model, optimizer), {"loss": loss}

    return train_step


def experts() -> Built:
    def loss_of(model: Any, batch: Any) -> Any:
        out, balance = model(batch["x"])
        return cross_entropy(out, batch["y"]).mean() + 0.01 * balance

    model = Mixture(nnx.Rngs(0))
    state = model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    return state, nnx_step(loss_of), {"x": tokens(0), "y": tokens(1)}


class Sorted(Experts):
    """Tokens sorted by expert and written into the places that each expert has, two experts a token."""

    places = 48

    def __call__(self, x: Any) -> tuple[Any, Any]:
        tokens = x.reshape(-1, WIDTH)
        chances = jax.nn.softmax(self.router(tokens))
        weight, chosen = jax.lax.top_k(chances, 2)
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        expert, token = chosen.reshape(-1)[order], order // 2
        place = jnp.arange(len(order)) - jnp.searchsorted(expert, jnp.arange(4))[expert]
        taken = jnp.zeros((4, self.places, WIDTH)).at[expert, place].set(tokens[token], mode="drop")
        hidden = jax.nn.silu(jnp.einsum("epd,edf->epf", taken, self.up[...]))
        given = jnp.einsum("epf,efd->epd", hidden, self.down[...]).at[expert, place].get(mode="fill", fill_value=0.0)
        out = jnp.zeros_like(tokens).at[token].add(given * weight.reshape(-1)[order][:, None])
        balance = 4.0 * (chances.mean(0) * jax.nn.one_hot(chosen, 4).sum(1).mean(0)).sum()
        return out.reshape(x.shape), balance


def routed() -> Built:
    state, train_step, batch = experts()
    model = state[0]
    model.experts = nnx.List([Sorted(nnx.Rngs(i)) for i in range(3)])
    return (model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)), train_step, batch


class Dropped(nnx.Module):
    """Dropout whose counter lives in the model and moves on in the loss."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + self.dropout(jax.nn.relu(layer(self.norm(x))))
        return x


def nnx_dropout() -> Built:
    model = Dropped(nnx.Rngs(0))
    state = model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    return state, nnx_step(lambda model, batch: jnp.mean((model(batch) - 1.0) ** 2)), normal(0, WIDTH)
