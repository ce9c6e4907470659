"""Check the built site: `python docs/tools/site_check.py docs/_build/html`, which `make docs` does last.

Every link inside the site leads somewhere. What a newcomer looks for is one click away from the first page. In a
browser, at the width of a desk and of a phone, in light and in dark: no code is cut off, no column is lost, no picture
glares.
"""

import io
import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ONE_CLICK = {
    "install": ("start.html", "pip install"),
    "first answer": ("start.html", "bb.predict"),
    "which method": ("which-method.html", "bb.mc_dropout"),
    "deploy": ("tutorials/deploy.html", "onnxruntime"),
    "a paper's table": ("results/mcbn-uci.html", "RMSE (table 7 of the paper)"),
    "an API page": ("api/batchbayes.mcbn.html", 'id="batchbayes.mcbn"'),
    "the source of a function": ("_modules/batchbayes/methods/batchnorm/mcbn.html", 'id="mcbn"'),
}
"""What is one click away from the first page: its page, and words or a mark that stand there."""

LOOKED_AT = (
    "index", "start", "which-method", "assess", "gallery", "papers", "tutorials/deploy", "results/mcbn-uci",
    "results/views", "api/batchbayes.mcbn", "comparison", "coverage",
)  # fmt: skip
"""The pages that are opened in a browser: those with the widest tables, the longest code, the most pictures."""
WIDTHS = (1280, 390)
GLARE = 0.01
"""The share of a dark page that may be nearly white: letters are, areas are not."""

CUT_OFF = """() => {
  const wide = (box) => box.scrollWidth > box.clientWidth + 1;
  const found = [];
  if (document.documentElement.scrollWidth > innerWidth + 1) found.push("the page is wider than the screen");
  for (const code of document.querySelectorAll("article pre"))
    if (wide(code)) found.push("code is cut off: " + code.innerText.slice(0, 60));
  for (const table of document.querySelectorAll("article table")) {
    const box = table.closest(".table-wrapper") ?? table.parentElement;
    const lost = innerWidth > 1000 || !["auto", "scroll"].includes(getComputedStyle(box).overflowX);
    const words = table.innerText.replace(/\\s+/g, " ").slice(0, 60);
    if (wide(box) && lost) found.push(`a table loses columns: ${words}`);
  }
  for (const picture of document.querySelectorAll("article img"))
    if (!picture.naturalWidth) found.push("no picture: " + picture.src);
    else if (picture.getBoundingClientRect().right > innerWidth + 1) found.push("a picture is cut off: " + picture.src);
  return found;
}"""


class Page(HTMLParser):
    """The marks and links of a page, and the links of its text alone."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.marks: set[str] = set()
        self.links: list[str] = []
        self.text_links: list[str] = []
        self._in_article = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self._in_article |= tag == "article"
        self.marks.update(value for key in ("id", "name") if (value := found.get(key)))
        link = found.get("href") or found.get("src")
        if link and tag in ("a", "img", "link", "script"):
            self.links.append(link)
            if self._in_article:
                self.text_links.append(link)

    def handle_endtag(self, tag: str) -> None:
        self._in_article &= tag != "article"


def read_pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def dead_links(site: Path, pages: dict[Path, Page]) -> Iterator[str]:
    """Say which links inside the site lead nowhere."""
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            if not target.exists():
                yield f"{path.relative_to(site)}: {link} does not exist"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].marks:
                yield f"{path.relative_to(site)}: {link} has no such mark"


def far_away(site: Path, pages: dict[Path, Page]) -> Iterator[str]:
    """Say what a newcomer does not find with one click in the text of the first page."""
    near = {urlsplit(link).path for link in pages[site / "index.html"].text_links}
    for name, (page, words) in ONE_CLICK.items():
        if page not in near:
            yield f"index.html: {name} is more than one click away ({page})"
        elif words not in (text := (site / page).read_text(encoding="utf-8")) + re.sub("<[^>]+>", "", text):
            yield f"{page}: {words} is not there"


def badly_shown(site: Path, browser: Any, names: tuple[str, ...] = LOOKED_AT) -> Iterator[str]:
    """Open pages in a browser. Say what is cut off or too bright."""
    for width in WIDTHS:
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            for name in names:
                page.goto((site / f"{name}.html").as_uri())
                where = f"{name}.html, {width} pixels, {scheme}"
                yield from (f"{where}: {fault}" for fault in page.evaluate(CUT_OFF))
                if scheme == "dark" and (share := _white_share(page.screenshot(full_page=True))) > GLARE:
                    yield f"{where}: {share:.1%} of it is nearly white"
            page.close()


def _white_share(picture: bytes) -> float:
    import numpy as np
    from PIL import Image

    return float((np.asarray(Image.open(io.BytesIO(picture)).convert("L")) > 235).mean())


def main() -> None:
    site = Path(sys.argv[1]).resolve()
    pages = read_pages(site)
    faults = [*dead_links(site, pages), *far_away(site, pages)]
    count = sum(len(page.links) for page in pages.values())
    print(f"{len(pages)} pages, {count} links")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        print("no chromium here: widths and brightness were not measured")
    else:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as started:
            browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            faults += badly_shown(site, browser)
            browser.close()
        print(f"{len(LOOKED_AT)} pages looked at, {' and '.join(map(str, WIDTHS))} pixels wide, light and dark")
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
