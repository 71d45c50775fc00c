"""Which of a stage's arrays go to which other stages with every micro-batch, and how they get there."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from jax.sharding import NamedSharding

from uniap_jax.runtime.crossing import Way, programs_of, way_to
from uniap_jax.runtime.feed import Feeder
from uniap_jax.runtime.homes import Layout
from uniap_jax.runtime.programs import Program, shape_of
from uniap_jax.runtime.stages import StageSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """An array that a stage sends with every micro-batch.

    Attributes:
        source: position among what the stage sends in this direction.
        stage: that receives it.
        way: there.
        place: positions in what the receiver takes: of an input, or of a write and of its reader.
    """

    source: int
    stage: int
    way: Way
    place: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """Where a stage's arrays come from and go.

    Attributes:
        rows: positions of the batch's rows among the inputs.
        numbers: positions of the micro-batch's number.
        forward: its writes' routes to later stages.
        backward: its cotangents' routes to earlier stages.
        parts: for each active write, how many stages send a cotangent.
    """

    rows: tuple[int, ...]
    numbers: tuple[int, ...]
    forward: tuple[Route, ...]
    backward: tuple[Route, ...]
    parts: tuple[int, ...]

    @property
    def programs(self) -> list[Program]:
        """Those that take arrays to other processes."""
        return programs_of([route.way for route in (*self.forward, *self.backward)])


def routes(
    layout: Layout, specs: Sequence[StageSpec], feeder: Feeder, spec: StageSpec, pool: Executor | None = None
) -> Routes:
    """The routes of one stage.

    Args:
        layout: graph under its plan.
        specs: of all stages.
        feeder: of the batch.
        spec: of the stage.
        pool: compiles in the background.
    """
    writer = {v: other for other in specs for v in other.writes}
    first = {s.stage: len(s.params) + len(s.operands) for s in specs}
    own = len(spec.params)

    def way(what: str, v: int, stage: int, source: NamedSharding, target: NamedSharding) -> Way:
        name = f"{what}_{v}_from_stage_{spec.stage}_to_stage_{stage}"
        return way_to(name, shape_of(layout.graph.values[v], source), target, pool)

    ahead = [
        Route(
            source=i,
            stage=t,
            way=way("value", v, t, spec.leaves[i], target),
            place=(first[t] + specs[t].reads.index(v),),
        )
        for i, (v, readers) in enumerate(zip(spec.writes, spec.readers, strict=True))
        for t, target in readers
    ]
    back = []
    for i, v in enumerate(spec.wanted):
        to = writer[v]
        source, target = spec.arrives[spec.reads.index(v)], to.leaves[to.writes.index(v)]
        place = (to.active.index(v), to.returns[v].index(spec.stage))
        back.append(Route(source=i, stage=to.stage, way=way("cotangent", v, to.stage, source, target), place=place))
    return Routes(
        rows=tuple(own + i for i in feeder.positions[spec.stage]),
        numbers=tuple(own + i for i in feeder.number_positions[spec.stage]),
        forward=tuple(ahead),
        backward=tuple(back),
        parts=tuple(len(spec.returns[v]) for v in spec.active),
    )
