"""Random weights in networks of other packages, by one call. `make users` has these packages; others are skipped."""

import pytest
import torch

import batchbayes as bb

pytestmark = pytest.mark.usefixtures("torchvision_operators")


def check(model, inputs, targets, tmp_path):
    """One step of training, a draw, a file, and back to the user's network."""
    posterior = bb.variational(model, [(inputs, targets)], bb.MeanField(initial_std=0.02), epochs=1, num_examples=100)
    with torch.no_grad():
        first, second = (posterior.draw(0, index)(inputs) for index in range(2))
    assert first.shape == second.shape
    assert not torch.equal(first, second)
    bb.save(posterior, tmp_path / "posterior.safetensors")
    with torch.no_grad():
        assert torch.equal(bb.load(tmp_path / "posterior.safetensors", model).draw(0, 1)(inputs), second)
    model.load_state_dict(posterior.means())


@pytest.mark.parametrize("name", ["resnet18", "resnext26ts", "efficientnet_b0", "vit_tiny_patch16_224"])
def test_timm(name, tmp_path):
    timm = pytest.importorskip("timm")
    size = 224 if name.startswith("vit") else 64
    check(timm.create_model(name, num_classes=5), torch.randn(2, 3, size, size), torch.tensor([0, 3]), tmp_path)


def test_segmentation_by_a_u_net(tmp_path):
    smp = pytest.importorskip("segmentation_models_pytorch")
    model = smp.Unet("resnet18", encoder_weights=None, classes=4)
    check(model, torch.randn(2, 3, 64, 64), torch.randint(0, 4, (2, 64, 64)), tmp_path)
