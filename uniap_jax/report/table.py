"""Tables for the terminal, with rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from uniap_jax.core.graph import Layer, LayerGraph
from uniap_jax.core.plan import Plan
from uniap_jax.core.plan_text import HEADER, format_bytes, plan_rows, plan_summary, plan_title
from uniap_jax.report.difference import plan_difference

PLAIN_WIDTH = 160
"""Columns where the output is a file or a pipe and so has no width of its own."""


def make_console(stream: TextIO) -> Console:
    """A console on a stream; no colours and no control characters where it is not a terminal."""
    return Console(
        file=stream, width=None if stream.isatty() else PLAIN_WIDTH, highlight=False, soft_wrap=not stream.isatty()
    )


def make_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", right: Sequence[int] = ()
) -> Table:
    """A table whose cells are taken literally (no markup); columns in `right` are aligned right."""
    table = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for position, name in enumerate(header):
        table.add_column(name, justify="right" if position in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def plan_table(plan: Plan) -> Table:
    """Stage | devices | layers | strategy | time | memory."""
    return make_table(HEADER, (row.cells for row in plan_rows(plan)), title=plan_title(plan), right=(4,))


def print_plan(plan: Plan, stream: TextIO) -> None:
    """The plan's table, then status, bound, gap, seconds, baselines and notes."""
    console = make_console(stream)
    console.print(plan_table(plan))
    for line in plan_summary(plan):
        console.print(Text(line))


def print_difference(first: Plan, second: Plan, stream: TextIO) -> None:
    """What differs between two plans, a row each."""
    console = make_console(stream)
    found = plan_difference(first, second)
    if not found:
        console.print("The two plans are equal.")
        return
    rows = ((d.what, d.first, d.second) for d in found)
    console.print(make_table(("", "first", "second"), rows))


def format_flops(flops: float) -> str:
    """Operations with a decimal prefix, three digits: 1.5e9 -> "1.50 GFLOP"."""
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)):
        if flops >= scale:
            return f"{flops / scale:.3g} {unit}"
    return f"{flops:.0f} FLOP"


def layer_param_bytes(graph: LayerGraph, layer: Layer) -> int:
    """Bytes of the parameters a layer reads."""
    return sum(graph.params[p].nbytes for p in layer.params)


def layer_output_bytes(graph: LayerGraph, layer: Layer) -> int:
    """Bytes of the activations a layer hands to later layers, for the whole micro-batch."""
    results = set(graph.results)
    return sum(graph.values[v].nbytes for v in layer.writes if v not in results)


def graph_table(graph: LayerGraph) -> Table:
    """Layer | name | source | FLOPs | parameters | activations | reads from | same as."""
    first_of = {s: group[0] for s, group in graph.unique.items()}
    sources: dict[int, list[int]] = {}
    for writer, reader, _ in graph.edges:
        sources.setdefault(reader, []).append(writer)
    rows = (
        (
            str(layer.index),
            layer.name,
            layer.source,
            format_flops(layer.flops),
            format_bytes(layer_param_bytes(graph, layer)),
            format_bytes(layer_output_bytes(graph, layer)),
            ", ".join(str(u) for u in sources.get(layer.index, ())),
            "" if first_of[layer.signature] == layer.index else str(first_of[layer.signature]),
        )
        for layer in graph.layers
    )
    header = ("layer", "name", "source", "forward", "parameters", "activations", "reads", "same as")
    title = f"{len(graph.layers)} layers, {len(graph.unique)} different, batch {graph.batch_size}"
    return make_table(header, rows, title=title, right=(0, 3, 4, 5))


def print_graph(graph: LayerGraph, stream: TextIO) -> None:
    """The layers of a step, then what tracing noted."""
    console = make_console(stream)
    console.print(graph_table(graph))
    for note in graph.notes:
        console.print(Text(f"note: {note}"))
