"""The page of an experiment: its tables, figures and circumstances in one file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchbayes._common.page import data_address, page_style, template
from batchbayes.reproduce.tables import Table


def render_experiment(
    *,
    name: str,
    about: str,
    tables: Sequence[Table],
    pictures: Sequence[Path],
    notes: Sequence[str],
    cautions: Sequence[str],
    made: Mapping[str, str],
    config: Mapping[str, Any],
) -> str:
    """The page as text: self-contained, with nothing to fetch when it is opened, and everything escaped."""
    return template(Path(__file__).with_name("page.html")).render(
        name=name,
        about=about,
        tables=tables,
        pictures=[(path.stem.replace("-", " ").replace("_", " "), data_address(path)) for path in pictures],
        notes=notes,
        cautions=cautions,
        made=made,
        config={key: json.dumps(value) for key, value in config.items()},
        style=page_style(),
    )
