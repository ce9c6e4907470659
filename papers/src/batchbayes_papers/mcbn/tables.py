"""The tables of the regression experiments: the paper's value, our value and their difference."""

import math
from collections.abc import Mapping, Sequence
from itertools import product

from batchbayes.tools import count as count_of
from batchbayes_papers.data.uci import SETS
from batchbayes_papers.mcbn.published import PublishedValue, published_value
from batchbayes_papers.mcbn.splits import SYNTHETIC
from batchbayes_papers.runner.experiment import Results, Unit
from batchbayes_papers.runner.significance import one_sample_t_test, stars
from batchbayes_papers.runner.tables import CellValue, ResultTable

Runs = Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]
"""The scores of every run, by data set and method."""
TableRows = list[tuple[CellValue, ...]]

MADE_UP = "Rows without our value are those that the paper has and this preset, with its made-up data, does not run."
BEYOND = ("MCBN", "MCBN, linear", "correlated SBN", "MCBN, tuned by CRPS", "MCBN, tuned by PLL", "ensemble")


def with_published(datasets: Sequence[str]) -> tuple[str, ...]:
    """Return the data sets of a table. If all of ours are made up, those of the paper follow.

    >>> with_published(["yacht"]), with_published(["synthetic"])[:2]
    (('yacht',), ('synthetic', 'boston'))
    """
    return (*datasets, *SETS) if set(datasets) == {SYNTHETIC} else tuple(datasets)


def regression_tables(datasets: Sequence[str], runs: Runs) -> list[ResultTable]:
    """Return plain scores beside tables 6 and 7, normalised scores beside tables 4 and 5, and our own methods."""
    shown = with_published(datasets)
    return [
        raw_table("RMSE (table 7 of the paper)", shown, runs, ("MCBN", "BN", "MCDO", "DO"), 7, "rmse"),
        raw_table("CRPS (table 6)", shown, runs, ("MCBN", "MCDO"), 6, "crps"),
        raw_table("PLL (table 6)", shown, runs, ("MCBN", "MCDO"), 6, "pll"),
        normalised_table("Normalised CRPS, per cent (tables 1 and 4)", shown, runs, 4, "crps_norm"),
        normalised_table("Normalised PLL, per cent (tables 1 and 5)", shown, runs, 5, "pll_norm"),
        tuned_table(datasets, runs),
        beyond_table("Beyond the paper: normalised CRPS, per cent", datasets, runs, 4, "crps_norm"),
        beyond_table("Beyond the paper: normalised PLL, per cent", datasets, runs, 5, "pll_norm"),
        raw_scores_table(datasets, runs),
    ]


def raw_table(
    title: str, datasets: Sequence[str], runs: Runs, methods: Sequence[str], table: int, metric: str
) -> ResultTable:
    """Return means and standard errors over runs, and their difference from the paper: in nats for PLL, else in %."""
    rows: TableRows = []
    in_nats = metric == "pll"
    for dataset, method in product(datasets, methods):
        mean, error, count = summary(values_of(runs, dataset, method, metric))
        paper = published_value(table, dataset, method, metric)
        difference = None
        if paper is not None and mean is not None:
            difference = mean - paper.value if in_nats else 100 * (mean / paper.value - 1)
        rows.append((dataset, method, *_paper_cells(paper), mean, error, difference, count))
    heading = "difference" if in_nats else "difference, %"
    return ResultTable(
        title,
        ("data set", "method", "paper", "± paper", "ours", "± ours", heading, "runs"),
        tuple(rows),
        ("", "", ".2f", ".2f", ".3f", ".3f", "+.2f" if in_nats else "+.1f", ""),
        () if in_nats else ("The paper prints two decimals. On kin8nm this rounds its values by up to 12 %.",),
    )


def _paper_cells(paper: PublishedValue | None) -> tuple[float | None, float | None]:
    return (paper.value, paper.standard_error) if paper else (None, None)


def normalised_table(
    title: str,
    datasets: Sequence[str],
    runs: Runs,
    table: int,
    metric: str,
    methods: Sequence[str] = ("MCBN", "MCDO"),
) -> ResultTable:
    """Return normalised scores, how far they are from the paper's, and whether signs and significances agree."""
    rows: TableRows = []
    verdicts: list[str] = []
    gaps: list[float] = []
    for dataset, method in product(datasets, methods):
        values = values_of(runs, dataset, method, metric)
        mean, error, count = summary(values)
        p_value = one_sample_t_test(values).p_value if has_test(values) else None
        paper = published_value(table, dataset, method, metric)
        agreement: CellValue = None
        gap = _gap(paper, mean, error)
        if gap is not None:
            gaps.append(gap)
        if paper is not None and mean is not None:
            significant = p_value < SIGNIFICANT if p_value is not None else None
            paper_significant = paper.p_value is not None and paper.p_value < SIGNIFICANT
            agreement = verdict(paper.value, paper_significant, mean, significant)
            verdicts.append(agreement)
        cells = (*_paper_cells(paper), _p_cell(paper and paper.p_value), mean, error, _p_cell(p_value))
        rows.append((dataset, method, *cells, gap, agreement, count))
    headings = "paper", "± paper", "paper's p", "ours", "± ours", "our p", "difference / s.e.", "sign and significance"
    return ResultTable(
        title,
        ("data set", "method", *headings, "runs"),
        tuple(rows),
        ("", "", ".2f", ".2f", "", ".2f", ".2f", "", "+.1f", "", ""),
        (
            "0 means constant uncertainty, and 100 means the best possible uncertainty at every point. p is that of a "
            "two-sided t-test against 0, with stars from * (p < 0.05) to **** (p < 1e-4). The difference is ours less "
            "the paper's, in standard errors of the difference.",
            *([in_a_sentence(verdicts)] if verdicts else []),
            *([within_two(gaps)] if gaps else []),
        ),
    )


SIGNIFICANT = 0.05


def _gap(paper: PublishedValue | None, mean: float | None, error: float | None) -> float | None:
    """Return the difference from the paper in standard errors, if both have one."""
    if paper is None or paper.standard_error is None or mean is None or error is None:
        return None
    spread = math.hypot(error, paper.standard_error)
    return (mean - paper.value) / spread if spread else None


def _p_cell(p_value: float | None) -> str | None:
    return None if p_value is None else f"{p_value:.2g} {stars(p_value)}".strip()


def within_two(gaps: Sequence[float]) -> str:
    """Return a sentence that counts small differences.

    >>> within_two([0.5, -1.9, 2.1])
    '2 of 3 are within two standard errors of the paper.'
    """
    return f"{sum(abs(gap) <= 2 for gap in gaps)} of {len(gaps)} are within two standard errors of the paper."


NEITHER, TOO_FEW, NO_NUMBER = "neither significant", "too few runs", "no number"


def in_a_sentence(verdicts: Sequence[str]) -> str:
    """Return a sentence that counts verdicts.

    >>> in_a_sentence(["agree", "agree", "opposite", NEITHER])
    '2 of 4 agree with the paper in sign and significance (p < 0.05); in 1 more neither is significant.'
    """
    text = f"{verdicts.count('agree')} of {len(verdicts)} agree with the paper in sign and significance (p < 0.05)"
    for kind, words in ((NEITHER, "neither is significant"), (TOO_FEW, "there are too few different runs for a test")):
        text += f"; in {verdicts.count(kind)} more {words}" if kind in verdicts else ""
    return text + "."


def verdict(paper: float, paper_significant: bool, ours: float, ours_significant: bool | None) -> str:
    """Say how two results compare. Signs are compared only if both are significant. None: ours cannot be tested.

    >>> verdict(2.0, True, 3.0, True), verdict(2.0, True, -3.0, False), verdict(2.0, True, -3.0, True)
    ('agree', 'ours not significant', 'opposite')
    >>> verdict(2.0, False, -3.0, False), verdict(2.0, True, 3.0, None), verdict(2.0, True, math.nan, None)
    ('neither significant', 'too few runs', 'no number')
    """
    if ours_significant is None:
        return TOO_FEW if math.isfinite(ours) else NO_NUMBER
    if paper_significant and ours_significant:
        return "agree" if (paper > 0) == (ours > 0) else "opposite"
    if paper_significant:
        return "ours not significant"
    return "paper's not significant" if ours_significant else NEITHER


def tuned_table(datasets: Sequence[str], runs: Runs) -> ResultTable:
    """Compare MCBN with a batch size tuned after training with the published MCBN, each score by its own objective."""
    rows: TableRows = []
    for dataset in datasets:
        cells: list[CellValue] = [dataset]
        for table, metric, objective in ((4, "crps_norm", "CRPS"), (5, "pll_norm", "PLL")):
            paper = published_value(table, dataset, "MCBN", metric)
            mean, error, _ = summary(values_of(runs, dataset, f"MCBN, tuned by {objective}", metric))
            comparison: CellValue = None
            if paper and paper.standard_error is not None and mean is not None and error is not None:
                comparison = better_or_worse(mean - paper.value, math.hypot(error, paper.standard_error))
            cells += [with_error(*_paper_cells(paper)), with_error(mean, error), comparison]
        rows.append(tuple(cells))
    return ResultTable(
        "Tuned batch size against the published MCBN: normalised scores, per cent",
        ("data set", "CRPS, paper", "CRPS, tuned", "ours is", "PLL, paper", "PLL, tuned", "ours is"),
        tuple(rows),
        notes=(
            "Better or worse means a difference of more than two standard errors. Our networks are not those of the "
            "paper: each score is relative to constant uncertainty in its own network.",
        ),
    )


def better_or_worse(difference: float, standard_error: float) -> str:
    """Judge a difference of scores for which higher is better.

    >>> better_or_worse(3.0, 1.0), better_or_worse(-3.0, 1.0), better_or_worse(1.0, 1.0)
    ('better', 'worse', 'no different')
    """
    if abs(difference) <= 2 * standard_error:
        return "no different"
    return "better" if difference > 0 else "worse"


def with_error(mean: float | None, error: float | None) -> str | None:
    """Return a mean as text, with its standard error if there is one.

    >>> with_error(1.234, 0.5), with_error(1.234, None)
    ('1.23 ± 0.50', '1.23')
    """
    if mean is None:
        return None
    return f"{mean:.2f}" if error is None else f"{mean:.2f} ± {error:.2f}"


def beyond_table(title: str, datasets: Sequence[str], runs: Runs, table: int, metric: str) -> ResultTable:
    """Return the scores of all methods on batch norm networks, beside the published MCBN."""
    rows: TableRows = []
    for dataset in datasets:
        cells: list[CellValue] = [dataset, with_error(*_paper_cells(published_value(table, dataset, "MCBN", metric)))]
        usual = len(values_of(runs, dataset, "MCBN", metric))
        for method in BEYOND:
            mean, error, number = summary(values_of(runs, dataset, method, metric))
            fewer = f" ({count_of(number, 'run')})" if number not in (0, usual) else ""
            cells.append(None if mean is None else f"{with_error(mean, error)}{fewer}")
        rows.append(tuple(cells))
    return ResultTable(
        title,
        ("data set", "paper's MCBN", *BEYOND),
        tuple(rows),
        notes=(
            "Each method is compared with constant uncertainty around its own means. Both precisions are tuned on the "
            "left-out folds, by CRPS except for the method tuned by PLL. An ensemble is one run for each split. The "
            "number of runs is given if it differs from that of MCBN.",
        ),
    )


def sweep_tables(
    datasets: Sequence[str], runs: Runs, levels: Sequence[int], axis: str, numbers: tuple[int, int]
) -> list[ResultTable]:
    """Return normalised CRPS and PLL of MCBN for each level of `axis`, which is "batch_size" or "passes".

    In `runs`, the levels as texts are in the place of the methods.
    """
    tables = []
    for number, metric in zip(numbers, ("crps_norm", "pll_norm"), strict=True):
        rows: TableRows = []
        for dataset in datasets:
            paper = [published_value(number, dataset, "MCBN", metric, **{axis: level}) for level in levels]
            ours = [summary(values_of(runs, dataset, str(level), metric)) for level in levels]
            rows.append((dataset, "paper", *(value and value.value for value in paper)))
            rows.append((dataset, "ours", *(mean for mean, _, _ in ours)))
            rows.append((dataset, "± ours", *(error for _, error, _ in ours)))
        title = f"Normalised {'CRPS' if metric == 'crps_norm' else 'PLL'}, per cent (table {number})"
        heads = (f"{axis.replace('_', ' ')} {level}" for level in levels)
        tables.append(ResultTable(title, ("data set", "", *heads), tuple(rows), ("", "", *[".1f"] * len(levels))))
    return tables


def raw_scores_table(datasets: Sequence[str], runs: Runs) -> ResultTable:
    """Return the plain scores of all methods, which also reward better means."""
    rows: TableRows = []
    for dataset, method in product(datasets, (*BEYOND, "MCDO")):
        scores = [summary(values_of(runs, dataset, method, metric)) for metric in ("rmse", "crps", "pll")]
        if count := scores[0][2]:
            rows.append((dataset, method, *(mean for mean, _, _ in scores), count))
    return ResultTable(
        "Raw scores of all methods",
        ("data set", "method", "RMSE", "CRPS", "PLL", "runs"),
        tuple(rows),
        ("", "", ".3f", ".3f", ".3f", ""),
    )


def runs_by_method(datasets: Sequence[str], units: Sequence[Unit], results: Results) -> Runs:
    """Return the runs of every data set and method, over all finished units."""
    runs: dict[str, dict[str, list[Mapping[str, float]]]] = {dataset: {} for dataset in datasets}
    for unit in units:
        for method, found in results[unit.name]["runs"].items() if unit.name in results else ():
            runs[unit.arguments["dataset"]].setdefault(method, []).extend(found)
    return runs


def values_of(runs: Runs, dataset: str, method: str, metric: str) -> list[float]:
    """Return one score of all runs of a method."""
    return [run[metric] for run in runs.get(dataset, {}).get(method, ())]


def summary(values: Sequence[float]) -> tuple[float | None, float | None, int]:
    """Return the mean, its standard error (for two or more values) and the number of values.

    >>> summary([1.0, 3.0]), summary([1.0]), summary([])
    ((2.0, 1.0, 2), (1.0, None, 1), (None, None, 0))
    """
    if not values:
        return None, None, 0
    mean, squares = _mean_and_squares(values)
    error = math.sqrt(squares / (len(values) - 1) / len(values)) if len(values) > 1 else None
    return mean, error, len(values)


def has_test(values: Sequence[float]) -> bool:
    """Return whether a t-test is possible: for two or more values that differ, with a finite variance.

    >>> has_test([1.0, 2.0]), has_test([1.0]), has_test([1.0, 1.0]), has_test([1.0, math.nan]), has_test([0, 1e200])
    (True, False, False, False, False)
    """
    return len(set(values)) > 1 and 0 < _mean_and_squares(values)[1] < math.inf


def _mean_and_squares(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the sum of squared deviations from it."""
    mean = total(values) / len(values)
    return mean, total([(value - mean) * (value - mean) for value in values])


def total(values: Sequence[float]) -> float:
    """Return the exact sum if it is finite; otherwise inf or NaN, since a training that diverged is a result too.

    >>> total([0.1] * 10), total([math.inf, -math.inf]), total([1e308, 1e308])
    (1.0, nan, inf)
    """
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)
