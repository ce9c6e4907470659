"""What a prediction costs, in forward passes: in Python, and in an exported file."""

from collections import Counter
from collections.abc import Callable
from threading import get_ident

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from batchbayes.engines.choose import plan_for
from batchbayes.engines.linear import BACKWARD_COST, Drawn, linear_draws, require_linearisable
from batchbayes.methods.deterministic import deterministic
from batchbayes.report.compare.contenders import Contender
from batchbayes.report.read.case import Case
from batchbayes.report.read.views import some_inputs

PRICED = 128
"""Examples on which the passes of the linear engine are counted."""


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
