"""A layer that no memory holds is no crash: its entries are marked, and nothing is planned with them."""

import jax
import jax.numpy as jnp
import pytest

import uniap_jax as uniap
from uniap_jax.core.errors import ExecutionError, InfeasibleError

HUGE = (1 << 20, 1 << 22)  # float32s: 16 TiB an example


def huge(x, _):
    spread = x[:, :1, None] + jax.lax.broadcasted_iota(jnp.float32, HUGE, 1)
    return x + jnp.sort(spread)[:, 0, :1], None  # sorting needs the whole array


def train_step(params, batch):
    def loss(params):
        x = jnp.tanh(batch @ params["a"])
        x = jnp.tanh(x @ params["b"])
        x, _ = jax.lax.scan(huge, x, length=2)  # a loop is one layer
        return jnp.mean((x @ params["c"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def small_step(params, batch):
    value, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(batch @ p["a"]) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.fixture(scope="module")
def graph():
    params = {name: jnp.full((16, 16), 0.1) for name in "abc"}
    return uniap.trace(train_step, params, jnp.ones((8, 16)))


@pytest.fixture(scope="module")
def found(graph, tmp_path_factory):
    if jax.__version_info__ >= (0, 12):
        pytest.skip("XLA's CPU compiler of jax 0.12 ends the process (SIGFPE) on loops over arrays of this size")
    devices = jax.devices()[:2]
    return uniap.profile(
        graph,
        uniap.local_cluster(devices),
        devices=devices,
        num_stages=1,
        num_microbatches=1,
        keeps=("all",),
        cache_dir=tmp_path_factory.mktemp("cache"),
    )


def test_xla_refuses_such_an_array():
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        jax.block_until_ready(jax.jit(lambda x: jnp.sort(x + jax.lax.broadcasted_iota(jnp.float32, HUGE, 1))[0])(1.0))


def test_its_entries_are_marked_and_the_others_measured(graph, found):
    origins = {}
    for key, cost in found.entries:
        origins.setdefault(key.signature, set()).add(cost.origin)
    assert {"does_not_fit"} in origins.values()
    assert any("measured" in kinds for kinds in origins.values())


def test_no_plan_is_made_with_it(graph, found):
    devices = jax.devices()[:2]
    costs = uniap.estimate(graph, uniap.local_cluster(devices), found)
    with pytest.raises(InfeasibleError):
        uniap.solve(costs, num_stages=1, num_microbatches=1)


def test_a_step_that_finds_no_memory_says_what_was_expected(monkeypatch):
    devices = jax.devices()[:2]
    cluster = uniap.local_cluster(devices)
    small = uniap.trace(small_step, {"a": jnp.ones((16, 16))}, jnp.ones((8, 16)))
    plan = uniap.solve(uniap.estimate(small, cluster), num_stages=1, num_microbatches=1)
    step = uniap.compile_plan(small, plan, devices=devices)

    def full(state, batch):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 GiB.\nand much more")

    monkeypatch.setattr(step, "_run", full)
    with pytest.raises(ExecutionError, match=r"expects .* of .* on its fullest stage .*Out of memory allocating 9 GiB"):
        step({"a": jnp.ones((16, 16))}, jnp.ones((8, 16)))
