"""Write the tables, the figures and the page of a run. Each file is written completely or not at all."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchbayes import BatchbayesError
from batchbayes._common.page import data_address, page_style, template
from batchbayes.plots import save_figure
from batchbayes.tools import atomic_path, count
from batchbayes_papers.runner.experiment import Results
from batchbayes_papers.runner.plan import Plan
from batchbayes_papers.runner.records import FinishedUnit
from batchbayes_papers.runner.tables import ResultTable, to_csv, to_markdown
from batchbayes_papers.runner.unit_progress import duration

READING_ERRORS = (KeyError, IndexError, TypeError, ValueError, AttributeError)
"""The errors that can happen when a result has an unexpected shape."""


def write_outputs(plan: Plan, finished: Mapping[str, FinishedUnit], out: Path) -> list[ResultTable]:
    """Write table.md, tables/*.csv and index.html of a run to `out`, and figures/*.png if it is finished.

    Returns:
        The tables.
    """
    tables, pictures = tables_with_notes(plan, finished), []
    with explained_write_errors(out):
        (out / "tables").mkdir(exist_ok=True)
        (out / "figures").mkdir(exist_ok=True)
        _write(out / "table.md", "\n\n".join([state_words(plan, finished), *map(to_markdown, tables)]) + "\n")
        for stem, table in zip(file_stems([table.title for table in tables]), tables, strict=True):
            _write(out / "tables" / f"{stem}.csv", to_csv(table))
        draw = getattr(plan.experiment, "figures", None)  # an experiment may have none
        complete = len(finished) == len(plan.units)
        for stem, figure in (draw(plan.config, results_by_unit(finished)) if draw and complete else {}).items():
            pictures.append(out / "figures" / f"{stem}.png")
            save_figure(figure, pictures[-1])
        page = template(Path(__file__).with_name("page.html"))
        _write(out / "index.html", page.render(run=shown_run(plan, finished, pictures), style=page_style()))
    return tables


def shown_run(plan: Plan, finished: Mapping[str, FinishedUnit], pictures: Sequence[Path]) -> dict[str, Any]:
    """Return what a page shows of a run, by the names in its template."""
    tables = tables_without_notes(plan, results_by_unit(finished))
    content = [count(len(tables), "table"), *([count(len(pictures), "figure")] if pictures else [])]
    return {
        "name": plan.settings.experiment,
        "about": plan.about,
        "preset": state_words(plan, finished),
        "is_smoke": plan.settings.preset == "smoke",
        "content": ", ".join(content),
        "tables": tables,
        "pictures": [(caption(path.stem), data_address(path)) for path in pictures],
        "notes": plan.notes,
        "cautions": cautions(finished),
        "facts": facts_about_run(plan, finished),
        "config": {key: json.dumps(value) for key, value in json.loads(plan.settings.config).items()},
    }


def state_words(plan: Plan, finished: Mapping[str, FinishedUnit]) -> str:
    """Say in one line what the preset is good for, and how much of the run is there if something is missing."""
    if len(finished) == len(plan.units):
        return plan.preset_words
    return f"{plan.preset_words} Finished: {len(finished)} of {count(len(plan.units), 'unit')}, without figures."


def caption(stem: str) -> str:
    """Return the name of a figure as words.

    >>> caption("NLL-after-each-part"), caption("predictive-bands")
    ('NLL after each part', 'Predictive bands')
    """
    words = stem.replace("-", " ").replace("_", " ")
    return words[:1].upper() + words[1:]


def write_gallery(preset: str, runs: Sequence[Mapping[str, Any]], missing: Mapping[str, str], path: Path) -> None:
    """Write one page with a list of contents and all tables and figures of several runs."""
    page = template(Path(__file__).with_name("gallery.html"))
    with explained_write_errors(path.parent):
        _write(path, page.render(preset=preset, runs=runs, missing=missing, style=page_style()))


def results_by_unit(finished: Mapping[str, FinishedUnit]) -> Results:
    """Return the results by unit name, as an experiment needs them."""
    return {name: json.loads(row.result) for name, row in finished.items()}


def tables_with_notes(plan: Plan, finished: Mapping[str, FinishedUnit]) -> list[ResultTable]:
    """Return the tables. The last one has notes on differences from the paper and between software versions."""
    tables = tables_without_notes(plan, results_by_unit(finished))
    notes = (*plan.notes, *mixed_versions(finished))
    return [*tables[:-1], replace(tables[-1], notes=tables[-1].notes + notes)] if tables else []


def tables_without_notes(plan: Plan, results: Results) -> list[ResultTable]:
    """Return the tables as the experiment makes them. If it cannot read a result, name the unit in the error."""
    try:
        return list(plan.experiment.tables(plan.config, results))
    except READING_ERRORS as error:
        unreadable = [name for name in results if not _is_readable(plan, {name: results[name]})]
        if not unreadable or not _is_readable(plan, {}):  # an error of the program, not of the file
            raise
        raise BatchbayesError(
            expected=f"results as {plan.settings.experiment} writes them",
            got=f"the result of the unit {unreadable[0]!r}, which is damaged or something else "
            f"({type(error).__name__}: {error})",
            fix="choose another --out, or move the file away; it was not changed",
        ) from error


def _is_readable(plan: Plan, results: Results) -> bool:
    try:
        plan.experiment.tables(plan.config, results)
    except READING_ERRORS:
        return False
    return True


def mixed_versions(finished: Mapping[str, FinishedUnit]) -> list[str]:
    """Return a note if different versions of batchbayes or torch made the units."""
    counts = Counter(
        " with ".join(f"{name} {row.versions[name]}" for name in ("batchbayes", "torch")) for row in finished.values()
    )
    each = "; ".join(f"{versions}: {number}" for versions, number in counts.items())
    return [f"Different versions of the software made the units: {each}."] if len(counts) > 1 else []


def facts_about_run(plan: Plan, finished: Mapping[str, FinishedUnit]) -> dict[str, str]:
    """Return headings and texts that say how the results were made."""
    rows, datasets = list(finished.values()), plan.settings.datasets
    versions = dict.fromkeys(", ".join(f"{name} {text}" for name, text in row.versions.items()) for row in rows)
    cores = " or ".join(count(number, "core") for number in sorted({row.cores for row in rows}))
    return {
        "Preset": plan.settings.preset + (f", data sets {', '.join(datasets)}" if datasets else ""),
        "Work": f"{count(len(rows), 'unit')}, in total {duration(sum(row.seconds for row in rows))} on one thread of a "
        f"machine with {cores}",
        "When": f"{_minute(min(row.finished for row in rows))} to {_minute(max(row.finished for row in rows))} (UTC)"
        if rows
        else "",
        "Versions": "; ".join(versions),
    }


def _minute(moment: str) -> str:
    """Shorten a time to the minute.

    >>> _minute("2026-11-17T06:15:44.716+00:00")
    '2026-11-17 06:15'
    """
    return moment[:16].replace("T", " ")


def cautions(finished: Mapping[str, FinishedUnit]) -> list[str]:
    """Return the warnings of all units with their counts, and one more if software versions differ."""
    counts = Counter(text for row in finished.values() for text in row.warnings)
    texts = [f"{text} (units: {number})" for text, number in counts.items()]
    if len({tuple(sorted(row.versions.items())) for row in finished.values()}) > 1:
        texts.append("Different versions of the software made the units. They are listed below.")
    return texts


def file_stems(titles: list[str]) -> list[str]:
    """Return a unique file name without an ending for each title.

    >>> file_stems(["RMSE (test)", "RMSE, test", "…"])
    ['rmse-test', 'rmse-test-2', 'table']
    """
    seen: Counter[str] = Counter()
    stems = []
    for title in titles:
        stem = re.sub("[^a-z0-9]+", "-", title.lower()).strip("-") or "table"
        seen[stem] += 1
        stems.append(stem if seen[stem] == 1 else f"{stem}-{seen[stem]}")
    return stems


@contextmanager
def explained_write_errors(out: Path) -> Iterator[None]:
    """Turn the error of a full disk, or of a folder without permission to write, into a message with help."""
    try:
        yield
    except OSError as error:
        raise BatchbayesError(
            expected=f"free space and permission to write to {out}",
            got=error.strerror or str(error),
            fix="free some space or choose another --out, then run the same command again: finished units are kept",
        ) from error


def _write(path: Path, text: str) -> None:
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")
