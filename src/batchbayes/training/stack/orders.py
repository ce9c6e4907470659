"""The batches and the dropout masks of the networks in a stack, with the same random numbers as in `loop.train`."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from batchbayes._common.rng import generator
from batchbayes.training.batches import shuffled_batches
from batchbayes.training.loop import TrainingConfig

Examples = tuple[Tensor, Tensor]
"""The inputs (N, Q) and targets (N, K) that one network is trained on."""


class Orders:
    """The random numbers of G networks. Networks with the same data and seed share their batches.

    `streams` has for each seed the generator of its dropout masks. By default all of them start anew.
    """

    def __init__(
        self,
        data: Sequence[Examples],
        configs: Sequence[TrainingConfig],
        streams: Mapping[int, torch.Generator] | None = None,
    ) -> None:
        seeds = [config.seed for config in configs]
        kinds = [(id(inputs), id(targets), seed) for (inputs, targets), seed in zip(data, seeds, strict=True)]
        unique = list(dict.fromkeys(kinds))
        self._kinds = [(data[kinds.index(kind)], kind[2]) for kind in unique]
        self._kind_of_network = torch.tensor([unique.index(kind) for kind in kinds])
        self._size = min(configs[0].batch_size, len(data[0][0]))
        # "torch" is the stream that GlobalStream gives to torch's global generator, from which dropout draws.
        self.streams = {seed: streams[seed] if streams else generator(seed, "torch") for seed in dict.fromkeys(seeds)}
        self._stream_of_network = torch.tensor([list(self.streams).index(seed) for seed in seeds])

    def batches(self, epoch: int) -> Iterator[Examples]:
        """Yield the inputs (G, M, Q) and the targets (G, M, K) of each step of an epoch."""
        inputs, targets = [], []
        for examples, seed in self._kinds:
            rows = torch.stack(list(shuffled_batches(len(examples[0]), self._size, seed, epoch)))  # (steps, M)
            inputs.append(examples[0][rows])
            targets.append(examples[1][rows])
        for step_inputs, step_targets in zip(torch.stack(inputs, 1), torch.stack(targets, 1), strict=True):
            yield (
                step_inputs.index_select(0, self._kind_of_network),
                step_targets.index_select(0, self._kind_of_network),
            )

    def uniform(self, out: Tensor) -> None:
        """Fill (G, M, width) with the uniform numbers that the dropout of each network draws from its seed."""
        drawn = [torch.rand(out.shape[1:], dtype=out.dtype, generator=stream) for stream in self.streams.values()]
        torch.index_select(torch.stack(drawn), 0, self._stream_of_network, out=out)
