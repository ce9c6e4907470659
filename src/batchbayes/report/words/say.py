"""Sentences from templates: `sentences.toml` has the words, and the records of an assessment fill them in.

The forms in which a template writes a number, as in `{accuracy:of_100}`, are the functions here, and those of
`_common/text.py`.
"""

import tomllib
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

from batchbayes._common.text import number, percent
from batchbayes.report.compare.tuning import DOUBT


def say(template: str, **records: Any) -> str:
    """Return a sentence, made of records: numbers, texts, and objects whose attributes the template names.

    >>> say("errors", made="3 errors")
    'It made 3 errors on the test data: too few to know when it is wrong.'
    """
    return _Sentences().vformat(_known()[template], (), records)


def knows(template: str) -> bool:
    """Return whether there is a template of this name."""
    return template in _known()


@cache
def _known() -> dict[str, str]:
    """Return all templates. Those of a table are named as "about.mc_dropout"."""
    read = tomllib.loads((Path(__file__).parent / "sentences.toml").read_text(encoding="utf-8"))
    tables = {name: table for name, table in read.items() if isinstance(table, dict)}
    inside = {f"{name}.{key}": text for name, table in tables.items() for key, text in table.items()}
    return {name: text for name, text in read.items() if name not in tables} | inside


class _Sentences(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return FORMS[format_spec](value) if format_spec in FORMS else super().format_field(value, format_spec)


def of_100(share: float) -> str:
    """Write a share as a number out of 100.

    >>> of_100(0.934), of_100(0.9997), of_100(0.0002), of_100(1.0), of_100(0.0)
    ('93', 'more than 99', 'fewer than 1', 'all', 'none')
    """
    if share in (0.0, 1.0):
        return "all" if share else "none"
    rounded = round(100 * share)
    return "more than 99" if rounded == 100 else "fewer than 1" if rounded == 0 else str(rounded)


def said(confidence: float) -> str:
    """Write a mean confidence as a percentage. Only certainty is called 100 %.

    >>> said(0.934), said(0.9956), said(1.0)
    ('93 %', 'more than 99 %', '100 %')
    """
    return "more than 99 %" if round(100 * confidence) == 100 and confidence < 1 else round_percent(confidence)


def give_or_take(error: float) -> str:
    """Say how far the true share may be from one that was counted with this standard error.

    >>> give_or_take(0.0245), give_or_take(0.001)
    (', give or take 5', '')
    """
    points = round(100 * DOUBT * error)
    return f", give or take {points}" if points else ""


def round_percent(share: float) -> str:
    """Write a share in percent without digits after the point."""
    return percent(share, 0)


FORMS = {form.__name__: form for form in (of_100, said, give_or_take, round_percent, percent, number)}
