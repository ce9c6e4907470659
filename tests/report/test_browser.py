"""The report in a real browser: Debian's chromium, driven by playwright."""

import json
import re

import pytest
import torch
from helpers import assess_cases

from batchbayes import cli


def assess(task, folder, *more):
    torch.set_num_threads(1)
    arguments = assess_cases.write_case(task, folder)
    assert cli.main(["assess", *arguments, *more, "--out", str(folder / "out")]) == 0
    return folder / "out"


KINDS = ["classification", "regression", "segmentation", "pictures", "binary", "plain"]
TERMS = re.compile(r"\b(M|NLL|nats?|draws?|ECE|RMSE|CRPS|AUROC|entropy|MCBN tuned, M|p-value|quantile|e\+\d+)\b")
"""Words that the first screen does without."""


@pytest.fixture(scope="module", params=KINDS)
def report(request, tmp_path_factory):
    """A report with a chart: for the regression, a method with draws is made the recommended one."""
    more = ["--recommend", "MCBN"] if request.param == "regression" else []
    return assess(request.param, tmp_path_factory.mktemp(request.param), *more)


@pytest.fixture(params=[(1280, 900), (390, 844)], ids=["desktop", "phone"])
def page(request, browser, report):
    page = open_page(browser, report, *request.param)
    yield page
    page.close()


def open_page(browser, report, width, height):
    page = browser.new_page(viewport={"width": width, "height": height})
    page.seen = {"console": [], "errors": [], "requests": [], "dialogs": []}
    page.on("console", lambda message: page.seen["console"].append(message.text))
    page.on("pageerror", lambda error: page.seen["errors"].append(str(error)))
    page.on("request", lambda request: page.seen["requests"].append(request.url))
    page.on("dialog", lambda dialog: (page.seen["dialogs"].append(dialog.message), dialog.dismiss()))
    page.goto(f"file://{report / 'report.html'}")
    return page


def test_it_is_quiet_asks_for_nothing_and_fits(page, report):
    assert page.seen["console"] == page.seen["errors"] == page.seen["dialogs"] == []
    asked = [url for url in page.seen["requests"] if not url.startswith("data:")]
    assert asked == [f"file://{report / 'report.html'}"]
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    assert page.locator("img:visible").evaluate_all("images => images.every(image => image.naturalWidth > 0)")


def test_the_first_screen_is_for_everybody(page):
    first = page.locator("header").inner_text() + page.locator("#verdict").inner_text()
    assert TERMS.findall(first.replace(page.locator("#verdict code").inner_text(), "")) == []
    assert re.search(r"Of 100 (answers|pixels) like these \d+ are right|90 % of true values fall within ±", first)
    assert page.locator("#verdict code").inner_text().startswith("batchbayes predict --model ")
    step = page.locator(".card.wide").bounding_box()
    assert step["y"] + step["height"] <= page.viewport_size["height"]  # what to do next is seen without scrolling


def test_the_slider_shows_coverage_and_error(page, report):
    explorer = json.loads((report / "metrics.json").read_text())["explorer"]
    slider = page.locator("#threshold")
    slider.focus()
    page.keyboard.press("End")
    assert page.locator("#kept").inner_text() == "100.0 %"
    assert page.locator("#risk").inner_text() == page.locator("#risk-all").inner_text()
    page.keyboard.press("Home")
    assert page.locator("#kept").inner_text() == f"{100 * explorer['coverage'][0]:.1f} %"
    page.keyboard.press("ArrowRight")
    assert page.locator("#kept").inner_text() == f"{100 * explorer['coverage'][1]:.1f} %"
    beyond = page.locator(".dot.beyond").count()
    page.keyboard.press("End")
    assert page.locator("#chart .dot.beyond").count() <= beyond


def test_hovering_shows_the_example(page):
    dot = page.locator("#chart .dot").last
    dot.scroll_into_view_if_needed()
    box = dot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert page.locator("#chart .dot.chosen").count() == 1
    assert "row " in page.locator("#detail").inner_text()


def test_the_chart_can_be_read_by_keyboard(page):
    page.locator("#chart").focus()
    page.keyboard.press("End")
    last = page.locator("#detail").inner_text()
    page.keyboard.press("ArrowLeft")
    assert "row " in page.locator("#detail").inner_text() != last


def test_a_class_named_script_is_only_a_name(page, report):
    page.locator("#chart").focus()
    page.keyboard.press("End")
    assert page.seen["dialogs"] == []
    assert page.locator("script").count() == 2
    if report.parent.name.startswith("classification"):
        assert assess_cases.EVIL in page.locator("body").inner_text()


def test_dark_and_print_have_their_own_colours(browser, report):
    def paper(**media):
        page = browser.new_page()
        page.emulate_media(**media)
        page.goto(f"file://{report / 'report.html'}")
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.close()
        return colour

    assert len({paper(color_scheme="light"), paper(color_scheme="dark")}) == 2
    assert paper(media="print", color_scheme="light") == "rgb(255, 255, 255)"


def test_a_page_without_a_chart_says_why(browser, tmp_path):
    report = assess("regression", tmp_path)  # here the network itself is recommended, with one spread for all inputs
    page = open_page(browser, report, 390, 844)
    test_it_is_quiet_asks_for_nothing_and_fits(page, report)
    assert "one standard deviation for all inputs" in page.locator("body").inner_text()
    assert page.locator("#chart, #threshold, script").count() == 0
    assert page.locator(".hardest li").count() == 6  # the most novel ones
    page.close()
