"""The commands `assess` and `predict`: from parsed options to work, and from results to what is printed."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from batchbayes._common.progress import hidden_progress
from batchbayes.assess.job import Job
from batchbayes.assess.new_data import predict_new
from batchbayes.assess.run import noted_warnings, run_assessment
from batchbayes.assess.write import write_table
from batchbayes.errors import BatchbayesError


def assess_command(options: argparse.Namespace) -> None:
    """Assess, then say where the report is and what it says first."""
    names = options.class_names
    job = Job(
        model=options.model,
        train=options.train,
        test=options.test,
        out=options.out,
        weights=options.weights,
        validation=options.validation,
        ood=options.ood,
        task=options.task,
        target=options.target,
        class_names=tuple(name.strip() for name in names.split(",")) if names else None,
        ignored_label=options.ignore_label,
        batch_size=options.batch_size,
        methods=tuple(name.strip() for name in options.method.split(",")),
        center=options.center,
        engine=options.engine,
        num_samples=options.draws,
        seed=options.seed,
        device=options.device,
        overwrite=options.overwrite,
        parquet=options.parquet,
        command=options.line,
    )
    with running(options):
        report = run_assessment(job, say=(lambda _: None) if options.quiet else _say)
    document = (report.parent / "metrics.json").read_text(encoding="utf-8")
    if options.json:
        print(document, end="")
    elif not options.quiet:
        verdict = json.loads(document)["verdict"]
        print(verdict.pop("headline"), *(f"\n{heading}: {text}" for heading, text in verdict.items()), sep="")
        print(f"\nReport: {report}")


def predict_command(options: argparse.Namespace) -> None:
    """Predict new data to a file, or to standard output."""
    if options.out is not None and options.out.exists():
        raise BatchbayesError(
            expected="an output file that does not exist yet", got=str(options.out), fix="choose another --out"
        )
    if options.out is not None and not options.out.parent.is_dir():
        raise BatchbayesError(
            expected="a folder to write to",
            got=f"nothing at {options.out.parent}",
            fix="make it, or choose another --out",
        )
    with running(options), noted_warnings():
        table = predict_new(
            model=options.model,
            weights=options.weights,
            posterior_path=options.posterior,
            source=options.input,
            target=options.target,
            device=options.device,
            engine=options.engine,
            num_samples=options.draws,
            seed=options.seed,
        )
    rows = [dict(zip(table, cells, strict=True)) for cells in zip(*table.values(), strict=True)]
    if options.out is not None:
        write_table(options.out, table)
    if options.json:
        print(json.dumps(rows))
    elif options.out is None:
        print(",".join(table))
        for row in rows:
            print(",".join(_cell(cell) for cell in row.values()))
    elif not options.quiet:
        print(f"{len(rows)} predictions: {options.out}")


def _cell(cell: object) -> str:
    text = str(cell)
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\n') else text


def _say(text: str) -> None:
    print(f"batchbayes: {text}", file=sys.stderr)


@contextmanager
def running(options: argparse.Namespace) -> Iterator[None]:
    """Threads and progress bars as they were asked for, put back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads or before)
    try:
        with hidden_progress(options.quiet):
            yield
    finally:
        torch.set_num_threads(before)
