"""The checks of the built site, on small sites that have one fault each; and what its sources promise."""

import functools
import http.server
import json
import re
import shutil
import sys
import threading
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "tools"))

import charts  # noqa: E402
import pages  # noqa: E402
import reference  # noqa: E402
import site_check  # noqa: E402
import versions  # noqa: E402

SITE = "https://batchbayes.github.io/batchbayes/"
SOURCE = "https://github.com/batchbayes/batchbayes"
LINK = re.compile(r"\]\(([^)]+)\)")


def write(site, name, body):
    style = (DOCS / "static/site.css").read_text(encoding="utf-8")
    path = site / f"{name}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"<html><head><style>{style}</style></head><body><article>{body}</article></body></html>")


def test_a_dead_link_and_a_dead_mark_are_found(tmp_path):
    write(tmp_path, "index", '<a href="other.html#here">1</a><a href="other.html#gone">2</a><a href="no.html">3</a>')
    write(tmp_path, "other", '<h1 id="here">x</h1><a href="https://example.org/x">elsewhere</a><a href="#here">up</a>')
    assert list(site_check.dead_links(tmp_path, site_check.read_pages(tmp_path))) == [
        "index.html: other.html#gone has no such mark",
        "index.html: no.html does not exist",
    ]


def test_what_is_two_clicks_away_is_found(tmp_path):
    for page, words in site_check.ONE_CLICK.values():
        write(
            tmp_path, page.removesuffix(".html"), f"<p>pip <b>install</b> bb.<b>predict</b></p><p {words}>{words}</p>"
        )
    links = [f'<a href="{page}">x</a>' for page, _ in site_check.ONE_CLICK.values()]
    write(tmp_path, "index", "".join(links))
    assert not list(site_check.far_away(tmp_path, site_check.read_pages(tmp_path)))
    write(tmp_path, "index", "".join(link for link in links if "mcbn-uci" not in link))
    assert list(site_check.far_away(tmp_path, site_check.read_pages(tmp_path))) == [
        "index.html: a paper's table is more than one click away (results/mcbn-uci.html)"
    ]


def test_the_first_page_has_links_to_all_that_newcomers_look_for():
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    for page, _ in site_check.ONE_CLICK.values():
        assert page in text or page.replace(".html", ".md") in text, page


BAD = {
    "code is cut off": '<pre style="white-space: pre; overflow: hidden; width: 200px">' + "x" * 200 + "</pre>",
    "a table loses columns": '<div style="overflow: hidden; width: 200px"><table><tr>'
    + "<td>wide_wide_wide</td>" * 9
    + "</tr></table></div>",
    "wider than the screen": '<div style="width: 3000px">x</div>',
    "no picture": '<img src="gone.png">',
    "nearly white": '<div style="background: white; height: 400px">x</div>',
}


@pytest.mark.parametrize("fault", BAD)
def test_a_page_that_is_badly_shown_is_found(fault, browser, tmp_path):
    write(
        tmp_path, "bad", "<style>@media (prefers-color-scheme: dark) {body {background: #131416}}</style>" + BAD[fault]
    )
    assert any(fault in said for said in site_check.badly_shown(tmp_path, browser, ("bad",)))


def test_long_code_wide_tables_and_figures_are_well_shown(browser, tmp_path):
    from matplotlib.figure import Figure

    Figure(figsize=(14, 4)).savefig(tmp_path / "figure.png")
    table = "<tr>" + "<td>12.3 ± 0.4</td>" * 20 + "</tr>"
    code = f'<div class="highlight"><pre>{"x" * 300}</pre></div><p style="color: #aaa">dark</p>'
    dark = "<style>@media (prefers-color-scheme: dark) {body {background: #131416}}</style>"
    wrapped = (
        f'<div class="table-wrapper"><table>{table.replace("td", "th")}{table}</table></div><img src="figure.png">'
    )
    write(tmp_path, "good", dark + code + wrapped)
    assert not list(site_check.badly_shown(tmp_path, browser, ("good",)))


@pytest.fixture
def served(tmp_path):
    """The address of a site with two versions, made of the template and the script of the documentation."""
    template = (DOCS / "templates/versions.html").read_text(encoding="utf-8")
    for folder, root in (("", "./"), ("v0.2.0", "./"), ("guide", "../"), ("v0.2.0/guide", "../")):
        place = tmp_path / folder
        place.mkdir(parents=True, exist_ok=True)
        label = template.replace("{{ pathto('', 1) }}", root)
        (place / "index.html").write_text(f'<script src="/versions.js"></script>{label}')
    shutil.copy(DOCS / "static/versions.js", tmp_path)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    handler.log_message = lambda *words: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield tmp_path, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_versions_are_shown_where_there_is_a_list(browser, served):
    site, address = served
    page = browser.new_page()
    page.goto(f"{address}/guide/index.html", wait_until="networkidle")
    assert page.locator(".versions").is_hidden()
    versions.write_list(site)
    assert [each["name"] for each in json.loads((site / "versions.json").read_text())] == ["newest", "0.2.0"]
    for place, chosen in ((f"{address}/guide/index.html", "newest"), (f"{address}/v0.2.0/guide/index.html", "0.2.0")):
        page.goto(place, wait_until="networkidle")
        assert page.locator(".versions").is_visible()
        assert page.locator(".versions option:checked").inner_text() == chosen
    page.select_option(".versions select", label="newest")
    page.wait_for_url(f"{address}/guide/index.html")
    page.close()


def test_readme_has_no_relative_link_and_one_address():
    for path in (ROOT / "README.md", ROOT / "papers/README.md"):
        text = path.read_text(encoding="utf-8")
        links = LINK.findall(text)
        assert links
        assert [link for link in links if not link.startswith("https://")] == []
        own = [link for link in links if "batchbayes" in link]
        raw = SOURCE.replace("github.com", "raw.githubusercontent.com")
        assert [link for link in own if not link.startswith((SITE, SOURCE, raw))] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Source"] == SOURCE
    assert project["urls"]["Documentation"] == SITE
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nurl: {SITE}\nrepository-code: {SOURCE}\n" in citation


def test_links_of_readme_lead_to_files_of_this_tree(tmp_path):
    reference.write_reference(tmp_path)
    for link in LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        if link.startswith(SITE) and link != SITE:
            page = link.removeprefix(SITE).replace(".html", ".md")
            assert (DOCS / page).exists() or (tmp_path / page.removeprefix("api/")).exists(), link
        for start in (f"{SOURCE}/blob/main/", "https://raw.githubusercontent.com/batchbayes/batchbayes/main/"):
            if link.startswith(start):
                assert (ROOT / link.removeprefix(start)).exists(), link


@pytest.mark.parametrize("name", [name for paper in pages.PAPERS for name in paper.pages])
def test_a_page_of_a_paper_begins_with_its_command_its_figure_and_a_few_sentences(name):
    title, command, picture, words, *_ = (DOCS / f"results/{name}.md").read_text(encoding="utf-8").split("\n\n")
    assert title.startswith("# ")
    assert re.match(r"    (batchbayes reproduce [\w-]+ --preset \w+|python benchmarks/)", command)
    found = re.fullmatch(r"!\[[^\]]{20,}\]\(\.\./(.+)\)", picture)
    assert found
    assert (DOCS / found[1]).exists() or (found[1] == f"_generated/results-{name}.png" and name in charts.CHARTS)
    assert 2 <= len(re.findall(r"[.](?=\*| |\n|$)", words)) <= 5
    assert len(words) < 700


def test_every_chart_is_drawn_from_the_tables_of_its_page(tmp_path):
    charts.draw_charts(DOCS / "results", tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == {f"results-{name}" for name in charts.CHARTS}


def test_every_page_of_results_has_one_place():
    in_papers = [name for paper in pages.PAPERS for name in paper.pages]
    index = (DOCS / "results/index.md").read_text(encoding="utf-8")
    patterns = re.findall(r"^([\w*-]+)$", index, re.MULTILINE)
    for path in (DOCS / "results").glob("*.md"):
        listed = any(re.fullmatch(pattern.replace("*", ".*"), path.stem) for pattern in patterns)
        assert path.stem == "index" or (path.stem in in_papers) != listed, path.stem


def test_every_tutorial_and_every_picture_is_in_the_gallery():
    gallery = pages.gallery(DOCS)
    for path in (DOCS / "tutorials").glob("*.md"):
        assert path.stem == "index" or f"(tutorials/{path.name})" in gallery
    assert gallery.count("{container} card") > 20
