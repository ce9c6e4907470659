"""The assessment as a whole: from options to the output folder."""

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from batchbayes._common.progress import hidden_progress
from batchbayes.assess.familiar import unfamiliar
from batchbayes.assess.load import load_case
from batchbayes.assess.options import AssessOptions, CommonOptions
from batchbayes.assess.write import require_place, staged, write_files
from batchbayes.errors import BatchbayesError, BatchbayesWarning, warn
from batchbayes.methods import resolve

ASSESSORS = {
    "classification": "batchbayes.assess.classification.compare:assess_classification",
    "regression": "batchbayes.assess.regression.compare:assess_regression",
    "segmentation": "batchbayes.assess.segmentation.compare:assess_segmentation",
}


def assess_command(options: AssessOptions) -> None:
    """Assess, and then print the verdict and where the report is."""
    with running(options):
        report = run_assessment(options, say=(lambda _: None) if options.quiet else _say)
    document = (report.parent / "metrics.json").read_text(encoding="utf-8")
    if options.json:
        print(document, end="")
    elif not options.quiet:
        verdict = json.loads(document)["verdict"]
        print(verdict.pop("headline"), *(f"\n{heading}: {text}" for heading, text in verdict.items()), sep="")
        print(f"\nReport: {report}")


def run_assessment(options: AssessOptions, say: Callable[[str], None] = lambda _: None) -> Path:
    """Assess, write the output folder, whole or not at all, and return the path of the report."""
    from batchbayes.assess.report.build import build_report

    start = time.monotonic()
    _require_extras(options)
    require_place(options.out, options.overwrite)
    with noted_warnings() as caveats:
        say("reading the network and the data")
        case = load_case(options)
        say(f"assessing a {case.task} with {', '.join(options.method)}")
        found = resolve(ASSESSORS[case.task])(options, case)
        test = case.test.whole() if case.split_off else case.test
        problem = unfamiliar(case.network, test, classes=case.task != "regression")
        if problem:
            warn(problem)
            found = replace(found, verdict={**found.verdict, "headline": f"{problem} {found.verdict['headline']}"})
    say("writing the report")
    with staged(options.out) as folder:
        write_files(folder, options, case, found, caveats, time.monotonic() - start)
        build_report(folder)
    return options.out / "report.html"


@contextmanager
def running(options: CommonOptions) -> Iterator[None]:
    """Set the number of threads and hide progress bars, as the options say, inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads or before)
    try:
        with hidden_progress(options.quiet):
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def noted_warnings() -> Iterator[list[str]]:
    """Collect our own warnings for the report, each once, and print them. Other warnings are shown as usual."""
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


def _say(text: str) -> None:
    print(f"batchbayes: {text}", file=sys.stderr)


def _require_extras(options: AssessOptions) -> None:
    """Raise an error if a package that the report needs is not installed."""
    wanted = ["matplotlib", "jinja2", "PIL", *(["pyarrow"] if options.parquet else [])]
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        needed = "matplotlib, jinja2 and pillow for the report" + (", pyarrow for Parquet" if options.parquet else "")
        raise BatchbayesError(
            expected=needed,
            got=f"no {' and no '.join(missing)}",
            fix="pip install 'batchbayes[report]'" + (" pyarrow" if "pyarrow" in missing else ""),
        )
