"""Trees beside the networks. As networks do, a tree leaves out one fold; held-out rows choose how much trees count.

For real targets they are extremely randomised, and their leaves remember single rows. Where targets repeat, jump or
have several modes, the targets of similar rows are a better distribution than a spread around a mean. Each tree
predicts one number, and the numbers of all trees are a distribution.

For classes, few small trees are added up, each a step towards a lower cross-entropy (gradient boosting: Friedman,
Annals of Statistics 29, 2001). A tree has a number for each class, so there is one tree in a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.tree import DecisionTreeRegressor
from torch import Tensor

from batchbayes._common.rng import stream_seed
from batchbayes_tables.crossfit import CHUNK

TREES = 8
"""Trees for each fold and seed."""
MOST_ROWS = 5000
"""Rows that a tree is grown from. The trees of each fold and seed have other ones."""
STEPS, RATE, LEAVES, ROWS_OF_A_LEAF = 40, 0.1, 6, 10
"""Of boosting: trees, how far each of them goes, the most leaves of a tree, and the fewest rows of a leaf."""


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
    """What a leaf predicts: a number, or one for each class."""
    roots: Tensor
    """The first node of each tree, (T,)."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the numbers of all trees, (N, T), or (N, T, K)."""
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
    return _joined(parts), held_out.reshape(len(inputs), -1)


@dataclass(frozen=True, eq=False)
class Boosting:
    """F sums of trees, one for each fold that is left out."""

    start: Tensor
    """The logits that trees are added to, (F, K)."""
    forest: Forest

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the logits of all sums, (F, N, K)."""
        parts = [self.forest(part).unflatten(1, (len(self.start), -1)).sum(2) for part in inputs.split(CHUNK)]
        return torch.cat(parts).transpose(0, 1) + self.start[:, None]

    def held_out(self, inputs: Tensor, folds: Tensor) -> Tensor:
        """Return for each row the logits of the sum that left it out, (N, K), for folds (N,)."""
        return self(inputs)[folds, torch.arange(len(inputs))]


def boost(inputs: Tensor, one_hot: Tensor, folds: Tensor, seed: int) -> Boosting:
    """Boost trees without each fold, for inputs (N, Q), classes (N, K) and folds (N,)."""
    starts, parts = [], []
    for fold in range(int(folds.max()) + 1):
        used = (folds != fold).nonzero()[:, 0]
        rows = used[:: -(-len(used) // MOST_ROWS)]
        start, trees = _boosted(inputs[rows].numpy(), one_hot[rows].double(), stream_seed(seed, "boosting", fold))
        starts.append(start)
        parts += trees
    return Boosting(torch.stack(starts), _joined(parts))


def _boosted(inputs: np.ndarray, one_hot: Tensor, seed: int) -> tuple[Tensor, list[dict[str, np.ndarray]]]:
    """Return the logits of the classes' shares, and trees whose values are to be added to them."""
    start = ((one_hot.sum(0) + 1) / (one_hot.sum() + one_hot.shape[1])).log()
    logits, trees = start.expand(one_hot.shape).clone(), []
    for step in range(STEPS):
        probs = logits.softmax(1)
        gradient, curvature = one_hot - probs, probs * (1 - probs)
        state = stream_seed(seed, "steps", step) % 2**32
        model = DecisionTreeRegressor(max_leaf_nodes=LEAVES, min_samples_leaf=ROWS_OF_A_LEAF, random_state=state)
        tree = model.fit(inputs, gradient.numpy()).tree_
        leaf = torch.from_numpy(tree.apply(inputs))
        empty = torch.zeros(tree.node_count, one_hot.shape[1], dtype=torch.float64)
        value = RATE * empty.index_add(0, leaf, gradient) / (1 + empty.index_add(0, leaf, curvature))
        logits += value[leaf]
        trees.append(_arrays(tree) | {"value": value.numpy()})
    return start, trees


def _joined(parts: Sequence[Mapping[str, np.ndarray]]) -> Forest:
    starts = np.cumsum([0, *(len(part["value"]) for part in parts[:-1])])
    children = np.concatenate([part["children"] + start for part, start in zip(parts, starts, strict=True)])
    column, limit, value = (np.concatenate([part[name] for part in parts]) for name in ("column", "limit", "value"))
    return Forest(*(torch.from_numpy(each) for each in (column, limit, children, value, starts)))


def _arrays(tree: object) -> dict[str, np.ndarray]:
    """Return the nodes of one tree of scikit-learn."""
    column, limit, left, right, value = (
        getattr(tree, name) for name in ("feature", "threshold", "children_left", "children_right", "value")
    )
    own, is_leaf = np.arange(len(column)), left < 0
    children = np.where(is_leaf[:, None], own[:, None], np.stack([left, right], 1))
    return {"column": np.maximum(column, 0), "limit": limit, "children": children, "value": value[:, 0, 0]}
