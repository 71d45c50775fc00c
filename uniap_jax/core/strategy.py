"""What one layer does on its stage's sub-mesh: how many ways each kind of split goes, and what is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from itertools import combinations_with_replacement, product

from uniap_jax.core.errors import StrategyError

KEEPS = ("all", "dots", "inputs")
DEGREES = ("data", "fsdp", "expert", "context", "tensor")
"""Fields that multiply to the devices of a sub-mesh, in the order in which they take its axes."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Strategy:
    """The intra-layer split of one layer; the product of the degrees is the size of the stage's sub-mesh.

    Attributes:
        data: ways the batch is split with the parameters replicated.
        fsdp: ways the batch is split with the state of the parameters split as well (ZeRO).
        tensor: ways the layer's internal dimensions (heads, MLP width, vocabulary) are split.
        zero: ZeRO stage of the `fsdp` ways: 1 splits optimizer state, 2 also gradients, 3 also parameters.
        keep: what the forward keeps for the backward: "all" residuals, matmul outputs ("dots"), or only the
            layer's "inputs" (full recompute).
        sequence: whether activations between tensor regions are split over the tensor ways along the sequence
            (sequence parallelism of Korthikanti et al., 2022): every all_reduce becomes a reduce_scatter and an
            all_gather.
        expert: ways the batch is split, and inside a mixture of experts the stacked experts instead of it (GShard,
            Lepikhin et al., 2020).
        context: ways the sequence is split everywhere, with the parameters replicated; attention gathers keys and
            values.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    zero: int = 3
    keep: str = "all"
    sequence: bool = False
    expert: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for name in DEGREES:
            degree = getattr(self, name)
            if not isinstance(degree, int) or degree < 1:
                raise StrategyError(f"{name}={degree!r} is not a positive whole number", axis=name, degree=degree)
        if self.zero not in (1, 2, 3):
            raise StrategyError(f"zero={self.zero!r} is not a ZeRO stage; use 1, 2 or 3", zero=self.zero)
        if self.keep not in KEEPS:
            raise StrategyError(f"keep={self.keep!r} is unknown; use one of {', '.join(KEEPS)}", keep=self.keep)
        if not isinstance(self.sequence, bool):
            raise StrategyError(f"sequence={self.sequence!r} is not True or False", sequence=self.sequence)
        if self.sequence and self.tensor == 1:
            raise StrategyError(
                "sequence splits activations over the tensor ways, and tensor is 1; use tensor=2,sequence or context=2",
                sequence=True,
                tensor=1,
            )

    @property
    def batch_ways(self) -> int:
        """Ways the batch dimension is split: data × fsdp × expert."""
        return self.data * self.fsdp * self.expert

    @property
    def sequence_ways(self) -> int:
        """Ways the sequence is split where it crosses to another layer."""
        return self.context * (self.tensor if self.sequence else 1)

    @property
    def num_devices(self) -> int:
        """Devices of the sub-mesh: the product of all degrees."""
        return math.prod(getattr(self, n) for n in DEGREES)

    def __str__(self) -> str:
        parts = [f"{n}={getattr(self, n)}" for n in DEGREES if getattr(self, n) > 1]
        if self.sequence:
            parts.append("sequence")
        if self.fsdp > 1 and self.zero != 3:
            parts.append(f"zero={self.zero}")
        if self.keep != "all":
            parts.append(f"keep={self.keep}")
        return ",".join(parts) or "data=1"


def parse_strategy(text: str | Strategy) -> Strategy:
    """Reads `data=2,tensor=2` or `tensor=4,sequence` (the inverse of `str`); a strategy is itself.

    Raises:
        StrategyError: an unknown key or a value of the wrong kind, naming it and the keys that exist.
    """
    if isinstance(text, Strategy):
        return text
    known = {f.name for f in fields(Strategy)}
    values: dict[str, int | str | bool] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = part.partition("=")
        if name not in known:
            raise StrategyError(
                f"unknown strategy {name!r} in {text!r}; known are {', '.join(sorted(known))}, "
                "for example data=2,tensor=2",
                strategy=name,
            )
        if name == "keep":
            values[name] = value
            continue
        if name == "sequence":
            if value:
                raise StrategyError(
                    f"{part!r} in {text!r}: sequence takes no number, it goes with tensor, as in tensor=2,sequence; "
                    f"ways of the sequence on devices of their own are context={value}",
                    strategy=name,
                )
            values[name] = True
            continue
        try:
            values[name] = int(value)
        except ValueError:
            raise StrategyError(
                f"{part!r} in {text!r} needs a whole number, for example {name}=2", strategy=name
            ) from None
    if not values:
        raise StrategyError(f"empty strategy {text!r}; for example data=2,tensor=2", strategy=text)
    return Strategy(**values)  # type: ignore[arg-type]


def prime_factors(n: int) -> tuple[int, ...]:
    """Prime factors of `n`, largest first: 12 -> (3, 2, 2)."""
    factors, p = [], 2
    while n > 1:
        while n % p == 0:
            factors.append(p)
            n //= p
        p += 1 if p * p <= n else max(1, n - p)
    return tuple(sorted(factors, reverse=True))


def enumerate_strategies(
    num_devices: int,
    *,
    keeps: tuple[str, ...] = ("all",),
    zeros: tuple[int, ...] = (3,),
    degrees: tuple[str, ...] = ("data", "fsdp", "tensor"),
    sequence: tuple[bool, ...] = (False,),
) -> tuple[Strategy, ...]:
    """Every strategy that a sub-mesh of `num_devices` can lay out: data, then fsdp, ..., then tensor axes.

    The sub-mesh is factorised into axes of prime size; data takes a prefix of them, tensor a suffix, the others what
    lies between, so that the batch is split over a prefix in every layer and neighbours never swap axes.

    Args:
        num_devices: of the sub-mesh.
        keeps: what the forward may keep for the backward.
        zeros: ZeRO stages of the fsdp ways.
        degrees: which of `DEGREES` may be more than 1, in that order.
        sequence: whether tensor ways split the sequence too.
    """
    primes = prime_factors(num_devices)
    found = set()
    for inner in combinations_with_replacement(range(len(primes) + 1), len(degrees) - 1):
        ends = (0, *inner, len(primes))
        ways = {d: math.prod(primes[a:b]) for d, a, b in zip(degrees, ends[:-1], ends[1:], strict=True)}
        for keep, zero, split in product(keeps, zeros, sequence):
            found.add(
                Strategy(
                    **ways,
                    zero=zero if ways.get("fsdp", 1) > 1 else 3,
                    keep=keep,
                    sequence=split and ways.get("tensor", 1) > 1,
                )
            )
    return tuple(sorted(found, key=_order))


def _order(s: Strategy) -> tuple[object, ...]:
    return (s.tensor, s.sequence, s.context, s.expert, s.fsdp, -s.data, KEEPS.index(s.keep), -s.zero)


def storage(strategy: Strategy) -> str:
    """What says how a strategy stores parameters and optimizer state: its degrees and ZeRO stage, as text."""
    return str(replace(strategy, keep="all", sequence=False))


def used_degrees(strategy: Strategy) -> tuple[str, ...]:
    """Data, fsdp and tensor, and of the other degrees those that a strategy uses; in order."""
    return tuple(d for d in DEGREES if d in ("data", "fsdp", "tensor") or getattr(strategy, d) > 1)
