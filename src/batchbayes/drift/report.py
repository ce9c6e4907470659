"""What is said of a window: tests, layers, properties of the inputs that have a name, and accuracy, also in words."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from batchbayes._common import text
from batchbayes.drift.accuracy import Estimate

Kind = Literal["nothing", "classes", "inputs", "inputs and classes"]
FAR = 4.0
"""Properties that differ by this number of standard errors are named."""
MOST_CHANNELS = 4
"""Images with more channels have no properties for each."""


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
    temperature: float | None
    """Adapted logits are too sure: `bb.predict(drift.adapt(x), x, bb.categorical(temperature=report.temperature))`."""

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


def looks(inputs: Tensor) -> tuple[tuple[str, ...], Tensor]:
    """Return the names of properties of inputs, and the properties, (n, F) in units of the inputs, on the CPU."""
    found = _looks(inputs)
    return tuple(found), torch.stack(list(found.values()), 1).cpu()


def _looks(inputs: Tensor) -> dict[str, Tensor]:
    x = inputs.float()
    if x.ndim == 4 and min(x.shape[2:]) > 1:
        grey = x.mean(1)
        edges = (grey.diff(dim=1)[..., :-1].square() + grey.diff(dim=2)[:, :-1].square()).sqrt()
        contrast = grey.flatten(1).std(1)
        sharpness = edges.flatten(1).mean(1) / contrast.clamp_min(1e-6)
        found = {"brightness": grey.flatten(1).mean(1), "contrast": contrast, "sharpness": sharpness}
        channels = x.flatten(2).unbind(1) if 1 < x.shape[1] <= MOST_CHANNELS else ()
        found |= {f"mean of channel {i}": channel.mean(1) for i, channel in enumerate(channels)}
        return found | {f"spread of channel {i}": channel.std(1) for i, channel in enumerate(channels)}
    if x.ndim == 2:
        levels = {f"mean of column {i}": column for i, column in enumerate(x.unbind(1))}
        return levels | {f"distance of column {i} from zero": column.abs() for i, column in enumerate(x.unbind(1))}
    return {"level": x.flatten(1).mean(1), "spread": x.flatten(1).std(1).nan_to_num()}


def summary_of(properties: Tensor) -> Tensor:
    """Return mean, standard deviation and number of each property of ordinary inputs (n, F), (3, F)."""
    each = properties.double()
    return torch.stack([each.mean(0), each.std(0), torch.full(each.shape[1:], len(each)).double()])


def changes_of(names: Iterable[str], properties: Tensor, summary: Tensor) -> tuple[Change, ...]:
    """Return properties of a window (n, F) that are far from the ordinary ones."""
    found = []
    for what, now, (mean, std, count) in zip(
        names, properties.double().mean(0).tolist(), summary.T.tolist(), strict=True
    ):
        error = max(std * (1 / len(properties) + 1 / count) ** 0.5, 1e-9)
        found.append(Change(what, mean, now, (now - mean) / error))
    far = [change for change in found if abs(change.standard_errors) >= FAR]
    return tuple(sorted(far, key=lambda change: -abs(change.standard_errors)))
