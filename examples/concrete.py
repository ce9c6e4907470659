"""A small network that predicts the strength of concrete (UCI). It is trained here and assessed with .csv files.

Set BATCHBAYES_DATA to the folder with the data sets. Then run in the top folder of the repository:

    python -m examples.concrete concrete
    batchbayes assess --model examples.concrete:network --weights concrete/weights.safetensors --batch-size 32 \
        --train concrete/train.csv --test concrete/test.csv --target strength --out concrete-report
"""

import csv
import sys
from pathlib import Path

import numpy as np
import torch
from batchbayes_papers.data.folder import data_file
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from batchbayes import TrainingConfig, train
from batchbayes.models import MLP
from batchbayes.tools import GlobalStream, generator, shuffled
from batchbayes.training.loop import supervised

FEATURES = ("cement", "slag", "fly ash", "water", "superplasticizer", "coarse aggregate", "fine aggregate", "age")
TEST_SHARE = 0.3  # assess takes one third of it for calibration
TRAINING = TrainingConfig(epochs=200, batch_size=32, weight_decay=1e-4)


class Scaled(nn.Module):
    """A network for rows and targets in their own units. It keeps the mean and the std of its training data."""

    def __init__(self, inner: nn.Module, num_features: int) -> None:
        super().__init__()
        self.inner = inner
        for name, size in (("input_mean", num_features), ("input_std", num_features), ("mean", 1), ("std", 1)):
            self.register_buffer(name, torch.ones(size))

    def forward(self, rows: Tensor) -> Tensor:
        return self.mean + self.std * self.inner((rows - self.input_mean) / self.input_std)


def network() -> nn.Module:
    return Scaled(MLP(len(FEATURES), [50, 50], 1), len(FEATURES))


def main(folder: Path) -> None:
    """Split the data, train, and write train.csv, test.csv and weights.safetensors to the folder."""
    torch.set_num_threads(1)
    with np.load(data_file("uci/concrete.npz")) as file:
        rows, targets = torch.from_numpy(file["X"]).float(), torch.from_numpy(file["y"]).float()[:, None]
    order = torch.randperm(len(rows), generator=generator(0, "concrete"))
    cut = round(TEST_SHARE * len(rows))
    test, trained = order[:cut], order[cut:]
    with GlobalStream(0):
        model = network()
    for name, values in (("input_", rows[trained]), ("", targets[trained])):
        getattr(model, f"{name}mean").copy_(values.mean(0))
        getattr(model, f"{name}std").copy_(values.std(0))
    objective = supervised(lambda outputs, targets: mse_loss(outputs, targets) / float(model.std) ** 2)
    train(model, shuffled(rows[trained], targets[trained], TRAINING.batch_size, TRAINING.seed), objective, TRAINING)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), folder / "weights.safetensors")
    for name, chosen in (("train", trained), ("test", test)):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*FEATURES, "strength"])
            writer.writerows(torch.cat([rows[chosen], targets[chosen]], 1).tolist())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
