"""Randomness as an explicit argument: a stream is named by (seed, path) and depends on nothing else.

Draw s takes its own stream, so it is the same whatever the number of draws, their order or the chunking.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch


def stream_seed(seed: int, *path: int | str) -> int:
    """A 63-bit seed for the stream with this name; streams with different names are independent."""
    digest = hashlib.blake2b(repr((int(seed), *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, *path: int | str) -> torch.Generator:
    """A fresh CPU generator at the start of the stream (seed, path).

    >>> a = torch.randn(2, generator=generator(0, "draw", 3))
    >>> b = torch.randn(2, generator=generator(0, "draw", 3))
    >>> bool((a == b).all())
    True
    """
    return torch.Generator().manual_seed(stream_seed(seed, *path))


@contextmanager
def seeded_globals(seed: int) -> Iterator[None]:
    """Seed the global CPU generators of torch, numpy and Python inside the block, and restore them after it.

    Data loaders and augmentations draw from these; a fit that reads them under a seed can be repeated, and
    leaves the user's own random streams where they were.
    """
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(stream_seed(seed, "torch"))
    np.random.seed(stream_seed(seed, "numpy") % 2**32)
    random.seed(stream_seed(seed, "python"))
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def normals(seed: int, indices: Sequence[int], size: int) -> torch.Tensor:
    """Standard normal numbers for some draws, (s, size) in double precision: each draw has its own stream.

    >>> bool((normals(0, [3], 2)[0] == normals(0, range(5), 2)[3]).all())
    True
    """
    numbers, source = torch.empty(len(indices), size, dtype=torch.float64), torch.Generator()
    for row, index in zip(numbers, indices, strict=True):
        row.normal_(generator=source.manual_seed(stream_seed(seed, "draw", index)))
    return numbers


def dealt(seed: int, index: int, cards: int) -> int:
    """Which of a number of cards draw `index` gets: each once before any comes again, in an order set by the seed.

    >>> sorted(dealt(0, index, 4) for index in range(4))
    [0, 1, 2, 3]
    """
    deck, position = divmod(index, cards)
    return int(_deck(seed, deck, cards)[position])


def dealt_first(seed: int, count: int, cards: int) -> torch.Tensor:
    """Which cards the first `count` draws get, (count,).

    >>> dealt_first(0, 9, 4).tolist() == [dealt(0, index, 4) for index in range(9)]
    True
    """
    return torch.cat([_deck(seed, deck, cards) for deck in range(-(-count // cards))])[:count]


def _deck(seed: int, deck: int, cards: int) -> torch.Tensor:
    return torch.randperm(cards, generator=generator(seed, "deck", deck))
