"""Draws a table of step times as bars: each contender over the best one by hand.

    python -m benchmarks.plot docs/benchmarks/step_time.md docs/benchmarks/step_time.svg

Needs matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

COLOURS = {
    "data": "#9aa5b1",
    "fsdp": "#6b7c93",
    "tensor 2": "#b8a27a",
    "tensor 8": "#8a6d3b",
    "gpipe": "#a58fb5",
    "parallax": "#6f5a8a",
    "plan": "#1f7a5c",
}


def read_table(text: str) -> list[dict[str, str]]:
    """Rows of the first Markdown table, by column name."""
    lines = [[c.strip() for c in line.strip().strip("|").split("|")] for line in text.splitlines() if "|" in line]
    names, _, *rows = lines
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def milliseconds(cell: str) -> float | None:
    """A figure, or None where the cell says why there is none."""
    try:
        return float(cell)
    except ValueError:
        return None


def draw(rows: Sequence[dict[str, str]], path: Path) -> None:
    """Writes an SVG; a contender that did not run has no bar."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "step_time", "font.size": 9})
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    width = 0.8 / len(COLOURS)
    for j, (name, colour) in enumerate(COLOURS.items()):
        places, heights = [], []
        for i, row in enumerate(rows):
            mine = milliseconds(row[name])
            hands = [ms for n in COLOURS if n != "plan" and (ms := milliseconds(row[n])) is not None]
            if mine is not None and hands:
                places.append(i + (j - len(COLOURS) // 2) * width)
                heights.append(min(mine / min(hands), 4.0))
        axes.bar(places, heights, width, label=name, color=colour)
    axes.axhline(1.0, color="#333333", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [row["model"] for row in rows])
    axes.set_ylabel("step time / best by hand\n(4 is 4 or more)")
    axes.legend(ncols=len(COLOURS), frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.16))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> None:
    """Reads a table, writes a drawing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(argv)
    rows = read_table(options.table.read_text())
    draw([r for r in rows if milliseconds(r["plan"]) is not None and r["plan / best by hand"] != "-"], options.out)


if __name__ == "__main__":
    main()
