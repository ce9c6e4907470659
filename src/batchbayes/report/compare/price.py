"""What a prediction costs, in forward passes: in Python, and in an exported file. What the comparison will cost."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from threading import get_ident

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from batchbayes._common.progress import Shown
from batchbayes._common.text import count
from batchbayes.engines.choose import plan_for
from batchbayes.engines.linear import BACKWARD_COST, Drawn, linear_draws, require_linearisable
from batchbayes.methods.candidates import Candidate
from batchbayes.methods.deterministic import deterministic
from batchbayes.report.compare.contenders import Contender
from batchbayes.report.read.case import Case
from batchbayes.report.read.views import some_inputs
from batchbayes.report.words.say import say

PRICED = 128
"""Examples on which the passes of the linear engine are counted, and on which a pass is timed."""
PATIENCE_SECONDS = 60.0
"""A comparison that takes longer says so at its start."""


def price_of(case: Case, contender: Contender) -> float:
    """Return what a prediction costs, in forward passes. Those of the linear engine are counted."""
    if contender.drawn is Drawn.LINEAR:
        return counted_passes(case, contender)
    return float(contender.num_samples * max(1, contender.candidate.views))


def counted_passes(case: Case, contender: Contender) -> float:
    """Return how many passes a prediction makes for each example: forward ones, and backward ones at their price.

    Layers are known by their weights, which copies of a network share. The most costly layer counts. Checks of the
    engine are not part of it.
    """
    inputs, posterior = some_inputs(case.calibration, PRICED), require_linearisable(contender.posterior)
    contrasts = bool(case.likelihood.shift_invariant)
    plan, _ = plan_for(posterior, inputs, contender.num_samples, case.settings.seed, contrasts)

    def counts(predict: Callable[[], object]) -> Counter[int]:
        rows: Counter[int] = Counter()

        def see(module: nn.Module, _: object, output: object) -> None:
            key = id(getattr(module, "weight", None))
            if key in own and isinstance(output, Tensor) and get_ident() == here:
                rows[key] += len(output)
                if output.requires_grad:
                    output.register_hook(lambda slope: rows.update({key: BACKWARD_COST * len(slope)}))  # type: ignore[dict-item]

        handle = register_module_forward_hook(see)
        try:
            predict()
        finally:
            handle.remove()
        return rows

    here = get_ident()  # the hook sees the passes of all threads
    layers = [layer for layer in case.network.modules() if not next(layer.children(), None)]
    own = {id(layer.weight) for layer in layers if isinstance(getattr(layer, "weight", None), Tensor)}
    once = counts(lambda: deterministic(case.network).draw(0, 0)(inputs))
    all_passes = counts(lambda: linear_draws(posterior, inputs, plan))
    return round(max((all_passes[key] / rows for key, rows in once.items()), default=float(contender.num_samples)), 1)


def passes_in_file(case: Case, contender: Contender) -> float:
    """Return what a prediction of an exported file costs. It follows every class, and Python those that matter."""
    is_backward = contender.drawn is Drawn.LINEAR and contender.passes > 1
    if is_backward and case.task == "classification" and case.likelihood.shift_invariant:
        return max(contender.passes, 1 + BACKWARD_COST * case.num_outputs)
    return contender.passes


def tell_time(case: Case, candidates: Sequence[Candidate]) -> None:
    """Time a pass of the network. If the comparison may take long, say how long, and what makes it shorter."""
    inputs, draw = some_inputs(case.calibration, PRICED), deterministic(case.network).draw(0, 0)
    start = time.perf_counter()
    draw(inputs)
    seconds = (time.perf_counter() - start) / len(inputs)
    parts = [case.test] if case.split_off else [case.calibration, case.test]
    passes = sum(map(exact_passes, candidates)) * sum(len(part.whole().rows()) for part in parts)
    if passes * seconds > PATIENCE_SECONDS:
        minutes = max(1, round(passes * seconds / 60))
        Shown().say(say("data.takes", passes=passes, time=count(minutes, "minute"), candidates=len(candidates)))


def exact_passes(candidate: Candidate) -> int:
    """Return how many forward passes the exact draws of a candidate take for each example."""
    return candidate.sizes[-1] * max(1, candidate.views)
