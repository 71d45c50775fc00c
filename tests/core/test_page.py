"""The page of a plan: well-formed, self-contained, complete."""

from __future__ import annotations

import dataclasses
import html
import re
from html.parser import HTMLParser

from uniap_jax.core.observed import Observed
from uniap_jax.core.plan import Certificate, MemoryParts, Plan, Prediction, Searched
from uniap_jax.core.strategy import Strategy
from uniap_jax.core.timeline import predicted_events

VOID = {"meta", "rect", "br"}


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
    reader = read(plan.to_html())
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
    page = plan.to_html()
    assert read(page).links == []
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", page)


def test_page_of_a_plan_without_predictions_leaves_the_drawings_out(plan: Plan) -> None:
    bare = dataclasses.replace(plan, prediction=Prediction(step_time_s=0.0))
    text = " ".join(read(bare.to_html()).texts)
    assert "Stages and layers" in text
    assert "One step in time" not in text
    assert "Memory of each device" not in text
    assert "unknown" in text


def test_more_strategies_than_colours_share_grey_and_keep_their_letters(plan: Plan) -> None:
    many = tuple(
        dataclasses.replace(plan.layers[0], stage=i % 2, strategy=Strategy(data=2, fsdp=2, zero=z, keep=k))
        for i, (z, k) in enumerate((z, k) for z in (1, 2, 3) for k in ("all", "dots", "inputs"))
    )
    page = dataclasses.replace(plan, layers=many).to_html()
    assert "</svg>I  data=2" in page
    assert page.count('class="cell cx"') == 1  # the ninth strategy
    assert page.count('class="cx"') == 1  # and its legend


def test_memory_is_taken_apart_and_parts_fill_the_bar(plan: Plan) -> None:
    gib = 2.0**30
    parts = MemoryParts(
        parameters=gib / 2, optimizer=gib, gradients=gib / 2, activations=0.75 * gib, transients=gib / 4
    )
    memory = (parts, dataclasses.replace(parts, parameters=0.0, optimizer=0.0, gradients=0.0, activations=0.75 * gib))
    reader = read(dataclasses.replace(plan, prediction=dataclasses.replace(plan.prediction, memory=memory)).to_html())
    first = [t for t in reader.tips if t.endswith("stage 0: 3.00 GiB per device\nlimit 4.00 GiB")]
    assert [t.split(":")[0] for t in first] == ["parameters", "optimizer", "gradients", "activations", "transients"]
    assert first[1].startswith("optimizer: 1.00 GiB")


def test_what_was_observed_stands_beside_the_prediction(plan: Plan) -> None:
    observed = Observed(
        compiled_bytes=(2 * 2.0**30, 1 * 2.0**30), step_times_s=(0.4, 0.5, 0.3), events=predicted_events(plan)
    )
    text = " ".join(read(plan.to_html(observed)).texts)
    for fact in ("measured step", "400 ms", "+25.0 %", "+50.0 %", "measured, on the same scale"):
        assert fact in text
    assert "measured step" not in plan.to_html()


def test_links_show_their_share_of_the_step(plan: Plan) -> None:
    reader = read(plan.to_html())
    assert "6.0 % of the step" in reader.texts  # three micro-batches of 10 ms in 500 ms
    assert "stage 0 → 1\n10.0 ms per micro-batch, there and back\n30.0 ms per step" in reader.tips


def test_search_lists_candidates_with_their_bounds(plan: Plan) -> None:
    searched = (
        Searched(num_stages=2, num_microbatches=3, schedule="one_f_one_b", bound_s=0.5, outcome="chosen"),
        Searched(num_stages=1, num_microbatches=1, schedule="gpipe", bound_s=0.625, outcome="pruned"),
        Searched(num_stages=4, num_microbatches=1, schedule="gpipe", bound_s=None, outcome="no plan"),
    )
    shown = dataclasses.replace(plan, certificate=dataclasses.replace(plan.certificate, searched=searched)).to_html()
    texts = read(shown).texts
    assert "3 candidates: 1 chosen, 1 pruned, 1 no plan." in texts
    assert {"625 ms", "no plan fits", "1F1B"} <= set(texts)
    assert "The search" not in plan.to_html()


def test_a_plan_pinned_by_hand_has_a_page(plan: Plan) -> None:
    text = " ".join(read(dataclasses.replace(plan, certificate=Certificate(status="pinned")).to_html()).texts)
    assert "pinned by hand, not searched" in text
    assert "Other ways" not in text


def test_notebook_shows_the_page_in_a_frame_of_its_own(plan: Plan) -> None:
    frame = plan._repr_html_()
    source = re.fullmatch(r'<iframe srcdoc="([^"]*)" sandbox="allow-scripts"[^>]*></iframe>', frame)
    assert source is not None
    assert html.unescape(source[1]) == plan.to_html()
