"""HTML pages: templates that escape all text, one style sheet, and pictures inside the page."""

import base64
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template


def template(path: Path) -> "Template":
    """Return the template in a file. It escapes everything that is put into it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(path.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(path.name)


def page_style() -> str:
    """Return the style sheet that all pages share."""
    return (Path(__file__).parent / "style.css").read_text(encoding="utf-8")


def data_address(path: Path) -> str:
    """Return a picture as a `data:` address, so that the page needs no other file."""
    kind = "jpeg" if path.suffix == ".jpg" else path.suffix[1:]
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"
