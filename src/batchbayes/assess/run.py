"""From a job to a folder."""

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batchbayes.assess.job import Assessment, Job, Loaded, Task
from batchbayes.assess.load import load
from batchbayes.assess.write import require_place, staged, write_files
from batchbayes.errors import BatchbayesError, BatchbayesWarning


def run_assessment(job: Job, say: Callable[[str], None] = lambda _: None) -> Path:
    """Assess, and write the output folder, whole or not at all; returns the path of the report."""
    from batchbayes.assess.report.build import build_report

    start = time.monotonic()
    _require_extras(job)
    require_place(job.out, job.overwrite)
    with noted_warnings() as caveats:
        say("reading the network and the data")
        loaded = load(job)
        say(f"assessing a {loaded.task} with {', '.join(job.methods)}")
        found = assessors()[loaded.task](job, loaded)
    say("writing the report")
    with staged(job.out) as folder:
        write_files(folder, job, loaded, found, caveats, time.monotonic() - start)
        build_report(folder)
    return job.out / "report.html"


def assessors() -> Mapping[Task, Callable[[Job, Loaded], Assessment]]:
    """How each task is assessed."""
    from batchbayes.assess.classification.compare import assess_classification
    from batchbayes.assess.regression.compare import assess_regression
    from batchbayes.assess.segmentation.compare import assess_segmentation

    return {
        "classification": assess_classification,
        "regression": assess_regression,
        "segmentation": assess_segmentation,
    }


@contextmanager
def noted_warnings() -> Iterator[list[str]]:
    """Note down our own warnings, once each: they belong in the report. Others are shown as ever."""
    notes: list[str] = []

    def note(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        if not issubclass(category, BatchbayesWarning):
            shown(message, category, *where, **more)
        elif str(message) not in notes:
            notes.append(str(message))
            print(f"warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", BatchbayesWarning)
        shown, warnings.showwarning = warnings.showwarning, note
        yield notes


def _require_extras(job: Job) -> None:
    wanted = ["matplotlib", "jinja2", "PIL", *(["pyarrow"] if job.parquet else [])]
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        raise BatchbayesError(
            expected="matplotlib, jinja2 and pillow for the report" + (", pyarrow for Parquet" if job.parquet else ""),
            got=f"no {' and no '.join(missing)}",
            fix="pip install 'batchbayes[report]'" + (" pyarrow" if "pyarrow" in missing else ""),
        )
