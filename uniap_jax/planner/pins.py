"""Layers whose stage or strategy the user decides; the solver completes the plan."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from uniap_jax.core.costs import FORBIDDEN, Candidate, CostTables
from uniap_jax.core.errors import InfeasibleError, OptionError, StrategyError
from uniap_jax.core.strategy import Strategy, parse_strategy
from uniap_jax.planner.candidates import changed_degrees, filled
from uniap_jax.planner.infeasible import fits

Pinning = Mapping[str, str | int | Strategy]
"""Layer pattern → strategy, stage, or text: "tensor=2", "stage=0", "stage=0,tensor=2"."""

CLOSE_NAMES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A decision about the layers of one pattern.

    Attributes:
        pattern: as given.
        layers: indices of the layers that it matches.
        strategy: theirs; where its degrees do not fill a stage, more data parallelism does. None leaves it open.
        stage: theirs; negative counts from the last one. None leaves it open.
    """

    pattern: str
    layers: tuple[int, ...]
    strategy: Strategy | None = None
    stage: int | None = None

    def __str__(self) -> str:
        stage = [] if self.stage is None else [f"stage={self.stage}"]
        return f"{self.pattern} = {','.join([*stage, *([str(self.strategy)] if self.strategy else [])])}"

    def stage_of(self, num_stages: int) -> int | None:
        """The stage among so many; None where it does not exist or is left open."""
        if self.stage is None or not -num_stages <= self.stage < num_stages:
            return None
        return self.stage % num_stages


def read_pins(pinning: Pinning, layer_names: Sequence[str]) -> tuple[Pin, ...]:
    """Finds the layers of every pattern.

    Args:
        pinning: patterns as of `fnmatch`, or names as they are; with what they are pinned to.
        layer_names: in trace order.

    Raises:
        OptionError: a pattern that matches nothing (names the close ones), a value that is neither strategy nor stage,
            or two pins that contradict each other.
    """
    pins = tuple(_pin(pattern, value, layer_names) for pattern, value in pinning.items())
    _refuse_contradictions(pins, layer_names)
    return pins


def _pin(pattern: str, value: str | int | Strategy, layer_names: Sequence[str]) -> Pin:
    # a name may hold brackets, which a pattern would read as a set of characters
    layers = tuple(u for u, name in enumerate(layer_names) if name == pattern or fnmatchcase(name, pattern))
    if not layers:
        close = difflib.get_close_matches(pattern, dict.fromkeys(layer_names), n=CLOSE_NAMES, cutoff=0.0)
        raise OptionError(
            f"pin {pattern!r} matches none of the {len(layer_names)} layers; close are {', '.join(close)}. "
            f"Patterns are those of fnmatch: * stands for anything.",
            pin=pattern,
            possible=tuple(close),
        )
    strategy, stage = _decision(pattern, value)
    return Pin(pattern=pattern, layers=layers, strategy=strategy, stage=stage)


def _decision(pattern: str, value: str | int | Strategy) -> tuple[Strategy | None, int | None]:
    if isinstance(value, Strategy):
        return value, None
    if isinstance(value, int) and not isinstance(value, bool):
        return None, value
    if not isinstance(value, str):
        raise OptionError(
            f"pin {pattern!r} is {value!r}; give a strategy (tensor=2), a stage (0) or both (stage=0,tensor=2)",
            pin=pattern,
            value=value,
        )
    parts = [part.strip() for part in value.split(",") if part.strip()]
    stages = [part.removeprefix("stage=") for part in parts if part.startswith("stage=") or _is_whole(part)]
    rest = ",".join(part for part in parts if not part.startswith("stage=") and not _is_whole(part))
    if len(stages) > 1 or not all(map(_is_whole, stages)) or not parts:
        raise OptionError(
            f"pin {pattern!r} is {value!r}; a stage is one whole number, for example stage=0, and -1 is the last",
            pin=pattern,
            value=value,
        )
    try:
        strategy = parse_strategy(rest) if rest else None
    except StrategyError as error:
        raise OptionError(f"pin {pattern!r}: {error}", pin=pattern, value=value) from error
    return strategy, int(stages[0]) if stages else None


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").isdigit()


def _refuse_contradictions(pins: Sequence[Pin], layer_names: Sequence[str]) -> None:
    for number, pin in enumerate(pins):
        for other in pins[:number]:
            both = set(pin.layers) & set(other.layers)
            strategies = pin.strategy and other.strategy and pin.strategy != other.strategy
            stages = pin.stage is not None and other.stage is not None and pin.stage != other.stage
            if both and (strategies or stages):
                name = layer_names[min(both)]
                raise OptionError(
                    f"pins {other} and {pin} contradict each other: both match layer {name!r}. "
                    f"Make one of the patterns narrower.",
                    pin=pin.pattern,
                    layer=name,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedLayers:
    """Tables in which the pinned layers have no choice.

    Attributes:
        pins: to keep.
        num_devices: of the cluster.
        inner: builds the tables of the layers that are not pinned.
        full: builds the tables that the pinned strategies are looked up in.
    """

    pins: tuple[Pin, ...]
    num_devices: int
    inner: Callable[[Candidate], CostTables]
    full: Callable[[Candidate], CostTables]

    def __call__(self, candidate: Candidate) -> CostTables:
        """The candidate's tables; a layer whose pin is impossible there has no legal strategy left."""
        tables, full = self.inner(candidate), self.full(candidate)
        allowed, memory = np.array(tables.allowed), tables.memory_bytes
        for pin in self.pins:
            rows = np.array(pin.layers)
            if pin.strategy is not None:
                allowed[rows] = full.allowed[rows] & self._only(pin.strategy, full)
            if pin.stage is not None:
                stage = pin.stage_of(candidate.num_stages)
                memory = memory.copy()
                elsewhere = np.arange(candidate.num_stages) != stage
                memory[np.ix_(rows, elsewhere)] = FORBIDDEN * tables.capacity_bytes[elsewhere][None, :, None]
                allowed[rows] &= stage is not None
        return replace(tables, allowed=allowed, memory_bytes=memory)

    def _only(self, strategy: Strategy, tables: CostTables) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        wanted = filled(strategy, self.num_devices // tables.candidate.num_stages)
        return np.array([s == wanted for s in tables.strategies], dtype=np.bool_)


def refuse_impossible(pinned: PinnedLayers, candidates: Sequence[Candidate], layer_names: Sequence[str]) -> None:
    """Looks for pins that no candidate can keep, before anything is searched.

    Raises:
        OptionError: such a pin; names what its layer may take instead.
    """
    for pin in pinned.pins:
        alone = replace(pinned, pins=(pin,), inner=pinned.full)
        blocked: list[set[int]] = []
        for candidate in candidates:
            allowed = alone(candidate).allowed
            blocked.append({u for u in pin.layers if not allowed[u].any()})
            if not blocked[-1]:
                break
        if all(blocked):
            layer = min(set.intersection(*blocked) or blocked[0])
            raise _impossible(pinned, pin, candidates, layer, layer_names)


def _impossible(
    pinned: PinnedLayers, pin: Pin, candidates: Sequence[Candidate], layer: int, layer_names: Sequence[str]
) -> OptionError:
    stages = sorted({c.num_stages for c in candidates})
    if pin.stage is not None and not any(pin.stage_of(p) is not None for p in stages):
        return OptionError(
            f"pin {pin}: there are at most {stages[-1]} stages here, numbered from 0",
            pin=pin.pattern,
            possible=tuple(range(stages[-1])),
        )
    legal: dict[Strategy, None] = {}
    for candidate in candidates:
        tables = pinned.full(candidate)
        legal |= {tables.strategies[k]: None for k in np.flatnonzero(tables.allowed[layer])}
    wanted = pin.strategy
    near = tuple(legal) if wanted is None else tuple(sorted(legal, key=lambda s: changed_degrees(s, wanted)))
    return OptionError(
        f"pin {pin}: layer {layer_names[layer]!r} may not take that strategy with any of the stages and micro-batches; "
        f"near are {', '.join(map(str, near[:CLOSE_NAMES]))}",
        pin=pin.pattern,
        layer=layer_names[layer],
        possible=near,
    )


def explain_pins(pinned: PinnedLayers, candidates: Sequence[Candidate]) -> InfeasibleError | None:
    """Which pin has to go so that a plan exists; None where no single one is to blame, or none is needed."""
    guilty = tuple(pin for pin in pinned.pins if _fits_without(pinned, pin, candidates))
    if not guilty:
        return None
    return InfeasibleError(
        f"no plan keeps every pin; without {' or without '.join(str(pin) for pin in guilty)} there is one that fits. "
        f"Loosen that pin, or give the devices more memory.",
        pins=tuple(pin.pattern for pin in guilty),
    )


def _fits_without(pinned: PinnedLayers, pin: Pin, candidates: Sequence[Candidate]) -> bool:
    rest = replace(pinned, pins=tuple(p for p in pinned.pins if p is not pin))
    return any(fits(rest(candidate)) for candidate in candidates if _long_enough(rest, candidate))


def _long_enough(pinned: PinnedLayers, candidate: Candidate) -> bool:
    return pinned.full(candidate).num_layers >= candidate.num_stages


def pin_notes(pins: Sequence[Pin]) -> list[str]:
    """What the certificate says of the pins."""
    if not pins:
        return []
    told = ", ".join(f"{pin} ({len(pin.layers)} layer{'s' if len(pin.layers) != 1 else ''})" for pin in pins)
    return [f"pinned: {told}; optimal means over what is left"]
