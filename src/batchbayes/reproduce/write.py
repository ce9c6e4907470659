"""What came of a run: tables, figures and a page, each file whole or not at all."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchbayes._common.atomic import atomic_path
from batchbayes._common.progress import duration
from batchbayes._common.text import count
from batchbayes.errors import BatchbayesError
from batchbayes.reproduce.plan import Plan
from batchbayes.reproduce.results import Finished
from batchbayes.reproduce.tables import Table, to_csv, to_markdown


def results_of(finished: Mapping[str, Finished]) -> dict[str, Any]:
    """Results by name of unit, as an experiment takes them."""
    return {name: json.loads(row.result) for name, row in finished.items()}


def all_tables(plan: Plan, finished: Mapping[str, Finished]) -> list[Table]:
    """The tables; under the last, how the preset differs from the paper, and the software from unit to unit."""
    tables = bare_tables(plan, results_of(finished))
    notes = (*plan.experiment.notes(plan.config), *mixed_versions(finished))
    return [*tables[:-1], replace(tables[-1], notes=tables[-1].notes + notes)] if tables else []


def bare_tables(plan: Plan, results: Mapping[str, Any]) -> list[Table]:
    """The tables as the experiment makes them. A result that it cannot read is named: the file may be damaged."""
    try:
        return list(plan.experiment.tables(plan.config, results))
    except UNREADABLE as error:
        unreadable = [name for name in results if not _is_readable(plan, {name: results[name]})]
        if not unreadable or not _is_readable(plan, {}):
            raise
        raise BatchbayesError(
            expected=f"results as {plan.run.experiment} writes them",
            got=f"that of the unit {unreadable[0]!r}, which is damaged or something else "
            f"({type(error).__name__}: {error})",
            fix="choose another --out, or move the file away; it is left as it was",
        ) from error


UNREADABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError)
"""What it may give to read a result of another shape."""


def _is_readable(plan: Plan, results: Mapping[str, Any]) -> bool:
    try:
        plan.experiment.tables(plan.config, results)
    except UNREADABLE:
        return False
    return True


def mixed_versions(finished: Mapping[str, Finished]) -> list[str]:
    """A note where units were made by different versions of batchbayes or torch."""
    counts = Counter(
        " with ".join(f"{name} {row.versions[name]}" for name in ("batchbayes", "torch")) for row in finished.values()
    )
    each = "; ".join(f"{versions}: {number}" for versions, number in counts.items())
    return [f"Units were made by different versions of the software: {each}."] if len(counts) > 1 else []


def write_outputs(plan: Plan, finished: Mapping[str, Finished], out: Path) -> list[Path]:
    """Write table.md, tables/*.csv, figures/*.png and index.html to `out`; all units are finished."""
    from batchbayes.plots import save_figure
    from batchbayes.reproduce.page import render_experiment

    results = results_of(finished)
    tables, paths = all_tables(plan, finished), []
    with room_for(out):
        (out / "tables").mkdir(exist_ok=True)
        (out / "figures").mkdir(exist_ok=True)
        _write(out / "table.md", "\n\n".join(map(to_markdown, tables)) + "\n")
        for stem, table in zip(file_stems([table.title for table in tables]), tables, strict=True):
            _write(out / "tables" / f"{stem}.csv", to_csv(table))
        for stem, figure in plan.experiment.figures(plan.config, results).items():
            paths.append(out / "figures" / f"{stem}.png")
            save_figure(figure, paths[-1])
        page = render_experiment(
            name=plan.run.experiment,
            about=plan.about,
            tables=bare_tables(plan, results),
            pictures=paths,
            notes=plan.experiment.notes(plan.config),
            cautions=cautions(finished),
            made=how_made(plan, finished),
            config=json.loads(plan.run.config),
        )
        _write(out / "index.html", page)
    return [out / "table.md", out / "index.html"]


def how_made(plan: Plan, finished: Mapping[str, Finished]) -> dict[str, str]:
    """Facts about a run, for people."""
    rows = list(finished.values())
    versions = dict.fromkeys(", ".join(f"{name} {text}" for name, text in row.versions.items()) for row in rows)
    return {
        "Preset": plan.run.preset + (f", data sets {', '.join(plan.run.datasets)}" if plan.run.datasets else ""),
        "Work": f"{count(len(rows), 'unit')}, {duration(sum(row.seconds for row in rows))} on one thread in all, "
        "on machines of "
        f"{' or '.join(count(cores, 'core') for cores in sorted({row.cores for row in rows}))}",
        "When": f"{min(row.finished for row in rows)} to {max(row.finished for row in rows)}" if rows else "",
        "Versions": "; ".join(versions),
    }


def cautions(finished: Mapping[str, Finished]) -> list[str]:
    """Warnings of units, with how many gave each; and whether they were made by different programs."""
    counts = Counter(text for row in finished.values() for text in row.warnings)
    texts = [f"{text} (units: {number})" for text, number in counts.items()]
    if len({tuple(sorted(row.versions.items())) for row in finished.values()}) > 1:
        texts.append("Units were made by different versions of the software, listed below.")
    return texts


def file_stems(titles: list[str]) -> list[str]:
    """Names for files, each once.

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
def room_for(out: Path) -> Iterator[None]:
    """A disk that is full, or a folder that cannot be written to, in words."""
    try:
        yield
    except OSError as error:
        raise BatchbayesError(
            expected=f"room and the right to write to {out}",
            got=error.strerror or str(error),
            fix="make room or choose another --out, then run the same command again: finished units are kept",
        ) from error


def _write(path: Path, text: str) -> None:
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")
