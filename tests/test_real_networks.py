"""Public networks on the real CIFAR-10 images: what others measured, and what must hold on networks that matter."""

from itertools import islice

import numpy as np
import pytest
import torch
from batchbayes_papers.data.cifar10 import augmented_batches, crop_and_flip, load_cifar10, standardise
from batchbayes_papers.models.pretrained import cifar_resnet, espnet_camvid
from helpers.references import left_alone, training_forward

import batchbayes as bb
from batchbayes.engines.check import measure_linearity
from batchbayes.models import MLP
from batchbayes.training.batches import shuffled
from batchbayes.training.loop import TrainingConfig, supervised, train

pytestmark = pytest.mark.shared


def resnet(depth, folder):
    return cifar_resnet(depth, folder / f"weights/resnet{depth}_cifar10_akamaster.safetensors")


@pytest.mark.parametrize(("depth", "accuracy", "nll"), [(20, 0.9173, 0.3727), (32, 0.9263, 0.3741)])
def test_published_accuracy(data_folder, depth, accuracy, nll):
    images, labels = load_cifar10("test", data_folder)
    predictive = bb.predict(
        bb.deterministic(resnet(depth, data_folder)), standardise(images), bb.categorical(), num_samples=1
    )
    assert (predictive.probs.argmax(-1) == labels).double().mean() == pytest.approx(accuracy, abs=1e-9)
    assert -predictive.log_prob(labels).mean() == pytest.approx(nll, abs=5e-5)


def test_a_draw_on_its_own_batch_is_the_training_forward(data_folder):
    network = resnet(20, data_folder).double()
    images, _ = load_cifar10("train", data_folder, 64)
    batches = [batch.double() for batch in islice(augmented_batches(images, 32), 2)]
    with left_alone(network):
        posterior = bb.mcbn(network, batches, num_samples=2, center="batches")
    for row, batch in zip(posterior.center + posterior.deviations, batches, strict=True):
        with torch.no_grad():
            drawn = posterior.function(row)(batch)
        torch.testing.assert_close(drawn, training_forward(network, batch), rtol=0, atol=1e-9)


def test_batches_without_the_training_transforms_are_remarked(data_folder):
    """Without them MCBN loses three points of accuracy on these networks; nothing else would tell."""
    network = resnet(20, data_folder)
    images, _ = load_cifar10("train", data_folder, 2000)
    bb.mcbn(network, augmented_batches(images, 64), num_samples=8, center="batches")  # says nothing
    with pytest.warns(bb.BatchbayesWarning, match="same transforms as in training"):
        bb.mcbn(network, standardise(images), batch_size=64, num_samples=8, center="batches")


def test_crop_and_flip_equals_a_naive_loop():
    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    moved = crop_and_flip(images, torch.Generator().manual_seed(3))
    random = torch.Generator().manual_seed(3)
    tops, lefts = torch.randint(0, 9, (2, 5), generator=random)
    mirrored = torch.rand(5, generator=random) < 0.5
    assert 0 < mirrored.sum() < 5
    for i in range(5):
        padded = torch.nn.functional.pad(images[i], (4, 4, 4, 4))
        crop = padded[:, tops[i] : tops[i] + 32, lefts[i] : lefts[i] + 32]
        assert torch.equal(moved[i], crop.flip(2) if mirrored[i] else crop)


def test_segmentation_network_loads_and_first_sites_can_be_chosen(data_folder):
    network = espnet_camvid(data_folder / "weights/espnet_camvid_sacmehta.safetensors")
    x = torch.randn(6, 3, 48, 64)
    with left_alone(network):
        posterior = bb.mcbn(network, list(x.split(2)), sites=2, center="running")
        predictive = bb.predict(posterior, x[:2], bb.categorical(), num_samples=3)
    assert [site.name for site in posterior.sites] == ["encoder.level1.bn", "encoder.b1.bn"]
    assert predictive.mutual_information.shape == (2, 48, 64)


@pytest.mark.parametrize(
    ("name", "batch_size", "trusted"), [("energy", 16, False), ("energy", 128, True), ("concrete", 16, False)]
)
def test_small_networks_with_small_batches_are_not_linear(data_folder, name, batch_size, trusted):
    """Where the linear engine is known to fail, its check says so; where it works, it does not."""
    with np.load(data_folder / f"uci/{name}.npz") as data:
        x, y = (torch.from_numpy(data[key]).float() for key in ("X", "y"))
    x, y = (x - x.mean(0)) / x.std(0), ((y - y.mean()) / y.std())[:, None]
    network = MLP(x.shape[1], [50, 50], 1)
    objective = supervised(torch.nn.functional.mse_loss)
    train(network, shuffled(x, y, batch_size, seed=0), objective, TrainingConfig(epochs=60, batch_size=batch_size))
    posterior = bb.mcbn(network, x, batch_size=batch_size, num_samples=64, center="running")
    assert measure_linearity(posterior, x, num_draws=16, max_examples=64, seed=0).trusted == trusted
