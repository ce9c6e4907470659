"""Somebody who trains with Lightning, and whose network takes an image and a row of features.

python -m examples.users.lightning_module FOLDER
"""

import sys
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import batchbayes as bb
from examples.users.shapes import CLASSES, draw, scaled


class Both(lightning.LightningModule):
    """A small convolutional network that also reads two numbers beside the image."""

    def __init__(self) -> None:
        super().__init__()
        self.eyes = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(128 + 2, len(CLASSES))

    def forward(self, image: Tensor, features: Tensor) -> Tensor:
        return self.head(torch.cat([self.eyes(image), features], 1))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        image, features, label = batch
        loss = nn.functional.cross_entropy(self(image, features), label)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 3e-3)


def data(count: int, seed: int) -> TensorDataset:
    images, labels, masks = draw(count, seed)
    features = torch.stack([masks.float().mean((1, 2)), masks.float().amax(2).mean(1)], 1)
    return TensorDataset(scaled(images), features, labels)


def main(folder: Path) -> None:
    lightning.seed_everything(0, verbose=False)
    network, training = Both(), DataLoader(data(400, 0), batch_size=32, shuffle=True, drop_last=True)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = lightning.Trainer(max_epochs=4, accelerator="cpu", default_root_dir=folder, **quiet)
    trainer.fit(network, training)
    trainer.save_checkpoint(folder / "last.ckpt")

    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    posterior = bb.mcbn(network, training, inputs=(0, 1), num_samples=12, center="running")
    test = data(200, 1)
    seen = bb.predict(posterior, DataLoader(test, batch_size=50), bb.categorical(), inputs=(0, 1), num_samples=12)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())

    images, features, labels = test.tensors
    with torch.no_grad():
        own = network.eval()(images, features).softmax(1)
    agree = (own.argmax(1) == seen.probs.argmax(1)).float().mean()
    accuracy = float((seen.probs.argmax(1) == labels).float().mean())
    print(f"accuracy {accuracy:.0%}; MCBN and the network agree on {agree:.0%}")
    assert accuracy > 0.6
    assert agree > 0.9
    assert seen.mutual_information.min() >= 0
    assert seen.mutual_information.max() > 0

    bb.save(posterior, folder / "posterior.safetensors")
    other = Both()
    other.load_state_dict(torch.load(folder / "last.ckpt", weights_only=False)["state_dict"])
    again = bb.predict(
        bb.load(folder / "posterior.safetensors", other), test, bb.categorical(), inputs=(0, 1), num_samples=12
    )
    torch.testing.assert_close(again.probs, seen.probs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
