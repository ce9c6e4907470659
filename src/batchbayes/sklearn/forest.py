"""Trees beside the networks: extremely randomised ones, whose leaves remember single rows.

Where targets repeat, jump or have several modes, the targets of similar rows are a better distribution than a spread
around a mean. Each tree predicts one number, and the numbers of all trees are a distribution. As networks do, a tree
leaves out one fold; held-out rows choose how much the trees count.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.ensemble import ExtraTreesRegressor
from torch import Tensor

from batchbayes._common.rng import stream_seed

TREES = 8
"""Trees for each fold and seed."""
MOST_ROWS = 5000
"""Rows that a tree is grown from. The trees of each fold and seed have other ones."""


@dataclass(frozen=True, eq=False)
class Forest:
    """Trees, as arrays over the nodes of all of them."""

    column: Tensor
    """The input that each node asks for."""
    limit: Tensor
    """Rows above it go to the second child."""
    children: Tensor
    """(nodes, 2). The children of a leaf are itself."""
    value: Tensor
    """What a leaf predicts."""
    roots: Tensor
    """The first node of each tree, (T,)."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the numbers of all trees, (N, T)."""
        node = self.roots.repeat(len(inputs))
        row, walks = torch.arange(len(inputs)).repeat_interleave(len(self.roots)), torch.arange(len(node))
        while len(walks):
            own = node[walks]
            above = inputs[row[walks], self.column[own]] > self.limit[own]
            node[walks] = after = self.children[own, above.long()]
            walks = walks[after != own]
        return self.value[node].unflatten(0, (-1, len(self.roots)))


def grow(inputs: Tensor, targets: Tensor, folds: Tensor, seed: int) -> tuple[Forest, np.ndarray]:
    """Grow trees without each fold of each seed, for inputs (N, Q), targets (N,) and folds (R, N).

    Also return for each row the numbers of the trees that left it out, (N, R * `TREES`).
    """
    parts: list[Mapping[str, np.ndarray]] = []
    held_out = np.empty((len(inputs), len(folds), TREES))
    pairs = [(own == fold, seed_number) for seed_number, own in enumerate(folds) for fold in own.unique()]
    for number, (unseen, seed_number) in enumerate(pairs):
        every = -(-int((~unseen).sum()) // MOST_ROWS)
        rows = (~unseen).nonzero()[number % every :: every, 0]
        state = stream_seed(seed, "trees", number) % 2**32
        model = ExtraTreesRegressor(TREES, random_state=state).fit(inputs[rows].numpy(), targets[rows].numpy())
        parts += [_arrays(each.tree_) for each in model.estimators_]
        found = [each.predict(inputs[unseen].numpy()) for each in model.estimators_]
        held_out[unseen.numpy(), seed_number] = np.stack(found, 1)
    starts = np.cumsum([0, *(len(part["value"]) for part in parts[:-1])])
    children = np.concatenate([part["children"] + start for part, start in zip(parts, starts, strict=True)])
    column, limit, value = (np.concatenate([part[name] for part in parts]) for name in ("column", "limit", "value"))
    forest = Forest(*(torch.from_numpy(each) for each in (column, limit, children, value, starts)))
    return forest, held_out.reshape(len(inputs), -1)


def _arrays(tree: object) -> dict[str, np.ndarray]:
    """Return the nodes of one tree of scikit-learn."""
    column, limit, left, right, value = (
        getattr(tree, name) for name in ("feature", "threshold", "children_left", "children_right", "value")
    )
    own, is_leaf = np.arange(len(column)), left < 0
    children = np.where(is_leaf[:, None], own[:, None], np.stack([left, right], 1))
    return {"column": np.maximum(column, 0), "limit": limit, "children": children, "value": value[:, 0, 0]}
