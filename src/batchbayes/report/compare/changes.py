"""When your data changes: what noise, blur and the like would do to this network, and how much adapting repairs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from batchbayes._common.rng import GlobalStream
from batchbayes.drift.accuracy import purposeful_drifts
from batchbayes.drift.detector import Drift, drift
from batchbayes.errors import BatchbayesError
from batchbayes.network.source import spread_evenly
from batchbayes.plots.style import BLUE, GREY, VERMILION, one_panel
from batchbayes.report.read.case import Case
from batchbayes.report.result import Assessment, Figures
from batchbayes.report.words.say import say

EXAMPLES, WINDOW = 128, 64
"""Test examples that are changed, and how many of them are seen at once."""
PASSES = 7
"""Forward passes of each changed example: the network, the test, four to adapt, and the adapted network."""
TITLE = "When your data changes"


class Changed(NamedTuple):
    """What a change does: the share of wrong answers, or the root mean square error."""

    name: str
    strength: float
    network: float
    adapted: float


def with_changes(found: Assessment) -> Assessment:
    """Return the assessment with what changes of the data do: a sentence, numbers and a figure."""
    case = found.case
    try:
        if case.task == "segmentation":
            raise BatchbayesError("a classification or a regression", "a segmentation", "use bb.drift itself")
        with GlobalStream(case.settings.seed):  # data sets may draw random numbers
            fitted = drift(
                case.network, case.train.plain, calibration=[x for x, _ in case.calibration], seed=case.settings.seed
            )
            changes = _changes(case, fitted)
    except BatchbayesError as error:
        told = f"This could not be measured: expected {error.expected}; got {error.got}."
        return replace(found, terms={**found.terms, TITLE: told})
    figures = {} if case.settings.no_figures else _figure(case, changes)
    return replace(
        found,
        facts={**found.facts, "changes": {"told": _words(case, changes), "each": [c._asdict() for c in changes]}},
        figures={**found.figures, **figures},
    )


def _changes(case: Case, fitted: Drift) -> list[Changed]:
    """Measure the network and the adapted one on test examples as they are and drifted."""
    rows = spread_evenly(len(case.test.rows()), min(EXAMPLES, len(case.test.rows()))).tolist()
    chosen = case.test.some(rows)
    inputs, targets = next(iter(chosen))
    assert targets is not None
    changes = []
    for name, strength, drifted in purposeful_drifts(inputs, case.settings.seed):
        windows = drifted.split(WINDOW)
        with torch.no_grad():
            own = torch.cat([fitted.network(window.to(fitted.network.device)).cpu() for window in windows])
            adapted = torch.cat([_adapted(fitted, window) for window in windows])
        changes.append(Changed(name, strength, *(_error(case, each, targets) for each in (own, adapted))))
    return changes


def _adapted(fitted: Drift, window: Tensor) -> Tensor:
    posterior = fitted.adapt(window)
    return posterior.function(posterior.center)(window.to(fitted.network.device)).cpu()


def _error(case: Case, outputs: Tensor, targets: Tensor) -> float:
    if case.task == "regression":
        return float((outputs - targets.reshape(outputs.shape)).square().mean().sqrt())
    is_one_logit = outputs[0].numel() == 1
    answers = (outputs.flatten() > 0).long() if is_one_logit else outputs.argmax(1)
    return float((answers != targets.flatten()).double().mean())


def _written(case: Case, value: float) -> str:
    return f"{value:.3g}" if case.task == "regression" else f"{100 * value:.0f} %"


def _words(case: Case, changes: Sequence[Changed]) -> str:
    first, *others = changes
    worst = max(others, key=lambda change: (change.network, change.adapted))
    own, adapted = (sum(getattr(c, key) for c in others) / len(others) for key in ("network", "adapted"))
    errors = {"first": first.network, "own": own, "worst": worst.network, "adapted": adapted}
    examples = min(EXAMPLES, len(case.test.rows()))
    return say(
        "changes.told",
        changes=len(others),
        examples=examples,
        what="error" if case.task == "regression" else "share of wrong answers",
        name=worst.name,
        window=WINDOW,
        passes=PASSES * len(changes) * examples,
        **{key: _written(case, value) for key, value in (errors | {"worst_adapted": worst.adapted}).items()},
    )


def _figure(case: Case, changes: Sequence[Changed]) -> Figures:
    """Draw a line for each change, from the network's error to that of the adapted network."""
    scale = 1 if case.task == "regression" else 100
    with one_panel(None, (5.6, 0.22 * len(changes) + 1.1)) as panel:
        for place, change in enumerate(changes):
            ends = scale * change.network, scale * change.adapted
            panel.plot(ends, [place, place], color=GREY, lw=1)
            panel.plot(ends[0], place, "o", color=VERMILION, label="" if place else "network")
            panel.plot(ends[1], place, "D", color=BLUE, mfc="white", label="" if place else "adapted")
        panel.set_yticks(range(len(changes)), [f"{c.name} {c.strength:.1f}" if c.strength else c.name for c in changes])
        panel.invert_yaxis()
        panel.set_xlim(left=0)
        panel.set_xlabel("root mean square error" if scale == 1 else "wrong answers, %")
        panel.legend(frameon=False, fontsize=8)
    return {"changes": (panel.figure, say("caption.changes"))}
