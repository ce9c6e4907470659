"""batchbayes beside other libraries: the same network, images and thread, in one run.

    python benchmarks/peers.py DATA_FOLDER --environments FOLDER > docs/results/peers.md

Each library runs in an environment of its own in FOLDER, made by `pip install` if it is not there; torch and batchbayes
are those of the present environment. A library whose results are in FOLDER already is not run again. The network is the
public ResNet-20 on CIFAR-10. What is tuned is tuned on 1,000 test images, and scored on 2,000 others; SVHN is unseen.
What needs training images gets the first 5,000, without augmentation, or with it where the method is about it.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import batchbayes as bb
from batchbayes.data.cifar10 import augmented_batches, load_cifar10, standardise
from batchbayes.data.folder import data_file
from batchbayes.data.svhn import load_svhn
from batchbayes.metrics import accuracy, equal_width_reliability, expected_calibration_error, ood_auroc
from batchbayes.models.pretrained import cifar_resnet

PACKAGES = {
    "batchbayes": "batchbayes",
    "laplace-torch": "laplace",
    "torch-uncertainty": "torch_uncertainty",
    "pytorch-ood": "pytorch_ood",
    "MAPIE": "mapie",
}
"""Name of each library, and what is imported."""
EXTRAS = {"torch-uncertainty": "cpu"}
"""Without this extra it cannot be imported."""
TRAINING, CALIBRATION, TEST, UNSEEN = 5000, slice(0, 1000), slice(1000, 3000), 1000
BATCH_SIZE, LEVEL = 128, 0.9
CHUNK = 250


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

    method: str
    library: str
    accuracy: float | None = None
    nll: float | None = None
    ece: float | None = None
    auroc: float | None = None
    passes: float | None = None
    coverage: float | None = None
    set_size: float | None = None


def load(folder: Path) -> Images:
    images, labels = load_cifar10("test", folder, limit=3000)
    raw, train_labels = load_cifar10("train", folder, limit=TRAINING)
    network = cifar_resnet(20, data_file("weights/resnet20_cifar10_akamaster.safetensors", folder))
    network = network.to(memory_format=torch.contiguous_format)  # laplace-torch cannot have another one
    inputs = standardise(images)
    test = inputs[TEST]
    in_chunks(network)(test[:CHUNK])
    start = time.process_time()
    in_chunks(network)(test)
    seconds = time.process_time() - start
    unseen = standardise(load_svhn(folder, UNSEEN))
    pairs = (inputs[CALIBRATION], labels[CALIBRATION]), (test, labels[TEST])
    return Images(network, (standardise(raw), train_labels), raw, *pairs, unseen, seconds)


def in_chunks(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(images: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([function(chunk) for chunk in images.split(CHUNK)])

    return run


def judged(name: str, library: str, data: Images, probs: Callable[[Tensor], Tensor]) -> Row:
    """Score class probabilities. The score for unseen images is their entropy."""
    start = time.process_time()
    known = probs(data.test[0]).double()
    passes = (time.process_time() - start) / data.pass_seconds
    confidence, answer = known.max(-1)
    bins = equal_width_reliability(confidence, answer == data.test[1])
    nll = -known.gather(1, data.test[1][:, None]).clamp_min(1e-30).log().mean()
    auroc = ood_auroc(_entropy(known), _entropy(probs(data.unseen).double()))
    right = accuracy(known, data.test[1])
    return Row(name, library, right, float(nll), expected_calibration_error(bins), auroc, passes)


def _entropy(probs: Tensor) -> Tensor:
    return torch.distributions.Categorical(probs=probs).entropy()


def detected(name: str, library: str, data: Images, score: Callable[[Tensor], Tensor]) -> Row:
    """Score a detector of unseen images. Higher scores are less usual."""
    start = time.process_time()
    known = score(data.test[0])
    passes = (time.process_time() - start) / data.pass_seconds
    return Row(name, library, auroc=ood_auroc(known.float(), score(data.unseen).float()), passes=passes)


def run_batchbayes(data: Images) -> list[Row]:
    network, library = data.network, "batchbayes"

    def seen(posterior: bb.Posterior, temperature: float = 1.0, **options: Any) -> Callable[[Tensor], Tensor]:
        likelihood = bb.categorical(temperature=temperature)
        return lambda x: bb.predict(posterior, x, likelihood, **options).probs

    def tuned(posterior: bb.Posterior, **options: Any) -> Callable[[Tensor], Tensor]:
        kept = bb.predict(posterior, data.calibration[0], bb.categorical(), keep_draws=True, **options)
        return seen(posterior, bb.calibrate.tune_temperature(kept, data.calibration[1]), **options)

    own, linear = bb.deterministic(network), {"engine": "linear", "num_samples": 64}
    fits = {
        "MCBN": bb.mcbn,
        "stochastic BN": bb.stochastic_bn,
        "correlated BN": bb.correlated_bn,
    }
    found = [judged("network", library, data, seen(own)), judged("temperature", library, data, tuned(own))]
    for name, fit in fits.items():
        batches = augmented_batches(data.raw, BATCH_SIZE)
        posterior = fit(network, batches, center="running", num_samples=64)
        found.append(judged(name, library, data, seen(posterior, **linear)))
        if name == "MCBN":
            best = bb.tune_batch_size(posterior, [data.calibration], bb.categorical()).posterior
            found.append(judged("MCBN, tuned", library, data, seen(best, **linear)))
    black = tuple(standardise(torch.zeros(1, 3, 1, 1, dtype=torch.uint8)).flatten().tolist())
    views = bb.with_views(own, bb.Compose(bb.RandomCrop(4, fill=black), bb.RandomFlip()), average=4)
    found.append(judged("16 views + temperature", library, data, tuned(views, num_samples=4)))
    laplace = bb.last_layer_laplace(network, data.train[0].split(CHUNK), bb.categorical(), held_out=[data.calibration])
    found.append(judged("last-layer Laplace", library, data, seen(laplace, num_samples=64)))
    detector = bb.novelty(network, data.train[0], calibration=data.calibration[0])
    found.append(detected("novelty", library, data, detector.score))
    sets = bb.calibrate.conformal_sets(
        bb.predict(own, data.calibration[0], bb.categorical()), data.calibration[1], LEVEL
    )
    inside = sets(bb.predict(own, data.test[0], bb.categorical()))
    return [*found, _sets("conformal sets", library, inside, data)]


def _sets(name: str, library: str, inside: Tensor, data: Images) -> Row:
    coverage = inside[torch.arange(len(inside)), data.test[1]].double().mean()
    return Row(name, library, coverage=float(coverage), set_size=float(inside.sum(1).double().mean()))


def run_laplace(data: Images) -> list[Row]:
    from laplace import Laplace
    from torch.utils.data import DataLoader, TensorDataset

    found = []
    for name, chosen in (("marginal likelihood", "marglik"), ("tuned on held-out images", "gridsearch")):
        fitted = Laplace(data.network, "classification", subset_of_weights="last_layer", hessian_structure="kron")
        fitted.fit(DataLoader(TensorDataset(*data.train), batch_size=CHUNK))
        held_out = DataLoader(TensorDataset(*data.calibration), batch_size=CHUNK)
        options = {"val_loader": held_out, "grid_size": 21} if chosen == "gridsearch" else {}
        fitted.optimize_prior_precision(pred_type="glm", method=chosen, link_approx="probit", **options)
        probs = in_chunks(lambda x, fitted=fitted: fitted(x, pred_type="glm", link_approx="probit"))
        found.append(judged(f"last-layer Laplace, {name}", "laplace-torch", data, probs))
    return found


def run_torch_uncertainty(data: Images) -> list[Row]:
    from torch.utils.data import DataLoader, TensorDataset
    from torch_uncertainty.post_processing import MCBatchNorm, TemperatureScaler

    held_out = DataLoader(TensorDataset(*data.calibration), batch_size=CHUNK)
    scaler = TemperatureScaler(data.network)
    scaler.fit(held_out, progress=False)
    found = [judged("temperature scaler", "torch-uncertainty", data, in_chunks(lambda x: scaler(x).softmax(-1)))]
    images, labels = next(augmented_batches(data.raw, TRAINING)), data.train[1]
    drawn = MCBatchNorm(data.network, num_estimators=16, convert=True, mc_batch_size=BATCH_SIZE)
    drawn.fit(DataLoader(TensorDataset(images, labels), batch_size=BATCH_SIZE, shuffle=True, drop_last=True))
    drawn.eval()

    def probs(x: Tensor) -> Tensor:
        outputs = drawn(x).softmax(-1)
        return outputs.reshape(16, len(x), -1).mean(0)

    return [*found, judged("MC batch norm, 16 draws", "torch-uncertainty", data, in_chunks(probs))]


def run_pytorch_ood(data: Images) -> list[Row]:
    from pytorch_ood.detector import KNN, EnergyBased, Mahalanobis, ViM

    linear = data.network.linear

    def features(x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        with linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
            in_chunks(data.network)(x)
        return torch.cat(seen)

    train, labels = features(data.train[0]), data.train[1]
    energy = EnergyBased(data.network)
    found = [detected("energy", "pytorch-ood", data, in_chunks(energy.predict))]
    detectors = {
        "Mahalanobis": Mahalanobis(None),
        "KNN": KNN(None),
        "ViM": ViM(None, 32, linear.weight.detach(), linear.bias.detach()),
    }
    for name, detector in detectors.items():
        detector.to("cpu")
        detector.fit_features(train, labels)
        score = lambda x, detector=detector: detector.predict_features(features(x))  # noqa: E731
        found.append(detected(name, "pytorch-ood", data, score))
    return found


def run_mapie(data: Images) -> list[Row]:
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

    flat = lambda pair: (pair[0].flatten(1).numpy(), pair[1].numpy())  # noqa: E731
    sets = SplitConformalClassifier(Fitted(), confidence_level=LEVEL, prefit=True, conformity_score="lac")
    sets.conformalize(*flat(data.calibration))
    inside = torch.as_tensor(sets.predict_set(flat(data.test)[0])[1][:, :, 0])
    return [_sets("conformal sets, LAC", "MAPIE", inside, data)]


PARTS = {
    "batchbayes": run_batchbayes,
    "laplace-torch": run_laplace,
    "torch-uncertainty": run_torch_uncertainty,
    "pytorch-ood": run_pytorch_ood,
    "MAPIE": run_mapie,
}


def environment(name: str, folder: Path) -> Path:
    """Make an environment that has a library, with torch and batchbayes of the present one. Return its Python."""
    if name == "batchbayes":
        return Path(sys.executable)
    place = folder / name
    if not (place / "done").exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        own = subprocess.run([place / "bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                             capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
        Path(own, "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        constraints = [
            word for file in Path(__file__).parents[1].glob("constraints*.txt") for word in ("-c", str(file))
        ]
        wanted = f"{name}[{EXTRAS[name]}]" if name in EXTRAS else name
        subprocess.run([place / "bin/pip", "install", "--quiet", *constraints, wanted], check=True, stdout=sys.stderr)
        (place / "done").touch()
    return place / "bin/python"


def import_seconds(python: Path, module: str) -> float:
    """Return the CPU time of an import beyond that of torch: the lowest of three."""
    shim = "import sys, types; sys.modules['torchvision._meta_registrations'] = types.ModuleType('skipped'); "
    lowest = {
        name: min(_cpu_seconds([python, "-c", f"{shim}import {name}"]) for _ in range(3))
        for name in ("torch", f"torch, {module}")
    }
    return lowest[f"torch, {module}"] - lowest["torch"]


def _cpu_seconds(command: list[Any]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def install_size(name: str) -> float:
    """Return the size of a library and all that it requires, without torch and what that requires, in MB."""
    needed = _closure(name, set(), EXTRAS.get(name)) - _closure("torch", set())
    return sum(_size(each) for each in needed) / 1e6


def _closure(name: str, known: set[str], extra: str | None = None) -> set[str]:
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in known:
        return known
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return known
    known.add(key)
    for requirement in found.requires or []:
        if "extra ==" not in requirement or (extra and f"extra == '{extra}'" in requirement.replace('"', "'")):
            _closure(re.match(r"[\w.-]+", requirement)[0], known)
    return known


def _size(name: str) -> int:
    found: Distribution = distribution(name)
    if name == "batchbayes":  # an editable installation lists no files
        return sum(
            path.stat().st_size
            for path in Path(bb.__file__).parent.rglob("*")
            if path.suffix != ".pyc" and path.is_file()
        )
    paths = (found.locate_file(file) for file in found.files or [])
    return sum(os.stat(path).st_size for path in paths if os.path.exists(path) and not str(path).endswith(".pyc"))


def run_part(name: str, folder: Path, out: Path) -> None:
    """Run one library in this process, and write what was found."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Skips a part of torchvision that fails beside another build of torch. No library here uses it.
    sys.modules["torchvision._meta_registrations"] = ModuleType("skipped")
    rows = [asdict(row) for row in PARTS[name](load(folder))]
    version = bb.__version__ if name == "batchbayes" else distribution(name).version
    out.write_text(json.dumps({"rows": rows, "version": version, "size": install_size(name)}))


def page(found: dict[str, dict[str, Any]]) -> str:
    """Write the tables."""
    rows = [row for name in PARTS for row in found[name]["rows"]]

    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    lines = [
        "| method | library | accuracy | NLL | ECE | AUROC, SVHN | forward passes |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["set_size"] is None:
            cells = [cell(row["accuracy"], ".1%"), cell(row["nll"], ".3f"), cell(row["ece"], ".3f")]
            cells += [cell(row["auroc"], ".3f"), cell(row["passes"], ".1f")]
            lines.append(f"| {row['method']} | {row['library']} | " + " | ".join(cells) + " |")
    lines += ["", "| 90 % sets | library | hold the truth | mean size |", "|---|---|---|---|"]
    lines += [
        f"| {r['method']} | {r['library']} | {r['coverage']:.1%} | {r['set_size']:.3f} |" for r in rows if r["set_size"]
    ]
    lines += [
        "",
        "| library | version | size beside torch | CPU time of the import beside torch |",
        "|---|---|---|---|",
    ]
    for name, part in found.items():
        lines.append(f"| {name} | {part['version']} | {part['size']:.0f} MB | {part['import']:.1f} s |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--part", choices=PARTS)
    options = parser.parse_args()
    if options.part:
        run_part(options.part, options.data, options.environments / f"{options.part}.json")
        return
    found = {}
    for name, module in PACKAGES.items():
        python, out = environment(name, options.environments.resolve()), options.environments / f"{name}.json"
        if not out.exists():
            command = [python, __file__, str(options.data), "--environments", str(options.environments), "--part", name]
            subprocess.run(command, check=True, stdout=sys.stderr)
        found[name] = json.loads(out.read_text()) | {"import": import_seconds(python, module)}
    print(page(found))


if __name__ == "__main__":
    main()
