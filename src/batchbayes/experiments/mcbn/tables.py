"""The tables of the MCBN experiments: paper value, ours, difference."""

import math
from collections.abc import Mapping, Sequence

from batchbayes._common.text import count as count_of
from batchbayes.experiments.published import mcbn_value
from batchbayes.metrics import one_sample_t_test
from batchbayes.reproduce.tables import Cell, Table

Runs = Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]
"""Scores of every run, by data set and method."""

BEYOND = ("MCBN", "MCBN, linear", "correlated SBN", "MCBN, tuned by CRPS", "MCBN, tuned by PLL", "ensemble")


def all_tables(datasets: Sequence[str], runs: Runs) -> list[Table]:
    """Raw scores beside tables 6 and 7, normalised ones beside tables 4 and 5, and the methods that the paper lacks."""
    return [
        raw_table("RMSE (table 7 of the paper)", datasets, runs, ("MCBN", "BN", "MCDO", "DO"), 7, "rmse"),
        raw_table("CRPS (table 6)", datasets, runs, ("MCBN", "MCDO"), 6, "crps"),
        raw_table("PLL (table 6)", datasets, runs, ("MCBN", "MCDO"), 6, "pll"),
        normalised_table("Normalised CRPS, per cent (tables 1 and 4)", datasets, runs, 4, "crps_norm"),
        normalised_table("Normalised PLL, per cent (tables 1 and 5)", datasets, runs, 5, "pll_norm"),
        tuned_table(datasets, runs),
        beyond_table("Beyond the paper: normalised CRPS, per cent", datasets, runs, 4, "crps_norm"),
        beyond_table("Beyond the paper: normalised PLL, per cent", datasets, runs, 5, "pll_norm"),
        raw_scores_table(datasets, runs),
    ]


def raw_table(
    title: str, datasets: Sequence[str], runs: Runs, methods: Sequence[str], table: int, metric: str
) -> Table:
    """Mean and standard error over runs, and how far off the paper."""
    rows: list[tuple[Cell, ...]] = []
    for dataset in datasets:
        for method in methods:
            mean, error, count = summary(runs, dataset, method, metric)
            paper = mcbn_value(table, dataset, method, metric)
            off = None
            if paper is not None and mean is not None:
                off = mean - paper.value if metric == "pll" else 100 * (mean / paper.value - 1)
            rows.append(
                (dataset, method, paper and paper.value, paper and paper.standard_error, mean, error, off, count)
            )
    difference = "difference" if metric == "pll" else "difference, %"
    return Table(
        title,
        ("data set", "method", "paper", "± paper", "ours", "± ours", difference, "runs"),
        tuple(rows),
        ("", "", ".2f", ".2f", ".3f", ".3f", "+.2f" if metric == "pll" else "+.1f", ""),
        ("The paper's figures have two decimals: kin8nm's are rounded by up to 12 %.",) if metric != "pll" else (),
    )


def normalised_table(title: str, datasets: Sequence[str], runs: Runs, table: int, metric: str) -> Table:
    """Signs and significances of both."""
    rows: list[tuple[Cell, ...]] = []
    found: list[str] = []
    for dataset in datasets:
        for method in ("MCBN", "MCDO"):
            mean, error, count = summary(runs, dataset, method, metric)
            values = [run[metric] for run in runs[dataset].get(method, ())]
            ours = stars_of(values)
            paper = mcbn_value(table, dataset, method, metric)
            theirs = None if paper is None else stars_from(paper.p_value)
            same: Cell = None
            if paper is not None and mean is not None:
                same = verdict(paper.value, bool(theirs), mean, bool(ours) if has_test(values) else None)
                found.append(same)
            rows.append(
                (
                    dataset,
                    method,
                    paper and paper.value,
                    paper and paper.standard_error,
                    theirs,
                    mean,
                    error,
                    ours,
                    same,
                    count,
                )
            )
    return Table(
        title,
        (
            "data set",
            "method",
            "paper",
            "± paper",
            "paper's *",
            "ours",
            "± ours",
            "our *",
            "sign and significance",
            "runs",
        ),
        tuple(rows),
        ("", "", ".2f", ".2f", "", ".2f", ".2f", "", "", ""),
        (
            "0 is constant uncertainty, 100 the optimum of every point. Stars: two-sided t-test against 0, from "
            "* p < 0.05 to **** p < 1e-4.",
            in_a_sentence(found),
        ),
    )


NEITHER, TOO_FEW, NO_NUMBER = "neither significant", "too few runs", "no number"


def in_a_sentence(found: Sequence[str]) -> str:
    """Verdicts in a sentence.

    >>> in_a_sentence(["agree", "agree", "opposite", NEITHER])
    '2 of 4 agree with the paper in sign and significance (p < 0.05), in 1 more neither is significant.'
    """
    text = f"{found.count('agree')} of {len(found)} agree with the paper in sign and significance (p < 0.05)"
    for kind, words in ((NEITHER, "neither is significant"), (TOO_FEW, "there are too few different runs for a test")):
        text += f", in {found.count(kind)} more {words}" if kind in found else ""
    return text + "."


def verdict(paper: float, paper_significant: bool, ours: float, ours_significant: bool | None) -> str:
    """How two findings compare: signs tell only where both are significant. None: ours cannot be tested.

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


def tuned_table(datasets: Sequence[str], runs: Runs) -> Table:
    """Whether MCBN with a batch size tuned after training beats the published MCBN, each score by its own objective."""
    rows: list[tuple[Cell, ...]] = []
    for dataset in datasets:
        cells: list[Cell] = [dataset]
        for table, metric, objective in ((4, "crps_norm", "CRPS"), (5, "pll_norm", "PLL")):
            paper = mcbn_value(table, dataset, "MCBN", metric)
            mean, error, _ = summary(runs, dataset, f"MCBN, tuned by {objective}", metric)
            found: Cell = None
            if paper and paper.standard_error is not None and mean is not None and error is not None:
                found = against(mean - paper.value, math.hypot(error, paper.standard_error))
            theirs = with_error(paper.value, paper.standard_error) if paper else None
            cells += [theirs, with_error(mean, error), found]
        rows.append(tuple(cells))
    return Table(
        "Tuned batch size against the published MCBN: normalised scores, per cent",
        ("data set", "CRPS, paper", "CRPS, tuned", "ours is", "PLL, paper", "PLL, tuned", "ours is"),
        tuple(rows),
        notes=(
            "Better or worse: by more than two standard errors of the difference. The networks are not the paper's: "
            "each score is relative to constant uncertainty in its own.",
        ),
    )


def against(difference: float, standard_error: float) -> str:
    """Where higher is better.

    >>> against(3.0, 1.0), against(-3.0, 1.0), against(1.0, 1.0)
    ('better', 'worse', 'no different')
    """
    if abs(difference) <= 2 * standard_error:
        return "no different"
    return "better" if difference > 0 else "worse"


def with_error(mean: float | None, error: float | None) -> str | None:
    """A mean, and its standard error where there is one.

    >>> with_error(1.234, 0.5), with_error(1.234, None)
    ('1.23 ± 0.50', '1.23')
    """
    if mean is None:
        return None
    return f"{mean:.2f}" if error is None else f"{mean:.2f} ± {error:.2f}"


def beyond_table(title: str, datasets: Sequence[str], runs: Runs, table: int, metric: str) -> Table:
    """Every method on batch norm networks beside the published MCBN."""
    rows: list[tuple[Cell, ...]] = []
    for dataset in datasets:
        paper = mcbn_value(table, dataset, "MCBN", metric)
        cells: list[Cell] = [dataset, with_error(paper.value, paper.standard_error) if paper else None]
        usual = summary(runs, dataset, "MCBN", metric)[2]
        for method in BEYOND:
            mean, error, number = summary(runs, dataset, method, metric)
            fewer = f" ({count_of(number, 'run')})" if number not in (0, usual) else ""
            cells.append(None if mean is None else f"{with_error(mean, error)}{fewer}")
        rows.append(tuple(cells))
    return Table(
        title,
        ("data set", "paper's MCBN", *BEYOND),
        tuple(rows),
        notes=(
            "Each method against constant uncertainty around its own mean, both precisions tuned on the folds left "
            "out: by CRPS, but for the one tuned by PLL. An ensemble is one run a split; the number of runs is given "
            "where it is not that of MCBN.",
        ),
    )


def sweep_tables(
    datasets: Sequence[str],
    runs: Mapping[tuple[str, int], Sequence[Mapping[str, float]]],
    levels: Sequence[int],
    axis: str,
    numbers: tuple[int, int],
) -> list[Table]:
    """Normalised CRPS and PLL of MCBN at levels of a setting ("batch_size" or "passes"), as in the paper."""
    made = []
    for number, metric in zip(numbers, ("crps_norm", "pll_norm"), strict=True):
        rows: list[tuple[Cell, ...]] = []
        for dataset in datasets:
            paper = [mcbn_value(number, dataset, "MCBN", metric, **{axis: level}) for level in levels]
            ours = [summary({dataset: {"": runs.get((dataset, level), ())}}, dataset, "", metric) for level in levels]
            rows.append((dataset, "paper", *(value and value.value for value in paper)))
            rows.append((dataset, "ours", *(mean for mean, _, _ in ours)))
            rows.append((dataset, "± ours", *(error for _, error, _ in ours)))
        title = f"Normalised {'CRPS' if metric == 'crps_norm' else 'PLL'}, per cent (table {number})"
        heads = (f"{axis.replace('_', ' ')} {level}" for level in levels)
        made.append(Table(title, ("data set", "", *heads), tuple(rows), ("", "", *[".1f"] * len(levels))))
    return made


def raw_scores_table(datasets: Sequence[str], runs: Runs) -> Table:
    """The same methods by raw scores, which also reward a better mean."""
    rows: list[tuple[Cell, ...]] = []
    for dataset in datasets:
        for method in (*BEYOND, "MCDO"):
            rmse, _, count = summary(runs, dataset, method, "rmse")
            if count:
                others = (summary(runs, dataset, method, metric)[0] for metric in ("crps", "pll"))
                rows.append((dataset, method, rmse, *others, count))
    return Table(
        "Raw scores of all methods",
        ("data set", "method", "RMSE", "CRPS", "PLL", "runs"),
        tuple(rows),
        ("", "", ".3f", ".3f", ".3f", ""),
    )


def summary(runs: Runs, dataset: str, method: str, metric: str) -> tuple[float | None, float | None, int]:
    """Mean, standard error (from two runs on) and number of runs."""
    values = [run[metric] for run in runs.get(dataset, {}).get(method, ())]
    if not values:
        return None, None, 0
    mean = total(values) / len(values)
    if len(values) < 2:
        return mean, None, 1
    squares = total([(value - mean) * (value - mean) for value in values])
    return mean, math.sqrt(squares / (len(values) - 1) / len(values)), len(values)


def total(values: Sequence[float]) -> float:
    """The sum, to the last digit where it is finite: a training that diverged is a result too.

    >>> total([0.1] * 10), total([math.inf, -math.inf]), total([1e308, 1e308])
    (1.0, nan, inf)
    """
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)


def stars_of(values: Sequence[float]) -> str:
    """Significance of a mean that differs from zero; none for too few runs."""
    return one_sample_t_test(values).stars if has_test(values) else ""


def has_test(values: Sequence[float]) -> bool:
    """Whether there is a t-test: not for a single run, nor where all are equal, nor where one is beyond all numbers.

    >>> has_test([1.0, 2.0]), has_test([1.0]), has_test([1.0, 1.0]), has_test([1.0, math.nan]), has_test([0, 1e200])
    (True, False, False, False, False)
    """
    mean = total(values) / max(1, len(values))
    return len(set(values)) > 1 and 0 < total([(value - mean) * (value - mean) for value in values]) < math.inf


def stars_from(p_value: float | None) -> str:
    """Stars for a printed p-value."""
    from batchbayes.metrics import stars

    return "" if p_value is None else stars(p_value)
