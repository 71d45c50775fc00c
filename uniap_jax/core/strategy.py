"""What one layer does on its stage's sub-mesh: how many ways each kind of split goes, and what is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from uniap_jax.core.errors import StrategyError

KEEPS = ("all", "dots", "inputs")


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
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    zero: int = 3
    keep: str = "all"

    def __post_init__(self) -> None:
        for name in ("data", "fsdp", "tensor"):
            degree = getattr(self, name)
            if not isinstance(degree, int) or degree < 1:
                raise StrategyError(f"{name}={degree!r} is not a positive whole number", axis=name, degree=degree)
        if self.zero not in (1, 2, 3):
            raise StrategyError(f"zero={self.zero!r} is not a ZeRO stage; use 1, 2 or 3", zero=self.zero)
        if self.keep not in KEEPS:
            raise StrategyError(f"keep={self.keep!r} is unknown; use one of {', '.join(KEEPS)}", keep=self.keep)

    @property
    def batch_ways(self) -> int:
        """Ways the batch dimension is split: data × fsdp."""
        return self.data * self.fsdp

    @property
    def num_devices(self) -> int:
        """Devices of the sub-mesh: data × fsdp × tensor."""
        return self.data * self.fsdp * self.tensor

    def __str__(self) -> str:
        parts = [f"{n}={getattr(self, n)}" for n in ("data", "fsdp", "tensor") if getattr(self, n) > 1]
        if self.fsdp > 1 and self.zero != 3:
            parts.append(f"zero={self.zero}")
        if self.keep != "all":
            parts.append(f"keep={self.keep}")
        return ",".join(parts) or "data=1"


def parse_strategy(text: str) -> Strategy:
    """Reads `data=2,tensor=2` (the inverse of `str`).

    Raises:
        StrategyError: an unknown key or a value of the wrong kind, naming it and the keys that exist.
    """
    known = {f.name for f in fields(Strategy)}
    values: dict[str, int | str] = {}
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
    num_devices: int, *, keeps: tuple[str, ...] = ("all",), zeros: tuple[int, ...] = (3,)
) -> tuple[Strategy, ...]:
    """Every strategy that a sub-mesh of `num_devices` can lay out: data, then fsdp, then tensor axes.

    The sub-mesh is factorised into axes of prime size; data takes a prefix of them, tensor a suffix, fsdp what
    lies between, so that the batch is split over a prefix in every layer and neighbours never swap axes.

    Args:
        num_devices: of the sub-mesh.
        keeps: what the forward may keep for the backward.
        zeros: ZeRO stages of the fsdp ways.
    """
    primes = prime_factors(num_devices)
    cuts = range(len(primes) + 1)
    found = {
        Strategy(
            data=math.prod(primes[:i]),
            fsdp=math.prod(primes[i:j]),
            tensor=math.prod(primes[j:]),
            zero=zero if i < j else 3,
            keep=keep,
        )
        for i in cuts
        for j in cuts
        if i <= j
        for keep in keeps
        for zero in zeros
    }
    return tuple(sorted(found, key=lambda s: (s.tensor, s.fsdp, -s.data, KEEPS.index(s.keep), -s.zero)))
