"""An engineer with a timm network and folders of images.

python -m examples.users.images FOLDER
"""

import csv
import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import timm
import torch
from torch import nn

from batchbayes.cli import main as batchbayes
from examples.users.shapes import CLASSES, MEAN, STD, draw, save_folder, scaled, train


def network() -> nn.Module:
    return timm.create_model("resnet10t", num_classes=len(CLASSES))


def main(folder: Path) -> None:
    images, labels, _ = draw(400, 0)
    torch.manual_seed(0)
    model = train(network(), scaled(images), labels)
    torch.save({"state_dict": model.state_dict()}, folder / "model.pth")
    save_folder(folder / "train", 160, 1)
    save_folder(folder / "test", 150, 2)

    model_options = ["--model", "examples.users.images:network", "--weights", str(folder / "model.pth")]
    files = ["--train", str(folder / "train"), "--test", str(folder / "test")]
    scale = ["--mean", str(MEAN), "--std", str(STD), "--batch-size", "32", "--draws", "8", "--views", "none", "--quiet"]
    assert batchbayes(["assess", *model_options, *files, *scale, "--out", str(folder / "report")]) == 0
    found = json.loads((folder / "report" / "metrics.json").read_text())
    print(found["verdict"]["headline"])

    # One image, as it comes in production. Its answer stands in the table already, beside the name of its file.
    with (folder / "report" / "predictions.csv").open() as file:
        told = {row["id"]: row for row in csv.DictReader(file)}
    name = next(iter(told))
    printed, errors = io.StringIO(), io.StringIO()
    posterior = ["--posterior", str(folder / "report" / "posterior.safetensors")]
    with redirect_stdout(printed):
        assert batchbayes(["predict", *model_options, *posterior, "--input", str(folder / "test" / name)]) == 0
    answer = next(csv.DictReader(io.StringIO(printed.getvalue())))
    assert answer["prediction"] == told[name]["prediction"]
    assert abs(float(answer["confidence"]) - float(told[name]["confidence"])) < 1e-4

    # A colleague forgets the scaling, and is told first.
    wrong = ["--mean", "0", "--std", "1", *scale[4:]]
    with redirect_stderr(errors):
        assert batchbayes(["assess", *model_options, *files, *wrong, "--out", str(folder / "wrong")]) == 0
    assert "does not look like the training data" in errors.getvalue()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
