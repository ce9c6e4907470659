"""A Sphinx extension for docstrings in the house style, and for formulas without scripts.

Docstrings here are plain text with `code`, *emphasis* and $formulas$. This turns them into reStructuredText. Formulas
become MathML when the site is built, so that a page loads nothing from elsewhere.
"""

import re
from html import escape
from typing import Any

from latex2mathml.converter import convert

EXAMPLE = re.compile(r"^[ ]*>>> .*?(?:\n[ ]*$|\Z)", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(?<![`:\\])`([^`]+?)`(?![`_])")
FORMULA = re.compile(r"(?<![\\$])\$([^$]+?)\$(?!\$)")
BACK = re.compile(r'(<a class="viewcode-back" href=")([^"#]+)#([^"]+)"')
HEADING = re.compile(r"^(What is random|q\([^)]*\)|Cost[^:\n]{0,25}|References?|Where we differ): ", re.MULTILINE)


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process, priority=400)  # before napoleon, at 500
    app.connect("html-page-context", mend_back_links, priority=900)  # after the pages of viewcode are made
    app.add_html_math_renderer("mathml", (inline_formula, None), (formula, None))
    return {"parallel_read_safe": True}


def mend_back_links(app: Any, name: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Let a page of source code lead back to the page of each object.

    viewcode takes one public name for each module. A name that is public elsewhere (`bb.warn`, `tools.warn`) would lead
    to a mark that does not exist.
    """
    if name.startswith("_modules/") and "body" in context:
        context["body"] = BACK.sub(_mended, context["body"])


def _mended(link: re.Match[str]) -> str:
    page, mark = link[2], link[3]
    if "/api/" not in page:
        return f'{link[1]}{page}"'
    path = page.rsplit("/", 1)[1].removesuffix(".html").removesuffix("-class")
    name = re.escape(path.rsplit(".", 1)[1])
    member = re.split(rf"(?:^|\.){name}(?=\.|$)", mark, maxsplit=1)[1]
    return f'{link[1]}{page}#{path}{member}"'


def process(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Turn a docstring into reStructuredText, in place."""
    lines[:] = to_rst("\n".join(lines), is_module=what == "module").split("\n")


def to_rst(text: str, *, is_module: bool = False) -> str:
    """Return a docstring of the house style as reStructuredText. Examples stay as they are."""
    pieces, position = [], 0
    for example in EXAMPLE.finditer(text):
        pieces += [_prose(text[position : example.start()], is_module), example[0]]
        position = example.end()
    return "".join([*pieces, _prose(text[position:], is_module)])


def _prose(text: str, is_module: bool) -> str:
    parts = CODE.split(text)  # every second one is code, in which a dollar begins no formula
    text = "".join(f"``{part}``" if i % 2 else _without_code(part) for i, part in enumerate(parts))
    if is_module:
        text = HEADING.sub(r"\n**\1.** ", text)
    return text


def _without_code(text: str) -> str:
    parts = FORMULA.split(text)
    roles = (
        f"\\ :math:`{' '.join(part.split())}`\\ " if i % 2 else part.replace("|", "\\|") for i, part in enumerate(parts)
    )
    return "".join(roles)


def inline_formula(self: Any, node: Any) -> None:
    """Write a formula in a line of text."""
    self.body.append(_mathml(node.astext(), "inline"))
    from docutils.nodes import SkipNode

    raise SkipNode


def formula(self: Any, node: Any) -> None:
    """Write a formula on a line of its own."""
    self.body.append(f'<div class="math">{_mathml(node.astext(), "block")}</div>')
    from docutils.nodes import SkipNode

    raise SkipNode


def _mathml(source: str, display: str) -> str:
    return convert(source.strip(), display=display).replace("<math ", f'<math aria-label="{escape(source)}" ', 1)
