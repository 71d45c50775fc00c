"""Arrays that cross to other processes arrive bit for bit, each receiver once, in an order that all can follow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.core.schedule import FORWARD, make_schedule
from uniap_jax.runtime.crossing import Cell, Crossing, carried, rounds_of, way_to
from uniap_jax.runtime.programs import Elsewhere
from uniap_jax.runtime.transfer import Outbox

SPECIAL = np.array([[0.0, -0.0, np.nan, np.inf], [1.5, -2.25, 1e-40, -np.inf]], np.float32)


def on(devices: tuple[int, ...], *spec: str) -> NamedSharding:
    return NamedSharding(Mesh(np.asarray([jax.devices()[d] for d in devices]), ("x",)), PartitionSpec(*spec))


def bits(array: Any) -> Any:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


@pytest.mark.parametrize(
    "value",
    [
        SPECIAL,
        SPECIAL.astype(jnp.bfloat16),
        np.array([[True, False], [False, True]]),
        np.array([[2**31 - 1, -(2**31)], [7, 0]], np.int32),
        "keys",
    ],
    ids=["float32", "bfloat16", "bool", "int32", "key"],
)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (on((0,)), on((4,))),
        (on((0, 1), "x"), on((4, 5), "x")),
        (on((0, 1)), on((2, 3, 4, 5, 6))),  # two senders, five receivers: three rounds
        (on((1, 2)), on((0, 1, 2, 3))),  # two of them have it already
    ],
    ids=["one", "cut", "wider", "overlap"],
)
def test_an_array_arrives_bit_for_bit(value: Any, source: NamedSharding, target: NamedSharding) -> None:
    value = jax.random.split(jax.random.key(3), 2) if isinstance(value, str) else value
    array = jax.device_put(value, source)
    shape = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=source)
    arrived = Crossing("test", shape, target)(array)
    assert arrived.dtype == array.dtype
    assert arrived.sharding.is_equivalent_to(target, arrived.ndim)
    want = {s.device: bits(s.data) for s in jax.device_put(array, target).addressable_shards}
    assert {s.device: bits(s.data) for s in arrived.addressable_shards} == want
    assert bits(array) == bits(jnp.asarray(value))  # still there


def test_a_scalar_and_a_scalar_key_arrive() -> None:
    for value in (jnp.float32(-0.0), jax.random.key(5)):
        array = jax.device_put(value, on((0, 1)))
        shape = jax.ShapeDtypeStruct((), array.dtype, sharding=array.sharding)
        arrived = Crossing("test", shape, on((2, 3)))(array)
        assert arrived.shape == ()
        assert bits(arrived) == bits(array)


@given(
    held=st.dictionaries(st.integers(0, 9), st.integers(0, 2), min_size=1),
    wanted=st.dictionaries(st.integers(0, 9), st.integers(0, 2)),
)
def test_every_receiver_is_served_once_and_nobody_sends_twice_in_a_round(
    held: dict[int, int], wanted: dict[int, int]
) -> None:
    def cells(found: dict[int, int]) -> dict[Any, Cell]:
        return {d: ((c, c + 1),) for d, c in found.items()}

    wanted = {d: c for d, c in wanted.items() if c in held.values()}
    devices = sorted({*held, *wanted})
    rounds = rounds_of(cells(held), cells(wanted), devices)
    served = [devices[receiver] for pairs in rounds for _, receiver in pairs]
    assert sorted(served) == sorted(d for d, c in wanted.items() if held.get(d) != c)
    for pairs in rounds:
        senders, receivers = zip(*pairs, strict=True)
        assert len(set(senders)) == len(senders)
        assert len(set(receivers)) == len(receivers)
        assert all(held[devices[a]] == wanted[devices[b]] for a, b in pairs)


def test_one_process_moves_arrays_without_a_program() -> None:
    source, target = on((0, 1)), on((2, 3))
    assert way_to("test", jax.ShapeDtypeStruct((2,), np.float32, sharding=source), target) is target
    array = jax.device_put(np.arange(2.0, dtype=np.float32), source)
    here, nowhere = carried([array, None], [target, None])
    assert here.sharding == target
    assert nowhere is None


def test_programs_of_others_return_none_in_lists_of_their_own() -> None:
    program = Elsewhere("theirs", [jax.ShapeDtypeStruct((), np.float32), [jax.ShapeDtypeStruct((), np.float32)] * 2])
    assert program([], []) == [None, [None, None]]
    assert program() is not program()
    assert not program.is_here


class Recorded(Crossing):
    """Notes when it is used."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __call__(self, array: Any) -> Any:
        self.log.append(self.name)
        return array


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_what_crosses_goes_when_its_sender_is_done(name: str) -> None:
    schedule, outbox, log = make_schedule(name, 2, 4), Outbox(), []
    boxes: dict[int, list[Any]] = {m: [None] for m in range(4)}
    for event in schedule.simulate():
        task = event.task
        outbox.turn((event.stage, task.kind, task.microbatch), event.start_s, event.end_s)
        log.append(f"{event.stage} {task}")
        if event.stage == 1 and task.kind == FORWARD:
            assert boxes[task.microbatch] == ["sent"]
        if event.stage == 0 and task.kind == FORWARD:
            way = Recorded(f"cross {task.microbatch}", log)
            outbox.post((1, FORWARD, task.microbatch), "sent", way, (boxes[task.microbatch], 0))
    for m in range(4):
        sent = log.index(f"cross {m}")
        assert log.index(f"0 forward({m})") < sent < log.index(f"1 forward({m})")
    if name == "gpipe":  # the first is on its way before the second is done, not after all four
        assert log.index("cross 0") < log.index("0 forward(1)")
