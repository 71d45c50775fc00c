import jax
import pytest

import cost_support
from uniap_jax.core.sharding import make_mesh
from uniap_jax.core.strategy import Strategy
from uniap_jax.profiler.programs import Case
from uniap_jax.profiler.window import successor, window_bytes

WEIGHTS = 2 * cost_support.WIDTH * cost_support.HIDDEN * 4


@pytest.fixture(scope="module")
def graph():
    return cost_support.graph()


def test_a_block_is_read_by_the_next_and_the_loss_by_nobody(graph):
    last = len(graph.layers) - 1
    assert successor(graph, last) is None
    twins = [i for i in range(last) if graph.layers[i].signature == graph.layers[i + 1].signature]
    assert successor(graph, twins[0]) == {0: 0}


@pytest.mark.parametrize("pieces", [1, 2])
def test_one_more_layer_adds_its_gradients_and_what_it_keeps(graph, pieces):
    cut = graph if pieces == 1 else graph.microbatch(pieces)
    layer = next(x for x in cut.layers if successor(cut, x.index) is not None)
    mesh = make_mesh(jax.devices()[:2])
    slope, rest = window_bytes(Case(graph=cut, layer=layer, strategy=Strategy(data=2), mesh=mesh), pieces)
    rows = cost_support.BATCH // pieces // 2
    kept = rows * cost_support.HIDDEN * 4  # the activation; the rest is made of it and of the inputs
    assert WEIGHTS <= slope <= 3 * WEIGHTS + 4 * kept
    assert rest < slope + 4 * WEIGHTS


def test_a_layer_of_its_own_kind_has_no_slope(graph):
    loss = graph.layers[-1]
    case = Case(graph=graph, layer=loss, strategy=Strategy(data=2), mesh=make_mesh(jax.devices()[:2]))
    assert window_bytes(case, 1) == (0.0, 0.0)
