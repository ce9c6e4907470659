"""Networks of every kind that the methods must work on, each with its inputs, and posteriors of every kind."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from own.jitter import jitter
from torch import Tensor, nn

import batchbayes as bb
from batchbayes.methods.weights.family import Family
from batchbayes.training.loop import TrainingConfig


class BatchNormAct2d(nn.BatchNorm2d):
    """A subclass with the activation inside its forward, as timm has it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


class Residual(nn.Module):
    """A skip connection around a batch-norm branch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.conv(x)))


def head(channels: int, classes: int = 3) -> list[nn.Module]:
    return [nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(channels, classes)]


def vectors(**options: bool) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8, **options), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 6),
        nn.BatchNorm1d(6, **options), nn.Tanh(), nn.Linear(6, 3),
    )  # fmt: skip


def sequences() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 5, 3), nn.BatchNorm1d(5), nn.ReLU(), *head(5))


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), Residual(4), nn.Conv2d(4, 5, 3, bias=False),
        nn.BatchNorm2d(5, eps=1e-3), nn.ReLU(), *head(5),
    )  # fmt: skip


def volumes() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 3, 3), nn.BatchNorm3d(3), nn.ReLU(), *head(3))


def synchronised() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(images())


def activated() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), BatchNormAct2d(4), nn.Conv2d(4, 3, 3), BatchNormAct2d(3), *head(3))


def parallel() -> nn.Module:
    return nn.DataParallel(images())


def compiled() -> nn.Module:
    return torch.compile(images(), backend="eager")  # type: ignore[return-value]


class AlwaysOn(nn.Dropout):
    """Dropout that knows no evaluation mode, as some write it for MC dropout."""

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(input, self.p, training=True)


class Block(nn.Module):
    """One dropout layer that runs twice, the second time by keyword."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(width, width), nn.Linear(width, width), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(input=F.relu(self.second(self.drop(F.relu(self.first(x))))))


def dropped(layer: nn.Module, before: nn.Module, channels: int) -> nn.Module:
    return nn.Sequential(before, nn.SELU(), layer, *head(channels))


def reused() -> nn.Module:
    block = Block(4)
    return nn.Sequential(block, nn.Sequential(nn.Linear(4, 4), AlwaysOn(0.2)), block, nn.Linear(4, 3))


def residual_with_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout2d(0.5), Residual(4), nn.Dropout(0.1, inplace=True), *head(4)
    )


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=8, dropout=0.2, batch_first=True)
    layer.self_attn.dropout = 0.0  # it could not be switched on
    return nn.Sequential(nn.Linear(3, 8), layer, nn.Flatten(), nn.Linear(40, 3))


@dataclass(frozen=True)
class Case:
    """How to build a network, and the shape of one of its inputs."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tracks: bool = True

    def network(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """A network with real running statistics and affine parameters that are not the identity."""
        torch.manual_seed(1)
        network = self.build().to(dtype)
        for name, parameter in network.named_parameters():
            if "weight" in name and parameter.ndim == 1:
                nn.init.uniform_(parameter, 0.5, 1.5)
        network.train()
        with torch.no_grad():
            for batch in self.batches(20, dtype=dtype, seed=9):
                network(batch)
        return network.eval()

    def batches(self, count: int, size: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
        """Mini-batches of inputs with a mean and a scale."""
        random = torch.Generator().manual_seed(seed)
        return [torch.randn(size, *self.shape, generator=random, dtype=dtype) * 1.5 + 0.3 for _ in range(count)]


NETWORKS = {
    "BatchNorm1d (N, C)": Case(vectors, (4,)),
    "BatchNorm1d (N, C, L)": Case(sequences, (2, 7)),
    "BatchNorm2d": Case(images, (2, 8, 8)),
    "BatchNorm3d": Case(volumes, (1, 5, 5, 5)),
    "SyncBatchNorm": Case(synchronised, (2, 8, 8)),
    "subclass with activation": Case(activated, (2, 8, 8)),
    "affine=False": Case(lambda: vectors(affine=False), (4,)),
    "track_running_stats=False": Case(lambda: vectors(track_running_stats=False), (4,), tracks=False),
    "DataParallel": Case(parallel, (2, 8, 8)),
    "torch.compile": Case(compiled, (2, 8, 8)),
}

DROPOUT_NETWORKS = {
    "Dropout": Case(vectors, (4,)),
    "Dropout1d": Case(lambda: dropped(nn.Dropout1d(0.4), nn.Conv1d(2, 5, 3), 5), (2, 7)),
    "Dropout2d": Case(residual_with_dropout, (2, 8, 8)),
    "Dropout3d": Case(lambda: dropped(nn.Dropout3d(0.4), nn.Conv3d(1, 4, 3), 4), (1, 5, 5, 5)),
    "AlphaDropout": Case(lambda: dropped(nn.AlphaDropout(0.2), nn.Conv1d(2, 5, 3), 5), (2, 7)),
    "FeatureAlphaDropout": Case(lambda: dropped(nn.FeatureAlphaDropout(0.4), nn.Conv2d(2, 5, 3), 5), (2, 7, 7)),
    "reused, nested, always on": Case(reused, (4,)),
    "attention": Case(attention, (5, 3)),
    "DataParallel, dropout": Case(lambda: nn.DataParallel(residual_with_dropout()), (2, 8, 8)),
    "torch.compile, dropout": Case(lambda: torch.compile(residual_with_dropout(), backend="eager"), (2, 8, 8)),  # type: ignore[arg-type]
}

CROP_AND_FLIP = bb.Compose(bb.RandomCrop(padding=2, fill=(0.5, -0.5)), bb.RandomFlip())
SHIFT_AND_SCALE = bb.RandomShiftScale(shift=0.1, scale=0.2, fill=0.3)

Fit = Callable[[nn.Module, list[Tensor]], bb.Posterior]


def moved(network: nn.Module, count: int) -> list[dict[str, Tensor]]:
    """State dicts around that of a network."""
    random, own = torch.Generator().manual_seed(3), network.state_dict()
    float_only = {name for name, tensor in own.items() if tensor.is_floating_point()}
    return [
        {n: t * (1 + 0.2 * torch.rand(t.shape, generator=random)) if n in float_only else t for n, t in own.items()}
        for _ in range(count)
    ]


def restarted(network: nn.Module) -> nn.Module:
    """A copy of a network with new random weights."""
    twin = copy.deepcopy(network)
    for module in twin.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.reset_parameters()
    return twin


def trained(method: Callable[..., bb.Posterior], network: nn.Module, batches: list[Tensor], **options) -> bb.Posterior:
    """A method that trains copies of a network, for two epochs of a few batches with made-up labels."""
    labelled = [(batch, batch.flatten(1).sum(1).gt(0).long()) for batch in batches[:2]]
    start = network if method in (bb.fast_geometric, bb.swag) else lambda: restarted(network)
    config = TrainingConfig(epochs=8, batch_size=8, learning_rate=0.05, optimiser="sgd")
    config = replace(config, optimiser="adam") if method is bb.sg_mcmc else config  # it has samplers instead
    return method(start, labelled, F.cross_entropy, config, **options)


def stein(network: nn.Module, batches: list[Tensor]) -> bb.Posterior:
    """Eight particles after a few steps."""
    x = torch.cat(batches)
    labels = x.sum(1).gt(0).long()
    config = TrainingConfig(epochs=2, batch_size=8, learning_rate=0.05)
    return bb.svgd(lambda: restarted(network), (x, labels), F.cross_entropy, config, num_members=8)


def variational(family: Family) -> Fit:
    """Two epochs on labelled batches, from more noise than usual, so that draws differ visibly."""
    return lambda network, batches: bb.variational(network, labelled(batches), family, epochs=2)


def labelled(batches: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Give each input one of three labels."""
    return [(batch, batch.flatten(1).sum(1).abs().long() % 3) for batch in batches]


POSTERIORS: dict[str, Fit] = {
    "mcbn": lambda network, batches: bb.mcbn(network, batches),
    "mcbn, centre running": lambda network, batches: bb.mcbn(network, batches, center="running"),
    "mcbn, first site": lambda network, batches: bb.mcbn(network, batches, sites=1),
    "mcbn, query in its batch": lambda network, batches: bb.mcbn(network, batches, include_query=True),
    "stochastic_bn": lambda network, batches: bb.stochastic_bn(network, batches),
    "stochastic_bn, moving average": lambda n, b: bb.stochastic_bn(n, b, estimator="moving-average"),
    "correlated_bn": lambda network, batches: bb.correlated_bn(network, batches),
    "clt_bn": lambda network, batches: bb.clt_bn(network, batches, batch_size=8),
    "deterministic": lambda network, batches: bb.deterministic(network),
    "population": lambda network, batches: bb.population(network, batches),
    "mc_dropout": lambda network, batches: bb.mc_dropout(network),
    "jitter": lambda network, batches: jitter(network),
    "variational, mean field": variational(bb.MeanField(initial_std=0.1)),
    "variational, sparse": variational(bb.SparseVD(initial_log_var=-5.0)),
    "variational, dropout": variational(bb.VariationalDropout("neuron", initial_log_alpha=-2.0)),
    "variational, gaussian dropout": variational(bb.GaussianDropout(0.5)),
    "variational, structured": variational(bb.StructuredSparsity(initial_log_std=-0.5)),
    "variational, binary dropout": variational(bb.BinaryDropout(initial_rate=0.3)),
    "variational, variance": variational(bb.Variance()),
    "variational, flow": variational(bb.MultiplicativeFlow(initial_std=0.1)),
    "with_views, mcbn": lambda network, batches: bb.with_views(bb.mcbn(network, batches), CROP_AND_FLIP),
    "with_views, deterministic": lambda network, batches: bb.with_views(bb.deterministic(network), SHIFT_AND_SCALE),
    "with_views, averaged": lambda n, b: bb.with_views(bb.deterministic(n), CROP_AND_FLIP, average=3),
    "with_views, mc_dropout": lambda network, batches: bb.with_views(bb.mc_dropout(network), CROP_AND_FLIP),
    "last_layer_laplace": lambda n, b: bb.last_layer_laplace(n, b, bb.categorical(), prior_precision=1.0),
    "last_layer_laplace, evidence": lambda n, b: bb.last_layer_laplace(n, b, bb.gaussian(precision=4.0)),
    "ensemble": lambda network, batches: bb.ensemble([bb.mcbn(network, batches), bb.deterministic(network)]),
    "weight_samples": lambda network, batches: bb.weight_samples(network, moved(network, 8)),
    "weight_samples, mcbn inside": lambda n, b: bb.weight_samples(n, moved(n, 3)).with_noise(lambda m: bb.mcbn(m, b)),
    "weight_samples, new statistics": lambda n, b: bb.weight_samples(n, moved(n, 8)).with_statistics(b),
    "weight_samples, dropout inside": lambda n, b: bb.weight_samples(n, moved(n, 3)).with_noise(bb.mc_dropout),
    "with_views, weight_samples": lambda n, b: bb.with_views(bb.weight_samples(n, moved(n, 3)), CROP_AND_FLIP),
    "deep_ensemble": lambda network, batches: trained(bb.deep_ensemble, network, batches, num_members=8),
    "snapshots": lambda network, batches: trained(bb.snapshots, network, batches, num_members=8),
    "fast_geometric": lambda n, b: trained(bb.fast_geometric, n, b, num_members=8),
    "swag": lambda n, b: trained(bb.swag, n, b, num_members=8, statistics=b),
    "svgd": lambda network, batches: stein(network, batches),
    "sg_mcmc": lambda n, b: trained(bb.sg_mcmc, n, b, num_samples=4, num_chains=2, num_examples=16),
    "with_views, table": lambda n, b: bb.with_views(bb.correlated_bn(n, b), bb.TableJitter.of(torch.cat(b), 0.1)),
}
"""Every method by its name in the table, a comma, and the option. A new method joins here, and the laws run for it."""

ON: dict[str, list[str]] = {
    "mc_dropout": list(DROPOUT_NETWORKS),
    "with_views, mc_dropout": ["Dropout2d"],
    "with_views, table": ["BatchNorm1d (N, C)"],
    "svgd": ["perceptron"],
    "weight_samples": ["BatchNorm2d", "DataParallel", "torch.compile", "Dropout2d"],
    "weight_samples, dropout inside": ["Dropout2d"],
}
"""The networks that the laws run on, for methods that need another than one with branches and several BN sites."""

PERCEPTRON = {"perceptron": Case(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), (4,))}

CASES = NETWORKS | DROPOUT_NETWORKS | PERCEPTRON
CONTRACT = [(method, name) for method in POSTERIORS for name in ON.get(method, ["BatchNorm2d"])]
