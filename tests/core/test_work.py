import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dims_support import measure_work
from dims_support import shaped_layer as layer

B, D, H = 8, 16, 64
F32 = 4


def mlp():
    return layer(lambda up, down, x: x + jnp.tanh(x @ up) @ down, [(D, H), (H, D)], [(B, D)])


def dots(work):
    return float(work.flops[[bool(d) for d in work.dtypes]].sum())


def test_flops_of_an_mlp_by_hand():
    work = measure_work(mlp(), keep="all", tensor=1)
    assert dots(work.forward) == 2 * 2 * B * D * H
    assert dots(work.backward) == 2 * dots(work.forward)


def test_recompute_adds_the_forward_that_the_backward_needs():
    plain, again = (measure_work(mlp(), keep=k, tensor=1) for k in ("all", "inputs"))
    assert dots(again.backward) == dots(plain.backward) + 2 * B * D * H  # tanh(x @ up), not the second product
    assert again.kept == B * D * F32  # its input alone


def test_kept_values_by_hand():
    work = measure_work(mlp(), keep="all", tensor=1)
    assert work.kept >= (B * D + B * H) * F32  # the input and tanh's result
    assert work.kept_split == 0.0
    assert work.fused == (B * D + B * H) * F32


def test_matrix_products_only():
    work = measure_work(mlp(), keep="dots", tensor=1)
    assert work.kept == (B * D + B * H) * F32 or work.kept == (B * D + B * H + B * D) * F32


def test_tensor_ways_split_the_width_and_leave_two_partial_sums():
    work = measure_work(mlp(), keep="all", tensor=4)
    assert work.forward.reduced == (B * D * F32,)
    assert work.backward.reduced == (B * D * F32,)
    assert work.kept_split >= B * H * F32
    assert all(split for split, dtype in zip(work.forward.split, work.forward.dtypes, strict=True) if dtype)


def test_what_depends_on_parameters_alone_is_made_again():
    cast = layer(lambda w, x: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32), [(D, D)], [(B, D)])
    work = measure_work(cast, keep="all", tensor=1)
    assert work.kept == B * D * 2  # the cast input, not the cast weight


def test_loops_and_integers_do_not_stop_the_count():
    def looped(w, x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0]

    work = measure_work(layer(looped, [(D, D)], [(B, D)]), keep="all", tensor=1)
    assert work.forward.flops.sum() >= 3 * 2 * B * D * D
    assert np.isfinite(work.backward.nbytes).all()


@pytest.mark.parametrize("tensor", [1, 2])
def test_working_memory_is_positive_and_shrinks_with_ways(tensor):
    work = measure_work(mlp(), keep="all", tensor=tensor)
    assert 0 < work.backward.transient_bytes(tensor) <= work.backward.transient_bytes(1)
