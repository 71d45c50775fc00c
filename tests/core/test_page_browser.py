"""The page of a plan in a headless browser: no failure, pointer and keyboard work, both colour schemes can be read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from uniap_jax.core.observed import Observed
from uniap_jax.core.plan import Plan
from uniap_jax.core.timeline import predicted_events

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
selenium = pytest.importorskip("selenium", reason="the page test needs selenium (extra: test)")

if BROWSER is None or DRIVER is None:
    pytest.skip(
        f"no browser for the page test: chromium is {BROWSER}, chromedriver is {DRIVER}; on Debian, apt-get install "
        "chromium chromium-driver",
        allow_module_level=True,
    )


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One headless browser for all tests of this file."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1100,1400", "--hide-scrollbars"):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield browser
    browser.quit()


@pytest.fixture
def page(driver: Any, plan: Plan, tmp_path: Path) -> Any:
    """The browser with the page of a plan open."""
    observed = Observed(
        compiled_bytes=(2.5 * 2**30, 1.5 * 2**30), step_times_s=(0.5, 0.6), events=predicted_events(plan)
    )
    path = tmp_path / "plan.html"
    path.write_text(plan.to_html(observed), encoding="utf-8")
    for log in ("browser", "performance"):
        driver.get_log(log)  # what other pages left there
    driver.get(path.as_uri())
    return driver


def find(driver: Any, selector: str) -> Any:
    return driver.find_element("css selector", selector)


def focused(driver: Any) -> str:
    tip: str | None = driver.switch_to.active_element.get_attribute("data-tip")
    return tip or ""


def press(driver: Any, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    for key in keys:
        ActionChains(driver).send_keys(key).perform()


def test_nothing_fails_and_nothing_is_fetched(page: Any) -> None:
    import json

    assert page.get_log("browser") == []
    messages = (json.loads(entry["message"])["message"] for entry in page.get_log("performance"))
    sent = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    assert page.current_url in sent
    assert not {url for url in sent if url.startswith(("http", "ws"))}
    assert "2 stages, 3 micro-batches" in find(page, "h1").text
    boxes = page.execute_script(
        "return [...document.querySelectorAll('section svg')].map(s => s.getBoundingClientRect().height)"
    )
    assert len(boxes) >= 6
    assert min(boxes) > 10


def test_pointer_shows_what_a_mark_means(page: Any) -> None:
    from selenium.webdriver import ActionChains

    tip = find(page, "#tip")
    assert not tip.is_displayed()
    ActionChains(page).move_to_element(page.find_elements("css selector", "rect.cell[data-tip]")[2]).perform()
    assert tip.is_displayed()
    assert tip.text == "layer 2: <b>&block_1\ndata=4\nstage 1"
    box, width = tip.rect, page.execute_script("return innerWidth")
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width


def test_a_click_selects_a_stage_everywhere_and_a_second_one_lets_it_go(page: Any) -> None:
    main, pick = find(page, "main"), page.find_elements("css selector", "[data-pick='1']")[0]
    pick.click()
    assert main.get_attribute("data-selected") == "1"
    shown = page.execute_script(
        "return [...document.querySelectorAll('[data-stage]')].map(e => [e.dataset.stage, getComputedStyle(e).opacity])"
    )
    assert {s for s, opacity in shown if float(opacity) == 1} == {"1"}
    assert {s for s, opacity in shown if float(opacity) < 0.5} == {"0"}
    pressed = page.find_elements("css selector", "[data-pick][aria-pressed='true']")
    assert {p.get_attribute("data-pick") for p in pressed} == {"1"}
    pick.click()
    assert main.get_attribute("data-selected") is None


def test_keyboard_alone_reads_marks_and_selects_stages(page: Any) -> None:
    from selenium.webdriver import Keys

    press(page, Keys.TAB, Keys.TAB, Keys.TAB)  # past the names of the two stages
    assert focused(page).startswith("layer 0: embed")
    assert find(page, "#tip").text.startswith("layer 0: embed")
    press(page, Keys.ARROW_RIGHT)
    assert focused(page).startswith("layer 1: block_0")
    press(page, Keys.ARROW_DOWN)
    assert focused(page).startswith("layer 2: ")
    press(page, Keys.ENTER)
    assert find(page, "main").get_attribute("data-selected") == "1"
    press(page, Keys.ESCAPE)
    assert find(page, "main").get_attribute("data-selected") is None
    assert not find(page, "#tip").is_displayed()
    press(page, Keys.TAB)  # one mark of each drawing is in the order of the tab key
    assert not focused(page).startswith("layer ")


def luminance(rgb: str) -> float:
    """Relative luminance of WCAG 2.1 of "rgb(r, g, b)"."""
    parts = [int(x) / 255 for x in rgb[rgb.index("(") + 1 : rgb.index(")")].split(",")[:3]]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_both_colour_schemes_can_be_read(page: Any, scheme: str, dark: bool) -> None:
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    colours = page.execute_script("""
        const style = (selector, name) => getComputedStyle(document.querySelector(selector))[name];
        const page = style("body", "backgroundColor"), card = style("section", "backgroundColor");
        const pairs = [["h1", page], [".lead", page], ["h2", card], ["td", card], ["th", card], [".dim", card]];
        const found = pairs.map(([selector, back]) => [selector, style(selector, "color"), back]);
        for (const kind of ["dim", "name"]) found.push([kind, style(`svg text.${kind}`, "fill"), card]);
        const cell = document.querySelector("rect.cell");
        for (let i = 0; i < 8; i++) {
            cell.setAttribute("class", `cell c${i}`);
            found.push([`c${i}`, style("svg text.mark", "fill"), style(`rect.cell.c${i}`, "fill")]);
        }
        for (const kind of ["forward", "backward"]) {
            found.push([kind, style("svg text.mark", "fill"), style(`rect.${kind}`, "fill")]);
        }
        return found;
    """)
    for name, front, back in colours:
        light, low = sorted((luminance(front), luminance(back)), reverse=True)
        assert (light + 0.05) / (low + 0.05) >= 4.5, name  # WCAG 2.1, level AA
    assert (luminance(colours[0][2]) < 0.2) is dark


def test_a_narrow_window_scrolls_drawings_and_not_the_page(page: Any) -> None:
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    width = page.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert width[0] <= width[1]


def test_a_notebook_cell_shows_it_apart_from_the_notebook(driver: Any, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "cell.html"
    path.write_text(f"<!doctype html><meta charset='utf-8'><style>rect {{ display: none }}</style>{plan._repr_html_()}")
    driver.get(path.as_uri())
    driver.switch_to.frame(find(driver, "iframe"))
    cell = driver.find_elements("css selector", "rect.cell[data-tip]")[0]
    assert cell.is_displayed()
    cell.click()
    assert find(driver, "main").get_attribute("data-selected") == "0"
    driver.switch_to.default_content()
    assert driver.get_log("browser") == []
