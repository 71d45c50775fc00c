"""The page of a plan: well-formed, self-contained, complete."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from uniap_jax.core.plan import Plan, Prediction
from uniap_jax.report.page import plan_page

VOID = {"meta", "rect", "br"}
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Reader(HTMLParser):
    """Checks that tags close in order; collects tips, text and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tips: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {k: v or "" for k, v in attrs}
        self.tips += [values["data-tip"]] if "data-tip" in values else []
        self.links += [values[name] for name in ("src", "href") if name in values]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


def test_page_shows_every_layer_stage_pass_and_number(plan: Plan) -> None:
    reader = read(plan_page(plan))
    layers = [t for t in reader.tips if t.startswith("layer ")]
    assert layers[2] == "layer 2: <b>&block_1\ndata=4\nstage 1"
    assert len(layers) == 4
    passes = [t for t in reader.tips if " of micro-batch " in t]
    assert len(passes) == 12
    text = " ".join(reader.texts)
    facts = (
        "500 ms",
        "optimal",
        "3.00 GiB of 4.00 GiB",
        "stage 1",
        "devices 4-7",
        "data=2,tensor=2",
        "750 ms",
        "measured",
    )
    for fact in facts:
        assert fact in text


def test_page_needs_no_network(plan: Plan) -> None:
    page = plan_page(plan)
    assert read(page).links == []
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", page)


def test_page_of_a_plan_without_predictions_leaves_the_drawings_out(plan: Plan) -> None:
    bare = dataclasses.replace(plan, prediction=Prediction(step_time_s=0.0))
    text = " ".join(read(plan_page(bare)).texts)
    assert "Stages and layers" in text
    assert "One step in time" not in text
    assert "Memory of each device" not in text
    assert "unknown" in text


def test_more_strategies_than_colours_share_grey_and_keep_their_letters(plan: Plan) -> None:
    from uniap_jax.core.strategy import Strategy

    many = tuple(
        dataclasses.replace(plan.layers[0], stage=i % 2, strategy=Strategy(data=2, fsdp=2, zero=z, keep=k))
        for i, (z, k) in enumerate((z, k) for z in (1, 2, 3) for k in ("all", "dots", "inputs"))
    )
    page = plan_page(dataclasses.replace(plan, layers=many))
    assert "<b>I</b>" in page
    assert page.count('class="cell cx"') == 2  # the ninth strategy: its cell and its legend


@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
def test_browser_runs_the_page_without_an_error_and_selects_a_stage(plan: Plan, tmp_path: Path) -> None:
    press = "<script>document.querySelectorAll('[data-pick]')[1].dispatchEvent(new Event('click', {bubbles: true}));"
    press += "document.querySelector('[data-tip]').focus();</script></body>"
    page = tmp_path / "plan.html"
    page.write_text(plan_page(plan).replace("</body>", press))
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}/b",
    ]
    done = subprocess.run(
        [BROWSER or "", *flags, "--dump-dom", page.as_uri()], capture_output=True, text=True, check=True, timeout=120
    )
    assert "CONSOLE" not in done.stderr
    assert 'data-selected="1"' in done.stdout
    assert (
        len(re.findall(r'<rect[^>]*data-stage="1"[^>]*class="[^"]* on"|<rect[^>]*class="[^"]* on"', done.stdout)) >= 2
    )
    tip = re.search(r'<div id="tip"[^>]*>([^<]*)</div>', done.stdout)
    assert tip is not None
    assert tip.group(1).startswith("layer 0: embed")
