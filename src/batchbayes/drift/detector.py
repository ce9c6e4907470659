"""Drift: has the data changed, how accurate is the network now, and can it be helped without labels?

`drift` is fitted once to ordinary data. Then `report` tests a window of live inputs and says in words what differs,
`adapt` returns the network with statistics that follow the window, and `monitor` watches a stream. `novelty/windows.py`
has the test, `adapt.py` the adaptation, `accuracy.py` the accuracy without labels.
"""

import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from batchbayes._common import text
from batchbayes._common.checks import check_classes, whole_number
from batchbayes._common.rng import generator
from batchbayes.drift.accuracy import Confidence, measure_confidence
from batchbayes.drift.adapt import Adapted, ClassMoments, adapt_to, as_posterior, class_mix, draws_of, fit_moments
from batchbayes.drift.report import DriftReport, Kind
from batchbayes.errors import BatchbayesError, warn
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.network.function import Network, as_network
from batchbayes.network.inputs import Picker, Whole
from batchbayes.network.source import Batches, Source, cut, spread_evenly
from batchbayes.novelty import windows
from batchbayes.novelty.detector import predicted_classes
from batchbayes.novelty.looks import changes_of, looks, summary_of
from batchbayes.novelty.scores import ClassGaussian, fit_gaussian
from batchbayes.novelty.statistics import CHUNK, Sight, watch
from batchbayes.novelty.windows import Ordinary, Sample, keep_ordinary
from batchbayes.state import Codec, File, Saved, State, coded, from_file, nested, to_file

if TYPE_CHECKING:
    from batchbayes.drift.monitor import Monitor

MOST, NUMBERS = 4000, 2**25
"""Largest numbers of reference and of calibration examples, and of statistics of the latter (128 MiB)."""
FEWEST = 40
"""Examples. With fewer, no p-value could be small."""
LARGEST = 1024
"""Examples of a window that are looked at; of a larger one an even selection."""
LEVEL = 0.05
"""Windows with a p-value above this leave the network as it is."""
GATE_WINDOWS = 199
_KEPT = nested(Confidence, "confidence.")
_CONFIDENCE = Codec(
    lambda value, own: ({"confidence": to_file(value)[0]}, _KEPT.write(value, own)[1]) if value else ({}, {}),
    lambda file: _KEPT.read(replace(file, header=file.header.get("confidence", {}))),
)


def _ordinary_to_file(ordinary: Ordinary, _: Any) -> State:
    header, tensors = to_file(ordinary)
    return header, {key if key.startswith("gaussian.") else f"ordinary.{key}": each for key, each in tensors.items()}


def _ordinary_from_file(file: File) -> Ordinary:
    tensors = {key.removeprefix("ordinary."): each for key, each in file.tensors.items()}
    return from_file(Ordinary, file.header, tensors, file.model)


@dataclass(frozen=True, eq=False)
class Drift(Saved):
    """A network with what ordinary data looks like inside it. Any number of threads may use it at once."""

    kind: ClassVar[str] = "drift"
    sight: Sight = field(metadata=coded(nested(Sight)))
    moments: ClassMoments = field(metadata=coded(nested(ClassMoments, "moments.")))
    ordinary: Ordinary = field(metadata=coded(Codec(_ordinary_to_file, _ordinary_from_file)))
    looks: Tensor
    """Properties of ordinary inputs, (3, F): mean, standard deviation, and number of examples."""
    confidence: Confidence | None = field(metadata=coded(_CONFIDENCE))
    seed: int

    @property
    def network(self) -> Network:
        """The network that is watched. A file has a fingerprint of its weights."""
        return self.sight.network

    @property
    def widths(self) -> list[int]:
        """The numbers of statistics of the sites."""
        return [place.size for place in self.sight.places]

    @property
    def digest(self) -> str:
        """What tells this fit from another one. A file of `bb.export` has it."""
        parts = self.sight.units, self.ordinary.gaussian.mean, self.ordinary.centres
        return hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in parts)).hexdigest()[:32]

    def report(self, window: Batches, *, inputs: Picker = None) -> DriftReport:
        """Say whether a window of inputs differs from ordinary data, in what, and how accurate the network is on it.

        It costs five passes. `inputs` says where the inputs are in a batch, if they are not where they were in the fit.
        """
        examples, sample, logits = self.seen(window, inputs)
        evidence = self.ordinary.evidence(sample, self.widths)
        adapted = adapt_to(self.sight, self.moments, examples)
        p_value, class_p_value, of_sites = evidence
        if p_value <= LEVEL and len(self.moments.shares) > 1:  # the network's own classes are doubtful
            class_p_value = self.ordinary.class_p_value(adapted.logits.argmax(1))
        kinds: tuple[tuple[Kind, Kind], ...] = (("nothing", "classes"), ("inputs", "inputs and classes"))
        sure = self.confidence
        return DriftReport(
            len(examples),
            kinds[p_value <= LEVEL][class_p_value <= LEVEL],
            p_value,
            class_p_value,
            {place.name: float(value) for place, value in zip(self.sight.places, of_sites, strict=True)},
            changes_of(*looks(examples), self.looks),
            class_mix(adapted.logits, self.moments),
            adapted.trust,
            sure and sure.estimate(adapted.logits, adapted.logits.argmax(1)),
            sure and sure.estimate(adapted.logits, logits.argmax(1)),
            sure and float(sure.temperature_of(adapted.logits)),
        )

    def adapt(self, window: Batches, *, inputs: Picker = None, gate: bool = True) -> BatchNormPosterior:
        """Return the network with statistics that follow a window of inputs, for `predict` and all else.

        Its 16 draws differ in what the window leaves unknown; each costs a pass of the window. If the test sees no
        change at 5 %, the posterior is the network as it is. `gate=False` leaves the test out: the shrinkage decides.
        """
        examples, sample, _ = self.seen(window, inputs)
        if gate and self.ordinary.evidence(sample, self.widths, GATE_WINDOWS).p_value > LEVEL:
            return self.adapted(None)
        return self.adapted(examples)

    def adapted(self, inputs: Tensor | None) -> BatchNormPosterior:
        """Return the posterior of the network adapted to inputs, or as it is."""
        if inputs is not None:
            adapted = adapt_to(self.sight, self.moments, inputs)
            draws = draws_of(self.sight, self.moments, inputs, adapted)
            return as_posterior(self.sight, adapted, draws, len(inputs))
        mean, std = self.sight.units
        trust = torch.zeros(len(self.sight.places), 2).to(mean)
        return as_posterior(self.sight, Adapted(torch.empty(0), mean, std.log(), trust, self.moments.shares), [], 1)

    def sets(self, window: Batches, coverage: float = 0.9, *, inputs: Picker = None) -> Tensor:
        """Return which classes the truth is among, (n, K) bool: sets that grow with the drift of the window."""
        if self.confidence is None:
            fix = "pass calibration=[(x, y)] to bb.drift, with integer labels y"
            raise BatchbayesError("a drift that was fitted with labelled calibration data", "none", fix)
        if not isinstance(coverage, float) or not 0 < coverage < 1:
            raise BatchbayesError("a coverage between 0 and 1", repr(coverage), "pass coverage=0.9")
        examples = self._examples(window, inputs, math.inf)
        few = examples[spread_evenly(len(examples), LARGEST)]
        adapted = adapt_to(self.sight, self.moments, few)
        logits = adapted.logits
        if len(few) < len(examples):
            posterior = as_posterior(self.sight, adapted, [], len(few))
            function, device = posterior.function(posterior.center), posterior.device
            with torch.no_grad():
                logits = torch.cat([function(part.to(device)).double().cpu() for part in cut(examples, None, CHUNK)])
        return self.confidence.sets(logits, coverage)

    def monitor(self, *, false_alarms: float = 0.01, memory: int = 128) -> "Monitor":
        """Return a monitor of a stream. Over an endless unchanged stream it raises an alarm with this chance at most.

        `memory` is the number of recent inputs that it adapts to.
        """
        from batchbayes.drift.monitor import Monitor

        return Monitor(self, false_alarms, memory)

    def seen(self, window: Batches, picker: Picker, largest: float = LARGEST) -> tuple[Tensor, Sample, Tensor]:
        """Return the inputs of a window, what is known of each, and the network's own logits, from one pass."""
        examples = self._examples(window, picker, largest)
        statistics, logits = self.sight.of_all(examples)
        return examples, sample_of(self.ordinary.gaussian, statistics, logits), logits

    def _examples(self, window: Batches, picker: Picker, most: float) -> Tensor:
        self.sight.warn_if_changed()
        return _read(Source(window, picker, usual=self.network.inputs, for_prediction=True), most)[0]

    def require_sound(self) -> None:
        within, rows = self.moments.within, self.ordinary.rows
        if within.shape != (2 * self.sight.units.shape[1],) or rows.shape[1] != self.sight.size + 2:
            raise ValueError(f"moments of shape {tuple(within.shape)} for {self.sight.size} statistics")

    def __repr__(self) -> str:
        labelled = "labelled" if self.confidence else "unlabelled"
        examples = text.count(len(self.ordinary.groups), f"{labelled} example")
        return f"Drift({self.network}: {text.count(len(self.sight.places), 'site')}, calibrated on {examples})"


def drift(
    network: nn.Module,
    reference: Batches,
    *,
    calibration: Batches | None = None,
    seed: int = 0,
    inputs: Picker = None,
    output: str | int | None = None,
) -> Drift:
    """Learn what ordinary data looks like inside a network with batch norm, to notice and repair drift.

    Args:
        network: a trained network. It is left as it is.
        reference: training data as it looks at prediction time, without random crops, flips or noise. No labels are
            needed: predicted classes serve.
        calibration: data of the same kind that the network was not trained on. p-values then hold for new windows. With
            labels, as in `[(x, y)]` or a loader of pairs, the accuracy on a window without labels can be estimated.
        seed: which examples are used for what, and which ordinary windows are drawn.
        inputs: where the inputs are in a batch, if they are not first: a key, a position or a function.
        output: which output counts, if the network returns several.

    >>> model = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).eval()
    >>> found = drift(model, torch.randn(400, 2, generator=generator(0)))
    >>> window = torch.randn(32, 2, generator=generator(1))
    >>> found.report(window).kind, found.report(window + 2).kind
    ('nothing', 'inputs')
    """
    seed, own = whole_number("seed", seed, least=None), as_network(network, output, inputs)
    examples, _ = _read(Source(reference, inputs), MOST)
    labels = None
    sight = watch(own, examples[:2].to(own.device), None)
    most = max(FEWEST, min(MOST, NUMBERS // sight.size))
    if calibration is None:
        rows = torch.randperm(len(examples), generator=generator(seed, "drift"))
        fitted, ordinary = examples[rows[::2]], examples[rows[1::2]][:most]
    else:
        fitted, (ordinary, labels) = examples, _read(Source(calibration, inputs), most)
    if isinstance(labels, bool):
        labels = None
        if sight.logits:
            warn(
                "the labels of calibration= are no class numbers, one for each input, and are not used: no accuracy is "
                "estimated. Pass them as whole numbers in a tensor or array (n,)."
            )
    sight = _with_two_classes(sight, examples[:2], labels)
    if min(len(fitted), len(ordinary)) < FEWEST:
        expected = f"at least {FEWEST} reference and {FEWEST} calibration examples, so that a p-value can be small"
        raise BatchbayesError(expected, f"{len(fitted)} and {len(ordinary)}", "pass more data")
    (statistics, logits), known = sight.of_all(fitted), sight.of_all(ordinary)
    if calibration is None and sight.logits:
        warn(
            "windows are compared with training examples, which a classifier knows better than new ones: more new "
            "windows are called changed than the level says. Pass data that the network was not trained on as "
            "calibration=; labels are welcome, but not needed."
        )
    num_classes = max(1, logits.shape[1])
    gaussian = fit_gaussian(statistics, predicted_classes(logits), num_classes)
    moments = fit_moments(sight.places, torch.cat([statistics, known[0]]), torch.cat([logits, known[1]]))
    kept = keep_ordinary(gaussian, sample_of(gaussian, *known), num_classes, seed)
    found = Drift(sight, moments, kept, summary_of(looks(ordinary)[1]), None, seed)
    if labels is None or num_classes < 2:
        return found
    check_classes("labels of calibration data", labels, num_classes)
    confidence = measure_confidence(ordinary, labels, lambda x: adapt_to(sight, moments, x).logits, seed)
    return replace(found, confidence=confidence)


def _with_two_classes(sight: Sight, examples: Tensor, labels: Tensor | None) -> Sight:
    """Return a sight that takes two outputs for logits if labels say so. Without labels they may be two real values."""
    if sight.logits or labels is None or not bool(((labels == 0) | (labels == 1)).all()):
        return sight
    outputs = sight.network(examples.to(sight.network.device))
    if outputs.shape[1:] == (2,):
        return replace(sight, logits=True)
    if outputs[0].numel() == 1:
        warn(
            "the labels are 0 and 1 and the network has one output. Drift looks at the inputs of such a network, but "
            "not at its classes, so it estimates no accuracy and no sets. For these, wrap the network so that it "
            "returns the two logits (0, f)."
        )
    return sight


def sample_of(gaussian: ClassGaussian, statistics: Tensor, logits: Tensor) -> Sample:
    """Return what is known of examples from their statistics (n, D) and logits (n, K)."""
    energy = -logits.logsumexp(1) if logits.shape[1] else torch.zeros_like(statistics[:, 0])
    return windows.sample_of(gaussian, statistics, predicted_classes(logits), energy)


def _read(source: Source, most: float) -> tuple[Tensor, Tensor | Literal[False] | None]:
    """Return an even choice of inputs, `most` of them at most, and labels if each batch has class numbers last.

    They are False if a batch has something else there.
    """
    found = list(source.evenly(most, _class_numbers))
    if not found:
        raise BatchbayesError(expected="at least one example", got="none", fix="check the data")
    parts, labels = zip(*found, strict=True)
    shapes = dict.fromkeys(part.shape[1:] for part in parts if isinstance(part, Tensor))
    if len(shapes) > 1:
        got = " and ".join(str(tuple(shape)) for shape in list(shapes)[:3])
        raise BatchbayesError("inputs of one shape in all batches", got, "resize them, or fit to one size alone")
    joined = parts[0] if isinstance(parts[0], Whole) else torch.cat(parts)
    if not isinstance(joined, Tensor) or not joined.is_floating_point():
        got = f"{joined.dtype}" if isinstance(joined, Tensor) else type(joined).__name__
        raise BatchbayesError("one tensor of real inputs for each batch", got, "wrap the network so that it takes one")
    if all(isinstance(each, Tensor) for each in labels):
        return joined, torch.cat(labels)
    return joined, False if any(each is False for each in labels) else None


def _class_numbers(batch: Any, inputs: Any) -> Tensor | Literal[False] | None:
    """Return the last part of a batch if it may be the classes of its examples; False if it is something else."""
    last = batch[-1] if isinstance(batch, list | tuple) and len(batch) > 1 else None
    if last is None:
        return None
    given = torch.as_tensor(last) if isinstance(last, Tensor | np.ndarray) else torch.empty(0)
    return given.long().cpu() if given.shape == (len(inputs),) and not given.is_floating_point() else False
