"""Names that Flax models give to dimensions, and rules that keep them for some kinds of ways."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import meta
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

from runtime_support import assert_as_one_device
from uniap_jax import frontend
from uniap_jax.core.dims import tensor_split
from uniap_jax.core.errors import TraceError
from uniap_jax.core.sharding import layer_sharding
from uniap_jax.core.strategy import Strategy
from uniap_jax.frontend.names import leaf_names, parse_rules

E, F, V = 16, 64, 32
BATCH = {"x": np.random.RandomState(0).randn(8, 4, E).astype(np.float32), "y": np.arange(32).reshape(8, 4) % V}


class Boxed(nn.Module):
    """A block and a head whose kernels are boxed."""

    @nn.compact
    def __call__(self, x):
        def dense(width, *names):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
            return nn.Dense(width, kernel_init=init, use_bias=False)

        x = x + dense(E, "mlp", "embed")(nn.gelu(dense(F, "embed", "mlp")(x)))
        x = frontend.mark_layer(x, "block")
        return dense(V, "embed", "vocab")(x)


MODEL, TX = Boxed(), optax.sgd(0.1, momentum=0.9)
APPLY = MODEL.apply  # bound methods are equal to themselves only


def boxed_state(unbox=False):
    params = MODEL.init(jax.random.key(0), BATCH["x"])["params"]
    return TrainState.create(apply_fn=APPLY, params=nn.unbox(params) if unbox else params, tx=TX)


def boxed_step(state, batch):
    def loss_of(params):
        logits = state.apply_fn({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def split_of(graph, degree=2):
    """For each parameter's shape the dimension that tensor ways split."""
    found = {}
    for layer in graph.layers:
        for p, d in zip(layer.params, tensor_split(layer, degree).params, strict=True):
            found[graph.params[p].shape] = d
    return found


def stored_of(graph, strategy):
    return {
        graph.params[p].shape: spec
        for layer in graph.layers
        for p, spec in zip(layer.params, layer_sharding(graph, layer, strategy).stored, strict=True)
    }


def test_rules_keep_dimensions_from_tensor_ways():
    free = frontend.trace(boxed_step, boxed_state(), BATCH)
    assert split_of(free) == {(E, F): 1, (F, E): 0, (E, V): 1}
    rules = [("embed", None), ("mlp", None), ("vocab", "tensor")]
    kept = frontend.trace(boxed_step, boxed_state(), BATCH, logical_axis_rules=rules)
    assert split_of(kept) == {(E, F): None, (F, E): None, (E, V): 1}
    told = [tensor_split(layer, 2) for layer in kept.layers]
    assert any("logical_axis_rules keep" in text for split in told for text in (split.reason, *split.notes))
    assert split_of(kept.microbatch(2)) == split_of(kept)


def test_rules_keep_dimensions_from_fsdp_ways():
    free = stored_of(frontend.trace(boxed_step, boxed_state(), BATCH), Strategy(fsdp=4))
    assert free[(E, F)] == PartitionSpec(None, ("x0", "x1"))
    rules = {"embed": "fsdp", "mlp": "tensor", "vocab": ("tensor", "fsdp")}
    kept = stored_of(frontend.trace(boxed_step, boxed_state(), BATCH, logical_axis_rules=rules), Strategy(fsdp=4))
    assert kept[(E, F)] == PartitionSpec(("x0", "x1"), None)
    assert kept[(F, E)] == PartitionSpec(None, ("x0", "x1"))
    assert kept[(E, V)] == PartitionSpec(None, ("x0", "x1"))


def test_names_without_a_rule_are_told_once_and_free(caplog):
    with caplog.at_level(logging.INFO, logger="uniap_jax"):
        graph = frontend.trace(boxed_step, boxed_state(), BATCH, logical_axis_rules={"embed": None})
    (line,) = [r.message for r in caplog.records if "logical_axis_rules" in r.message]
    assert "'mlp', 'vocab'" in line or "'vocab', 'mlp'" in line
    assert split_of(graph) == {(E, F): 1, (F, E): 0, (E, V): 1}


def test_a_model_without_names_is_told(caplog):
    with caplog.at_level(logging.WARNING, logger="uniap_jax"):
        frontend.trace(boxed_step, boxed_state(unbox=True), BATCH, logical_axis_rules={"a": None})
    assert "no parameter names its dimensions" in caplog.text


def test_boxes_stay_and_a_mesh_of_the_users_own_does_not_disturb():
    graph = frontend.trace(boxed_step, boxed_state(), BATCH, logical_axis_rules={"mlp": "tensor", "embed": None})
    with jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"))):
        plan = {"graph": graph, "strategies": "fsdp=2,tensor=4"}
        _, state = assert_as_one_device(boxed_step, boxed_state, BATCH, **plan)
    box = state.params["Dense_0"]["kernel"]
    assert isinstance(box, meta.Partitioned)
    assert box.names == ("mlp", "embed")
    assert box.value.addressable_shards[0].data.shape == (F // 4, E)


@pytest.mark.parametrize("rules", [(("mlp", "model"),), {"mlp": ("tensor", "model")}])
def test_a_role_that_does_not_exist_is_refused(rules):
    with pytest.raises(TraceError, match="'mlp' to 'model'") as caught:
        parse_rules(rules)
    assert (caught.value.name, caught.value.role) == ("mlp", "model")


def test_rules_for_activations_split_no_parameter_and_several_add_up():
    assert parse_rules((("batch", "data"), ("mlp", "tensor"), ("mlp", "fsdp"))) == {
        "batch": frozenset(),
        "mlp": frozenset({"tensor", "fsdp"}),
    }


def test_names_of_nnx_variables():
    with nnx.use_eager_sharding(False):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        model = nnx.Linear(E, F, kernel_init=init, rngs=nnx.Rngs(0))
    names = leaf_names(nnx.split(model)[1])
    assert sorted(names, key=str) == [("embed", "mlp"), None]

    def step(model, batch):
        loss, grads = nnx.value_and_grad(lambda m: jnp.square(m(batch["x"])).sum(-1).mean())(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
        return loss

    graph = frontend.trace(step, model, {"x": BATCH["x"]}, logical_axis_rules={"mlp": None, "embed": "fsdp"})
    assert stored_of(graph, Strategy(fsdp=4))[(E, F)] == PartitionSpec(("x0", "x1"), None)
