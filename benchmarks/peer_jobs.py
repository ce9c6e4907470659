"""What each library is asked to do in `peers.py`, and how the answers are scored."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from batchbayes_papers.data.cifar10 import augmented_batches, load_cifar10, load_svhn, standardise
from batchbayes_papers.data.folder import data_file
from batchbayes_papers.models.pretrained import cifar_resnet
from torch import Tensor, nn

import batchbayes as bb
from batchbayes.metrics import accuracy, expected_calibration_error, ood_auroc

TRAINING, CALIBRATION, TEST, UNSEEN = 3000, slice(0, 1000), slice(1000, 2500), 500
BATCH_SIZE, DRAWS, LEVEL = 128, 16, 0.9
CHUNK = 64
"""Images in a pass. With 250, a pass takes 20 % more time on the processor of the published run."""


@dataclass(frozen=True, eq=False)
class Images:
    """What every library gets."""

    network: nn.Module
    train: tuple[Tensor, Tensor]
    raw: Tensor
    """The training images as bytes, for augmentation."""
    calibration: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    unseen: Tensor
    pass_seconds: float
    """CPU time of the plain network on the test images."""


@dataclass(frozen=True)
class Row:
    """A line of the table. What a method does not answer is None."""

    accuracy: float | None = None
    nll: float | None = None
    ece: float | None = None
    auroc: float | None = None
    passes: float | None = None
    coverage: float | None = None
    set_size: float | None = None


Probs = Callable[[Tensor], Tensor]
Jobs = dict[str, Callable[[], Row]]
"""What is done for each line of the table, by the name of the method."""


def load(folder: Path) -> Images:
    images, labels = load_cifar10("test", folder, limit=2500)
    raw, train_labels = load_cifar10("train", folder, limit=TRAINING)
    network = cifar_resnet(20, data_file("weights/resnet20_cifar10_akamaster.safetensors", folder))
    network = network.to(memory_format=torch.contiguous_format)  # laplace-torch cannot have another one
    inputs = standardise(images)
    test = inputs[TEST]
    seconds = min(timed(in_chunks(network), test)[1] for _ in range(3))
    unseen = standardise(load_svhn(folder, UNSEEN))
    pairs = (inputs[CALIBRATION], labels[CALIBRATION]), (test, labels[TEST])
    return Images(network, (standardise(raw), train_labels), raw, *pairs, unseen, seconds)


def timed(function: Callable[[Tensor], Tensor], images: Tensor) -> tuple[Tensor, float]:
    """Return what a function says of images, and the CPU seconds that it takes."""
    start = time.process_time()
    found = function(images)
    return found, time.process_time() - start


def in_chunks(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(images: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([function(chunk) for chunk in images.split(CHUNK)])

    return run


def nll(probs: Tensor, labels: Tensor) -> Tensor:
    return -probs.gather(1, labels[:, None]).clamp_min(1e-30).log().mean()


def judged(data: Images, probs: Probs) -> Row:
    """Score class probabilities. The score for unseen images is their entropy."""
    answers, seconds = timed(probs, data.test[0])
    known = answers.double()
    auroc = ood_auroc(_entropy(known), _entropy(probs(data.unseen).double()))
    loss, ece = float(nll(known, data.test[1])), expected_calibration_error(known, data.test[1])
    return Row(accuracy(known, data.test[1]), loss, ece, auroc, seconds / data.pass_seconds)


def _entropy(probs: Tensor) -> Tensor:
    return torch.distributions.Categorical(probs=probs).entropy()


def detected(data: Images, score: Callable[[Tensor], Tensor]) -> Row:
    """Score a detector of unseen images. Higher scores are less usual."""
    known, seconds = timed(score, data.test[0])
    return Row(auroc=ood_auroc(known.float(), score(data.unseen).float()), passes=seconds / data.pass_seconds)


def judged_sets(data: Images, inside: Tensor) -> Row:
    """Score sets of classes, bool (N, K)."""
    coverage = inside[torch.arange(len(inside)), data.test[1]].double().mean()
    return Row(coverage=float(coverage), set_size=float(inside.sum(1).double().mean()))


def batchbayes_jobs(data: Images) -> Jobs:
    network, linear = data.network, {"engine": "linear", "num_samples": 64}
    own = bb.deterministic(network)
    black = tuple(standardise(torch.zeros(1, 3, 1, 1, dtype=torch.uint8)).flatten().tolist())

    def seen(posterior: bb.Posterior, temperature: float = 1.0, **options: Any) -> Probs:
        likelihood = bb.categorical(temperature=temperature)
        return lambda x: bb.predict(posterior, x, likelihood, **options).probs

    def tuned(posterior: bb.Posterior, **options: Any) -> Probs:
        kept = bb.predict(posterior, data.calibration[0], bb.categorical(), keep_draws=True, **options)
        return seen(posterior, bb.calibrate.tune_temperature(kept, data.calibration[1]), **options)

    def noisy(fit: Callable[..., bb.BatchNormPosterior]) -> bb.BatchNormPosterior:
        return fit(network, augmented_batches(data.raw, BATCH_SIZE), center="running", num_samples=32)

    def best() -> bb.BatchNormPosterior:
        return bb.tune_batch_size(noisy(bb.mcbn), [data.calibration], bb.categorical()).posterior

    def views() -> bb.Posterior:
        return bb.with_views(own, bb.Compose(bb.RandomCrop(4, fill=black), bb.RandomFlip()), average=4)

    def laplace() -> bb.LaplacePosterior:
        images = data.train[0].split(CHUNK)
        return bb.last_layer_laplace(network, images, bb.categorical(), held_out=[data.calibration])

    def novelty() -> bb.Novelty:
        return bb.novelty(network, data.train[0], calibration=data.calibration[0])

    def sets() -> Tensor:
        held_out = bb.predict(own, data.calibration[0], bb.categorical())
        found = bb.calibrate.conformal_sets(held_out, data.calibration[1], LEVEL)
        return found(bb.predict(own, data.test[0], bb.categorical()))

    return {
        "network": lambda: judged(data, seen(own)),
        "temperature": lambda: judged(data, tuned(own)),
        "MCBN": lambda: judged(data, seen(noisy(bb.mcbn), **linear)),
        "MCBN, tuned batch size": lambda: judged(data, seen(best(), **linear)),
        "stochastic BN": lambda: judged(data, seen(noisy(bb.stochastic_bn), **linear)),
        "correlated BN": lambda: judged(data, seen(noisy(bb.correlated_bn), **linear)),
        "16 views + temperature": lambda: judged(data, tuned(views(), num_samples=4)),
        "last-layer Laplace, draws": lambda: judged(data, seen(laplace(), **linear)),
        "last-layer Laplace, probit formula": lambda: judged(data, in_chunks(laplace().probit_probs)),
        "novelty": lambda: detected(data, novelty().score),
        "conformal sets": lambda: judged_sets(data, sets()),
    }


def laplace_jobs(data: Images) -> Jobs:
    from laplace import Laplace
    from torch.utils.data import DataLoader, TensorDataset

    def probs(method: str, **options: Any) -> Probs:
        fitted = Laplace(data.network, "classification", subset_of_weights="last_layer", hessian_structure="kron")
        fitted.fit(DataLoader(TensorDataset(*data.train), batch_size=CHUNK))
        fitted.optimize_prior_precision(pred_type="glm", method=method, link_approx="probit", **options)
        return in_chunks(lambda x: fitted(x, pred_type="glm", link_approx="probit"))

    held_out = DataLoader(TensorDataset(*data.calibration), batch_size=CHUNK)
    # Its own running metric is not set back between the points of the grid, so that the last one would always win.
    searched = {"method": "gridsearch", "val_loader": held_out, "grid_size": 21, "loss": nll}
    return {
        "last-layer Laplace, marginal likelihood": lambda: judged(data, probs("marglik")),
        "last-layer Laplace, prior tuned on held-out images": lambda: judged(data, probs(**searched)),
    }


def torch_uncertainty_jobs(data: Images) -> Jobs:
    from torch.utils.data import DataLoader, TensorDataset
    from torch_uncertainty.post_processing import MCBatchNorm, TemperatureScaler

    def scaled() -> Probs:
        scaler = TemperatureScaler(data.network)
        scaler.fit(DataLoader(TensorDataset(*data.calibration), batch_size=CHUNK), progress=False)
        return in_chunks(lambda x: scaler(x).softmax(-1))

    def drawn() -> Probs:
        images = TensorDataset(next(augmented_batches(data.raw, TRAINING)), data.train[1])
        posterior = MCBatchNorm(data.network, num_estimators=DRAWS, convert=True, mc_batch_size=BATCH_SIZE)
        posterior.fit(DataLoader(images, batch_size=BATCH_SIZE, shuffle=True, drop_last=True))
        posterior.eval()
        return in_chunks(lambda x: posterior(x).softmax(-1).reshape(DRAWS, len(x), -1).mean(0))

    return {
        "temperature scaler": lambda: judged(data, scaled()),
        f"MC batch norm, {DRAWS} draws": lambda: judged(data, drawn()),
    }


def pytorch_ood_jobs(data: Images) -> Jobs:
    from pytorch_ood.detector import KNN, EnergyBased, Mahalanobis, ViM

    linear = data.network.linear

    def features(x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        with linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
            in_chunks(data.network)(x)
        return torch.cat(seen)

    def fitted(detector: Any) -> Callable[[Tensor], Tensor]:
        detector.to("cpu")
        detector.fit_features(features(data.train[0]), data.train[1])
        return lambda x: detector.predict_features(features(x))

    return {
        "energy": lambda: detected(data, in_chunks(EnergyBased(data.network).predict)),
        "Mahalanobis": lambda: detected(data, fitted(Mahalanobis(None))),
        "KNN": lambda: detected(data, fitted(KNN(None))),
        "ViM": lambda: detected(data, fitted(ViM(None, 32, linear.weight.detach(), linear.bias.detach()))),
    }


def mapie_jobs(data: Images) -> Jobs:
    import numpy as np
    from mapie.classification import SplitConformalClassifier
    from sklearn.base import BaseEstimator, ClassifierMixin

    class Fitted(ClassifierMixin, BaseEstimator):
        """The network as scikit-learn sees it: rows of numbers in, probabilities out."""

        classes_ = np.arange(10)

        def fit(self, rows: Any, labels: Any) -> "Fitted":
            return self

        def predict_proba(self, rows: Any) -> Any:
            images = torch.as_tensor(rows, dtype=torch.float32).reshape(-1, 3, 32, 32)
            return in_chunks(lambda x: data.network(x).softmax(-1))(images).double().numpy()

        def predict(self, rows: Any) -> Any:
            return self.predict_proba(rows).argmax(-1)

        def __sklearn_is_fitted__(self) -> bool:
            return True

    def sets() -> Tensor:
        conformal = SplitConformalClassifier(Fitted(), confidence_level=LEVEL, prefit=True, conformity_score="lac")
        conformal.conformalize(data.calibration[0].flatten(1).numpy(), data.calibration[1].numpy())
        return torch.as_tensor(conformal.predict_set(data.test[0].flatten(1).numpy())[1][:, :, 0])

    return {"conformal sets, LAC": lambda: judged_sets(data, sets())}


JOBS: dict[str, Callable[[Images], Jobs]] = {
    "batchbayes": batchbayes_jobs,
    "laplace-torch": laplace_jobs,
    "torch-uncertainty": torch_uncertainty_jobs,
    "pytorch-ood": pytorch_ood_jobs,
    "MAPIE": mapie_jobs,
}
