"""Properties of inputs that have a name, such as brightness or a column: what differs in a batch or a window."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from batchbayes._common import text

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
