r"""A stream of inputs, watched without end: how long has the data been as it was?

Each example gets conformal p-values: its rank among the ordinary examples and all earlier ones of the stream that are
predicted to be of its class. While nothing changes, these are independent and uniform, also if the mix of classes
moves (Vovk et al., 2005). A bettor stakes money against that: a bet $\kappa p^{\kappa-1}$ wins if p-values are small,
its mirror image if they are large, and neither gains on average if they are uniform. The capital is a martingale, so it
ever reaches $1/a$ with a chance of a at most (Ville), over a stream without end.

A bettor that starts before the change has lost most of its money by then. So part of the capital enters later: a share
$1/\log_2(t + 2)$ is still held back after t examples. Scores are counted in bins, and ties are broken at random. So
ranks are exact, and the memory does not grow. Randomness depends on the seed and on the number of the example alone.

After an alarm the network is adapted to the latest inputs, kept in balance over predicted classes. Every 64 examples
the test of `novelty/windows.py` is asked whether they are ordinary again. If they are, the monitor starts afresh.
"""

import math
import threading
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from batchbayes._common.checks import whole_number
from batchbayes._common.rng import stream_seed
from batchbayes.drift.detector import GATE_WINDOWS, LEVEL, Drift
from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.network.function import Network
from batchbayes.network.inputs import Picker
from batchbayes.network.source import Batches
from batchbayes.novelty.windows import Sample

BINS, BLOCK = 64, 64
"""Bins of a score, and examples after which an alarm is looked at again."""
POWERS = np.array([0.2, 0.5, 0.8])
_NUMBERS = ("false_alarms", "memory", "num_examples", "alarm", "alarms", "_age", "_peak")
MOST = 1e150
"""Capital is not counted beyond this."""


def rank(counts: np.ndarray, bins: np.ndarray, tie: np.ndarray) -> np.ndarray:
    """Return p-values (...) of scores in `bins`, among `counts` (..., BINS) of earlier ones. `tie` is uniform."""
    at, total = bins[..., None], counts.sum(-1)
    equal = np.take_along_axis(counts, at, -1)[..., 0]
    not_above = np.take_along_axis(counts.cumsum(-1), at, -1)[..., 0]
    return np.clip((total - not_above + tie * (equal + 1)) / (total + 1), 1e-12, 1 - 1e-12)


def bet_on(p: np.ndarray) -> np.ndarray:
    """Return the factors by which bettors gain or lose on p-values (...), (..., bettors)."""
    p = p[..., None]
    return np.concatenate([POWERS * p ** (POWERS - 1), POWERS * (1 - p) ** (POWERS - 1)], -1)


def entering(age: int) -> float:
    """Return the share of the capital that enters after this number of examples."""
    return 1 / math.log2(age + 2) - 1 / math.log2(age + 3)


class Watch(NamedTuple):
    """What a monitor says after an update."""

    num_examples: int
    """How many examples it has seen, in all."""
    evidence: float
    """log10 of the capital: an alarm is raised at 2 if `false_alarms` is 0.01."""
    alarm: bool
    """Whether the data has changed and has not come back."""
    alarms: tuple[int, ...]
    """The numbers of examples after which alarms were raised."""


class Monitor:
    """Watches a stream, in constant memory. Threads take turns."""

    kind: ClassVar[str] = "monitor"

    def __init__(self, drift: Drift, false_alarms: float, memory: int) -> None:
        if not isinstance(false_alarms, float) or not 0 < false_alarms < 1:
            raise BatchbayesError("false_alarms between 0 and 1", repr(false_alarms), "pass false_alarms=0.01")
        self.drift, self.false_alarms, self.memory = drift, false_alarms, whole_number("memory", memory, 2)
        self._lock = threading.RLock()
        self.num_examples, self.alarms, self.alarm = 0, [], False
        self._inputs, self._classes = torch.empty(0), torch.empty(0, dtype=torch.long)
        self.calibrate(drift.ordinary.sample(), drift.ordinary.groups)

    def calibrate(self, ordinary: Sample, groups: Tensor) -> None:
        """Count the scores of ordinary examples in bins, (channels, groups, BINS), and start afresh."""
        scores = self.scores(ordinary)  # (N, channels)
        shares = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)[1:-1]
        self._edges = torch.quantile(scores, shares, dim=0).T.contiguous().numpy()  # (channels, BINS - 1)
        self._fresh = np.zeros((len(self._edges), len(self.drift.ordinary.centres), BINS))
        for bins, group in zip(self._bins(scores.numpy()), groups.tolist(), strict=True):
            self._fresh[np.arange(len(bins)), group, bins] += 1
        self._restart()

    def _restart(self) -> None:
        """Forget the stream, and take up betting again."""
        self._counts, self._age = self._fresh.copy(), 0
        self._capital = np.zeros((len(self._edges), 2 * len(POWERS)))
        self._peak = 0.0
        self._block: Sample | None = None

    @property
    def network(self) -> Network:
        """The network that is watched."""
        return self.drift.network

    def scores(self, sample: Sample) -> Tensor:
        """Return what is ranked, (n, channels): distance, energy, and the size of statistics at each third of sites."""
        sites = sample.rows[:, :-2].double().square().split(self.drift.widths, dim=1)
        each = torch.stack([site.mean(1) for site in sites], 1)
        thirds = [part.mean(1) for part in each.tensor_split(min(3, each.shape[1]), dim=1)]
        return torch.stack([*sample.rows[:, -2:].double().unbind(1), *thirds], 1)

    def _bins(self, scores: np.ndarray) -> np.ndarray:
        columns = [np.searchsorted(edges, column) for edges, column in zip(self._edges, scores.T, strict=True)]
        return np.stack(columns, 1)

    def update(self, batch: Batches, *, inputs: Picker = None) -> Watch:
        """Look at new inputs of the stream, in one pass, and say whether the data has changed."""
        examples, sample, _ = self.drift.seen(batch, inputs, math.inf)
        return self.see(examples, sample)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    def see(self, examples: Tensor, sample: Sample) -> Watch:
        """Look at new inputs whose statistics are known already, as from a file of `bb.export`."""
        with self._lock:
            if len(self._inputs) and examples.shape[1:] != self._inputs.shape[1:]:
                shapes = f"{tuple(self._inputs.shape[1:])}", f"{tuple(examples.shape[1:])}"
                fix = "resize the inputs, or watch each size by a monitor of its own"
                raise BatchbayesError(f"inputs of shape (n, ...) with {shapes[0]}, as before", shapes[1], fix)
            self.bet(sample)
            self._remember(examples, sample.classes)
            if self.alarm:
                self._look_again(sample)
            return self.watch

    @property
    def watch(self) -> Watch:
        """What it says now."""
        with self._lock:
            return Watch(self.num_examples, math.log10(max(self._peak, 1e-300)), self.alarm, tuple(self.alarms))

    @property
    def window(self) -> Tensor:
        """The latest inputs, which `posterior` adapts to."""
        with self._lock:
            return self._inputs

    def bet(self, sample: Sample) -> None:
        """Bet on examples, one after the other."""
        groups = self.drift.ordinary.group_of[sample.classes]
        for bins, group in zip(self._bins(self.scores(sample).numpy()), groups.tolist(), strict=True):
            self._bet(bins, group)

    def _bet(self, bins: np.ndarray, group: int) -> None:
        """Bet on the ranks of one example, then count it."""
        counts = self._counts[:, group]  # (channels, BINS)
        tie = np.random.default_rng(stream_seed(self.drift.seed, "monitor", self.num_examples)).random(len(bins))
        winnings = bet_on(rank(counts, bins, tie))
        self._capital = np.minimum((self._capital + entering(self._age)) * winnings, MOST)
        self._counts[np.arange(len(bins)), group, bins] += 1
        self._age += 1
        self.num_examples += 1
        self._peak = max(self._peak, float(self._capital.mean()) + 1 / math.log2(self._age + 2))
        if not self.alarm and self._peak >= 1 / self.false_alarms:
            self.alarm = True
            self.alarms.append(self.num_examples)
            self._inputs, self._classes = self._inputs[-BLOCK:], self._classes[-BLOCK:]  # the others are older

    def _remember(self, examples: Tensor, classes: Tensor) -> None:
        """Keep the latest inputs. The oldest of the most frequent class makes room."""
        self._inputs = torch.cat([self._inputs, examples.cpu()]) if len(self._inputs) else examples.cpu().clone()
        self._classes = torch.cat([self._classes, classes])
        kept = torch.arange(len(self._classes))
        while len(kept) > self.memory:
            found = self._classes[kept]
            most = int(found.bincount().argmax())
            kept = torch.cat([kept[: (at := int((found == most).nonzero()[0]))], kept[at + 1 :]])
        self._inputs, self._classes = self._inputs[kept], self._classes[kept]

    def _look_again(self, sample: Sample) -> None:
        """If the latest block of examples is ordinary, the drift is gone."""
        if self._block is not None:
            sample = Sample(*(torch.cat(pair) for pair in zip(self._block, sample, strict=True)))
        self._block = sample
        if len(sample.classes) < BLOCK:
            return
        self._block = None
        if self.drift.ordinary.evidence(sample, self.drift.widths, GATE_WINDOWS).p_value > LEVEL:
            self.alarm = False
            self._restart()

    def posterior(self) -> BatchNormPosterior:
        """Return the network as it is, or while there is an alarm, adapted to the latest inputs."""
        with self._lock:
            return self.drift.adapted(self._inputs if self.alarm else None)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return a header of JSON values, and tensors, for `save`: the drift and the place in the stream."""
        with self._lock:
            header, tensors = self.drift.state()
            kept = {"_counts": torch.from_numpy(self._counts), "_capital": torch.from_numpy(self._capital)}
            kept |= {"_inputs": self._inputs, "_classes": self._classes}
            block = self._block._asdict() if self._block else {}
            tensors |= {f"monitor.{name}": tensor.clone() for name, tensor in kept.items()}
            tensors |= {f"block.{name}": tensor.clone() for name, tensor in block.items()}
            return header | {"monitor": {name: getattr(self, name) for name in _NUMBERS}}, tensors

    @classmethod
    def restore(cls, header: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module) -> Self:
        """Build it from what `state` returned and the user's network."""
        own = header["monitor"]
        monitor = cls(Drift.restore(header, tensors, model), own["false_alarms"], own["memory"])
        for name in _NUMBERS:
            setattr(monitor, name, own[name])
        counts, capital = (tensors[f"monitor.{name}"].numpy().copy() for name in ("_counts", "_capital"))
        if counts.shape != monitor._counts.shape or capital.shape != monitor._capital.shape:
            raise ValueError(f"counts of shape {counts.shape}")
        monitor._counts, monitor._capital = counts, capital
        monitor._inputs, monitor._classes = tensors["monitor._inputs"], tensors["monitor._classes"]
        if "block.classes" in tensors:
            monitor._block = Sample(*(tensors[f"block.{name}"] for name in Sample._fields))
        return monitor

    def __repr__(self) -> str:
        return f"Monitor({self.network}: {self.num_examples} examples, {'alarm' if self.alarm else 'no alarm'})"
