"""Somebody who segments images with segmentation-models-pytorch, from folders of images and masks.

python -m examples.users.segmentation FOLDER
"""

import json
import sys
from pathlib import Path

import numpy as np
import segmentation_models_pytorch as smp
import torch
from PIL import Image
from torch import nn

from batchbayes.cli import main as batchbayes
from examples.users.shapes import MEAN, STD, draw, save_masks, scaled, train


def network() -> nn.Module:
    return smp.Unet("resnet18", encoder_depth=3, decoder_channels=(32, 16, 8), encoder_weights=None, classes=2)


def main(folder: Path) -> None:
    images, _, masks = draw(200, 0)
    torch.manual_seed(0)
    model = train(network(), scaled(images), masks, steps=25)
    torch.save(model.state_dict(), folder / "model.pth")
    save_masks(folder / "train", 48, 1)
    save_masks(folder / "test", 30, 2)

    model_options = ["--model", "examples.users.segmentation:network", "--weights", str(folder / "model.pth")]
    files = ["--train", str(folder / "train"), "--test", str(folder / "test")]
    scale = ["--mean", str(MEAN), "--std", str(STD), "--batch-size", "16", "--draws", "4", "--views", "none", "--quiet"]
    assert batchbayes(["assess", *model_options, *files, *scale, "--out", str(folder / "report")]) == 0
    print(json.loads((folder / "report" / "metrics.json").read_text())["verdict"]["headline"])

    maps = ["--maps", str(folder / "maps"), "--out", str(folder / "new.csv"), "--quiet"]
    posterior = ["--posterior", str(folder / "report" / "posterior.safetensors")]
    new = folder / "test" / "images"
    assert batchbayes(["predict", *model_options, *posterior, "--input", str(new), *maps]) == 0
    written = sorted(path.name for path in (folder / "maps").rglob("*.png"))
    assert len(written) >= 2 * 30, written[:4]
    shapes = {np.asarray(Image.open(path)).shape[:2] for path in (folder / "maps").rglob("*.png")}
    assert shapes == {(32, 32)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
