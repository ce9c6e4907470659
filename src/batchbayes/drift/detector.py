"""Drift: has the data changed, how accurate is the network now, and can it be helped without labels?

`drift` is fitted once to ordinary data. Then `report` tests a window of live inputs and says in words what differs,
`adapt` returns the network with statistics that follow the window, and `monitor` watches a stream. `windows.py` has the
test, `adapt.py` the adaptation, `accuracy.py` the accuracy without labels.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from batchbayes._common import text
from batchbayes._common.checks import check_classes, whole_number
from batchbayes._common.rng import generator
from batchbayes.drift.accuracy import Confidence, Estimate, measure_confidence
from batchbayes.drift.adapt import Adapted, ClassMoments, adapt_to, as_posterior, class_mix, fit_moments
from batchbayes.drift.windows import Ordinary, Sample, keep_ordinary
from batchbayes.errors import BatchbayesError, warn
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.network.batches import Batches, batch_stream, cut, evenly, input_stream, spread_evenly
from batchbayes.network.function import Network, as_network
from batchbayes.network.inputs import Picker, require_finite
from batchbayes.novelty.detector import CHUNK, collect_statistics, predicted_classes
from batchbayes.novelty.scores import ClassGaussian, fit_gaussian
from batchbayes.novelty.statistics import Sight

if TYPE_CHECKING:
    from batchbayes.drift.monitor import Monitor

REFERENCE, CALIBRATION, NUMBERS = 4000, 4000, 2**25
"""Largest numbers of examples, and of statistics of calibration examples (128 MiB)."""
FEWEST = 40
"""Examples. With fewer, no p-value could be small."""
LARGEST = 1024
"""Examples of a window that are looked at; of a larger one an even selection."""
LEVEL = 0.05
"""Windows with a p-value above this leave the network as it is."""
GATE_WINDOWS = 199

Kind = Literal["nothing", "classes", "inputs", "inputs and classes"]


class Change(NamedTuple):
    """A property of the inputs that is different in a window."""

    what: str
    ordinary: float
    now: float
    standard_errors: float

    def __str__(self) -> str:
        return f"{self.what} {text.number(self.ordinary)} -> {text.number(self.now)}"


@dataclass(frozen=True, eq=False)
class DriftReport:
    """What a window of n inputs says about a change of the data."""

    num_examples: int
    kind: Kind
    """What has changed, at the level of 5 % for each of the two tests."""
    p_value: float
    """That inputs have changed: windows of ordinary inputs of the same predicted classes are as unusual this often."""
    class_p_value: float
    """The same for the mix of classes (label shift)."""
    sites: dict[str, float]
    """The evidence at each batch-norm layer, -log p of that layer alone, in the order of a pass."""
    changes: tuple[Change, ...]
    """Properties of the inputs that differ by more than four standard errors, the largest difference first."""
    mix: Tensor
    """The mix of classes that the adapted network predicts, (K,)."""
    trust: Tensor
    """How far adapting would believe the window at each site, for means and spreads: 0 to 1, (sites, 2)."""
    expected_accuracy: Estimate | None
    """How often the adapted network is right; None without labelled calibration data."""
    network_accuracy: Estimate | None
    """How often the network as it is is right."""

    def __str__(self) -> str:
        """Say it in words."""
        told = {
            "nothing": "No change is seen",
            "classes": "The mix of classes has changed, and inputs of each class look as before",
            "inputs": "The inputs have changed",
            "inputs and classes": "The inputs have changed, and the mix of classes too",
        }
        lines = [f"{told[self.kind]} ({text.count(self.num_examples, 'example')}, p = {self.p_value:.2g})."]
        if self.kind.startswith("inputs"):
            most = sorted(self.sites, key=lambda name: -self.sites[name])[:3]
            lines.append(f"Layers where it shows most: {', '.join(most)}.")
            if self.changes:
                lines.append(f"In the inputs: {'; '.join(map(str, self.changes[:4]))}.")
        if self.network_accuracy and self.expected_accuracy:
            lines.append(f"Expected accuracy: {self.network_accuracy}; adapted {self.expected_accuracy}.")
        if self.num_examples < 8:
            lines.append("With few examples little can be seen, and adapting can do little.")
        return " ".join(lines)


@dataclass(frozen=True, eq=False)
class Drift:
    """A network with what ordinary data looks like inside it. Any number of threads may use it at once."""

    kind: ClassVar[str] = "drift"
    sight: Sight
    moments: ClassMoments
    ordinary: Ordinary
    looks: Tensor
    """Properties of ordinary inputs, (3, F): mean, standard deviation, and number of examples."""
    confidence: Confidence | None
    seed: int

    @property
    def network(self) -> Network:
        """The network that is watched. A file has a fingerprint of its weights."""
        return self.sight.network

    @property
    def widths(self) -> list[int]:
        """The numbers of statistics of the sites."""
        return [place.size for place in self.sight.places]

    def report(self, window: Batches, *, inputs: Picker = None) -> DriftReport:
        """Say whether a window of inputs differs from ordinary data, in what, and how accurate the network is on it.

        It costs five passes. `inputs` says where the inputs are in a batch, if they are not first.
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
            tuple(_changes(self.looks, examples)),
            class_mix(adapted.logits, self.moments),
            adapted.trust,
            sure and sure.estimate(adapted.logits, adapted.logits.argmax(1)),
            sure and sure.estimate(adapted.logits, logits.argmax(1)),
        )

    def adapt(self, window: Batches, *, inputs: Picker = None, gate: bool = True) -> BatchNormPosterior:
        """Return the network with statistics that follow a window of inputs, for `predict` and all else.

        Draws differ in what the window leaves unknown. If the test sees no change at 5 %, the posterior is the network
        as it is. `gate=False` leaves the test out: the shrinkage alone decides.
        """
        examples, sample, _ = self.seen(window, inputs)
        if gate and self.ordinary.evidence(sample, self.widths, GATE_WINDOWS).p_value > LEVEL:
            return self.adapted(None)
        return self.adapted(examples)

    def adapted(self, inputs: Tensor | None) -> BatchNormPosterior:
        """Return the posterior of the network adapted to inputs, or as it is."""
        if inputs is not None:
            adapted = adapt_to(self.sight, self.moments, inputs)
            return as_posterior(self.sight, self.moments, adapted, len(inputs))
        mean, std = self.sight.units
        unchanged = Adapted(torch.empty(0), mean, std.log(), torch.zeros(len(self.sight.places), 2))
        return as_posterior(self.sight, self.moments, unchanged, 1)

    def sets(self, window: Batches, coverage: float = 0.9, *, inputs: Picker = None) -> Tensor:
        """Return which classes the truth is among, (n, K) bool: sets that grow with the drift of the window."""
        if self.confidence is None:
            fix = "pass calibration=[(x, y)] to bb.drift, with integer labels y"
            raise BatchbayesError("a drift that was fitted with labelled calibration data", "none", fix)
        if not isinstance(coverage, float) or not 0 < coverage < 1:
            raise BatchbayesError("a coverage between 0 and 1", repr(coverage), "pass coverage=0.9")
        examples, _, _ = self.seen(window, inputs)
        return self.confidence.sets(adapt_to(self.sight, self.moments, examples).logits, coverage)

    def monitor(self, *, false_alarms: float = 0.01, memory: int = 128) -> "Monitor":
        """Return a monitor of a stream. Over an endless unchanged stream it raises an alarm with this chance at most.

        `memory` is the number of recent inputs that it adapts to.
        """
        from batchbayes.drift.monitor import start_monitor

        return start_monitor(self, false_alarms, memory)

    def seen(self, window: Batches, picker: Picker, largest: float = LARGEST) -> tuple[Tensor, Sample, Tensor]:
        """Return the inputs of a window, what is known of each, and the network's own logits, from one pass."""
        self.sight.warn_if_changed()
        examples = _joined(inputs for _, inputs in batch_stream(window, picker))
        if len(examples) > largest:
            examples = examples[spread_evenly(len(examples), int(largest))]
        statistics, logits = _in_chunks(self.sight, examples)
        return examples, sample_of(self.ordinary.gaussian, statistics, logits), logits

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return a header of JSON values, and tensors, for `save`."""
        header = self.sight.header() | {"rest": self.ordinary.gaussian.rest, "seed": self.seed}
        if self.confidence:
            header |= {"temperature": self.confidence.temperature, "error": self.confidence.error}
        parts = {"moments": self.moments, "ordinary": self.ordinary, "confidence": self.confidence}
        named = {
            f"{name}.{field}": value
            for name, part in {**parts, "gaussian": self.ordinary.gaussian}.items()
            for field, value in (vars(part) if part else {}).items()
            if isinstance(value, Tensor) and not field.startswith("_")
        }
        return header, {"units": self.sight.units, "looks": self.looks} | named

    @classmethod
    def restore(cls, header: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module) -> Self:
        """Build it from what `state` returned and the user's network."""

        def part(name: str) -> dict[str, Tensor]:
            return {key.removeprefix(name): tensors[key] for key in tensors if key.startswith(name)}

        sight = Sight.restore(header, tensors["units"], model)
        gaussian = ClassGaussian(**part("gaussian."), rest=header["rest"])
        ordinary = Ordinary(gaussian, **part("ordinary."), seed=header["seed"])
        moments, saved = ClassMoments(**part("moments.")), part("confidence.")
        if moments.within.shape != (2 * sight.units.shape[1],) or ordinary.statistics.shape[1] != sight.size:
            raise ValueError(f"moments of shape {tuple(moments.within.shape)} for {sight.size} statistics")
        confidence = Confidence(header["temperature"], header["error"], **saved) if saved else None
        return cls(sight, moments, ordinary, tensors["looks"], confidence, header["seed"])

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
    seed = whole_number("seed", seed, least=None)
    if hasattr(reference, "__next__"):
        reference = _first_inputs(input_stream(reference, inputs), REFERENCE)
        inputs = None if calibration is None else inputs
    sight, statistics, logits = collect_statistics(as_network(network, output), reference, REFERENCE, None, inputs)
    most = max(FEWEST, min(CALIBRATION, NUMBERS // sight.size))
    if calibration is None:
        if logits.shape[1]:
            warn(
                "windows are compared with training examples, which a classifier knows better than new ones: more new "
                "windows are called changed than the level says. Pass data that the network was not trained on as "
                "calibration=; labels are welcome, but not needed."
            )
        rows = torch.randperm(len(statistics), generator=generator(seed, "drift"))
        fit, kept = rows[: len(rows) // 2], rows[len(rows) // 2 :][:most]
        ordinary, examples, labels = (
            (statistics[kept], logits[kept]),
            _first_inputs(evenly(reference, most, inputs), most),
            None,
        )
        statistics, logits = statistics[fit], logits[fit]
    else:
        examples, labels = _calibration(calibration, inputs, most)
        ordinary = _in_chunks(sight, examples)
    num_classes = max(1, logits.shape[1])
    gaussian = fit_gaussian(statistics, predicted_classes(logits), num_classes)
    sample = sample_of(gaussian, *ordinary)
    moments = fit_moments(sight.places, torch.cat([statistics, ordinary[0]]), torch.cat([logits, ordinary[1]]))
    kept = keep_ordinary(gaussian, sample, num_classes, seed)
    found = Drift(sight, moments, kept, _summary(looks_of(examples)), None, seed)
    if labels is None or num_classes < 2:
        return found
    check_classes("labels of calibration data", labels, num_classes)
    confidence = measure_confidence(examples, labels, lambda x: adapt_to(sight, moments, x).logits, seed)
    return replace(found, confidence=confidence)


def sample_of(gaussian: ClassGaussian, statistics: Tensor, logits: Tensor) -> Sample:
    """Return what is known of examples from their statistics (n, D) and logits (n, K)."""
    z, classes = gaussian.standardise(statistics), predicted_classes(logits)
    distance = gaussian.distances(z, classes)[0].clamp_min(1e-6).log()
    energy = -logits.logsumexp(1) if logits.shape[1] else torch.zeros(len(z))
    return Sample(z, torch.stack([distance, energy.nan_to_num().clamp(-1e4, 1e4)], 1).float(), classes)


def _in_chunks(sight: Sight, examples: Tensor) -> tuple[Tensor, Tensor]:
    """Return statistics (n, D) and logits (n, K) of inputs."""
    found = [sight(chunk) for chunk in cut(examples, None, CHUNK)]
    statistics, logits = (torch.cat(column) for column in zip(*found, strict=True))
    return require_finite(statistics, "the statistics of the inputs"), require_finite(logits, "the outputs")


def _first_inputs(data: Iterable[Any], most: int) -> Tensor:
    """Return at most this many examples from batches of inputs that may have no end."""
    parts, count = [], 0
    for inputs in data:
        parts.append(inputs)
        count += len(inputs)
        if count >= most:
            break
    return _joined(parts)[:most]


def _joined(parts: Iterable[Any]) -> Tensor:
    """Return inputs as one tensor, or raise an error if there are none, or several tensors in each."""
    given = [part for part in parts if len(part)]
    if not given:
        raise BatchbayesError(expected="at least one example", got="none", fix="check the data")
    joined = torch.cat(given)
    if not isinstance(joined, Tensor) or not joined.is_floating_point():
        got = type(joined).__name__ if not isinstance(joined, Tensor) else f"{joined.dtype}"
        raise BatchbayesError("one tensor of real inputs for each batch", got, "wrap the network so that it takes one")
    return joined


def _calibration(data: Batches, picker: Picker, most: int) -> tuple[Tensor, Tensor | None]:
    """Return inputs and, if there are any, integer labels of at most this many examples."""
    given = [(inputs, _labels(batch, inputs)) for batch, inputs in batch_stream(data, picker)]
    examples = _joined(inputs for inputs, _ in given)
    if len(examples) < FEWEST:
        expected = f"at least {FEWEST} calibration examples, so that a p-value can be small"
        raise BatchbayesError(expected=expected, got=f"{len(examples)}", fix="pass more data")
    known = [labels for _, labels in given if labels is not None]
    labels = torch.cat(known) if len(known) == len(given) else None
    rows = spread_evenly(len(examples), most)
    return examples[rows], None if labels is None else labels[rows]


def _labels(batch: Any, inputs: Tensor) -> Tensor | None:
    """Return the class numbers in a batch (x, y), if it has some."""
    last = batch[-1] if isinstance(batch, list | tuple) and len(batch) > 1 else None
    last = torch.as_tensor(last) if last is not None else None
    is_class = last is not None and last.shape == (len(inputs),) and not last.is_floating_point()
    return last.long().cpu() if last is not None and is_class else None


def looks_of(inputs: Tensor) -> dict[str, Tensor]:
    """Return properties of inputs that have a name, (n,) each, in units of the inputs."""
    x = inputs.float()
    if x.ndim == 4 and min(x.shape[2:]) > 1:
        grey = x.mean(1)
        edges = (grey.diff(dim=1)[..., :-1].square() + grey.diff(dim=2)[:, :-1].square()).sqrt()
        contrast = grey.flatten(1).std(1)
        sharpness = edges.flatten(1).mean(1) / contrast.clamp_min(1e-6)
        return {"brightness": grey.flatten(1).mean(1), "contrast": contrast, "sharpness": sharpness}
    if x.ndim == 2:
        levels = {f"mean of column {i}": column for i, column in enumerate(x.unbind(1))}
        return levels | {f"distance of column {i} from zero": column.abs() for i, column in enumerate(x.unbind(1))}
    return {"level": x.flatten(1).mean(1), "spread": x.flatten(1).std(1).nan_to_num()}


def _summary(looks: Mapping[str, Tensor]) -> Tensor:
    """Return mean, standard deviation and number of each property, (3, F)."""
    each = torch.stack(list(looks.values())).double()
    return torch.stack([each.mean(1), each.std(1), torch.full((len(each),), each.shape[1]).double()])


def _changes(summary: Tensor, inputs: Tensor, least: float = 4.0) -> list[Change]:
    """Return properties of a window that are far from the ordinary ones."""
    found = []
    for (what, values), (mean, std, count) in zip(looks_of(inputs).items(), summary.T.tolist(), strict=True):
        now = float(values.double().mean())
        errors = (now - mean) / max(std * (1 / len(values) + 1 / count) ** 0.5, 1e-9)
        if abs(errors) >= least:
            found.append(Change(what, mean, now, errors))
    return sorted(found, key=lambda change: -abs(change.standard_errors))
