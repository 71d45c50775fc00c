"""Bytes that kernels move, on programs whose kernels are known."""

import jax
import jax.numpy as jnp
import pytest

import uniap_jax as uniap
from dims_support import measure_work
from dims_support import shaped_layer as layer
from uniap_jax.core.described import Describer
from uniap_jax.core.strategy import Strategy
from uniap_jax.core.work import Traced

ROWS, WIDTH, WORDS = 1024, 32, 4096
LOGITS = 2 * ROWS * WORDS
"""Bytes in bfloat16; all other arrays are small beside them."""


def loss(w, x):
    """Over many words: all that counts is logits."""
    logits = (x @ w).astype(jnp.float32)
    shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    labels = jnp.zeros((ROWS, 1), jnp.int32)
    return [jnp.log(jnp.exp(shifted).sum(-1)) - jnp.take_along_axis(shifted, labels, 1)[:, 0]]


def moved(way, *, tpu):
    """Logits that a program moves in each direction, to half of one."""
    work = measure_work(layer(loss, [(WIDTH, WORDS)], [(ROWS, WIDTH)], jnp.bfloat16), keep="all", tpu=tpu)
    return [round(2 * getattr(p, way).sum() / LOGITS) / 2 for p in (work.forward, work.backward)]


def test_a_tpu_moves_logits_as_often_as_its_compiler_does():
    """Written once, and once in float32 to pick from; read for the sum and by each of two products.

    So it is in the HLO of a GPT's head for v5e, but that the two share a kernel less.
    """
    assert moved("fused_nbytes", tpu=True) == [4, 2]


def test_elsewhere_products_read_what_was_written_for_them():
    ahead, behind = moved("fused_nbytes", tpu=False)
    assert ahead > 4
    assert behind > 4


@pytest.mark.parametrize("tpu", [True, False])
def test_two_programs_hand_over_what_one_makes_again(tpu):
    assert sum(moved("nbytes", tpu=tpu)) > sum(moved("fused_nbytes", tpu=tpu))


def test_reductions_of_the_same_are_one_kernel():
    def work_of(reduce):
        return measure_work(layer(lambda w, x: [reduce(jnp.sin(x)) * w], [(1,)], [(64, 4096)]), keep="all")

    def largest(y):
        return jax.lax.stop_gradient(y.max(-1, keepdims=True))

    one = work_of(lambda y: y.sum(-1)).forward.fused_nbytes.sum()
    two = work_of(lambda y: y.sum(-1) + largest(y)[:, 0]).forward.fused_nbytes.sum()
    in_turn = work_of(lambda y: (y - largest(y)).sum(-1)).forward.fused_nbytes.sum()
    assert two == pytest.approx(one, rel=1e-2)
    assert in_turn == pytest.approx(2 * one, rel=1e-2)


def test_a_product_shares_no_kernel_with_a_reduction_of_what_it_reads():
    def both(w, x):
        return [x @ w + (x * w).sum(-1, keepdims=True)]

    moved = measure_work(layer(both, [(512, 512)], [(512, 512)]), keep="all").forward.fused_nbytes
    product, reduction, adding = 3, 2, 2  # arrays of that size
    assert moved.sum() == pytest.approx((product + reduction + adding) * 512 * 512 * 4, rel=1e-2)


def test_what_nobody_reads_is_not_computed():
    """Differentiating a maximum counts how often it is reached, though no gradient passes."""

    def work_of(w, x):
        return [(x - jax.lax.stop_gradient(x.max(-1, keepdims=True))).sum(-1) * w]

    moved = measure_work(layer(work_of, [(1,)], [(64, 4096)]), keep="all").forward.fused_nbytes
    assert moved.sum() == pytest.approx(2 * 64 * 4096 * 4, rel=1e-2)
    assert (moved > 1e6).sum() == 2


def test_a_layer_is_traced_once_however_its_positions_are_split(monkeypatch):
    traced = []
    real = Traced.__init__

    def counted(self, layer, *args, **options):
        traced.append(layer)
        real(self, layer, *args, **options)

    def step(w, x):
        def loss(w):
            return ((jnp.tanh(x @ w[0]) @ w[1]) ** 2).mean()

        value, grad = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, g: a - g, w, grad), value

    graph = uniap.trace(step, [jnp.ones((16, 32)), jnp.ones((32, 16))], jnp.ones((8, 32, 16)))
    monkeypatch.setattr(Traced, "__init__", counted)
    describer = Describer(graph, uniap.load_cluster("v5e:2x2"))
    for sequence in (True, False):
        describer.cost(graph.layers[0], Strategy(tensor=4, sequence=sequence), samples=8, fused=True)
    assert len(traced) == 2  # with the whole batch and with one row
