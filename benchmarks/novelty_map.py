"""Would a map of novelty be any good? Strange patches that are pasted into street scenes.

    python benchmarks/novelty_map.py DATA_FOLDER

The public ESPNet at 120 x 160. A patch of 32 x 32 pixels of each test scene of CamVid is replaced by a CIFAR-10 image,
by noise, or by the same place of another scene, which is nothing strange. The map is made of the Mahalanobis distances
of the activations at each position from those of the training scenes, at every batch norm: their logarithms are
enlarged to one size, and their mean is taken. AUROC of positions inside the patches, first against the same positions
of the scenes as they were, then against the rest of the scene, beside maps of energy and of maximum probability.
"""

import argparse

import torch
import torch.nn.functional as F
from batchbayes_papers.data.camvid import standardise
from batchbayes_papers.data.cifar10 import load_cifar10
from batchbayes_papers.data.folder import data_file
from batchbayes_papers.models.pretrained import espnet_camvid
from seen import watched
from torch import Tensor
from unseen import street_scenes

from batchbayes.metrics import ood_auroc
from batchbayes.tools import generator

PATCH, POSITIONS, TRAIN, TEST = 32, 200, 120, 80
SHRINKAGE = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    network = espnet_camvid(data_file("weights/espnet_camvid_sacmehta.safetensors", folder))
    train, test = (street_scenes(split, folder) for split in ("train", "test"))
    random = generator(0, "patches")
    train = train[torch.randperm(len(train), generator=random)[:TRAIN]]
    others, test = test[:TEST], test[-TEST:]
    sight = watched(network, standardise(train[:2]))
    names = [place.name for place in sight.places]

    def layers(images: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        seen: dict[str, Tensor] = {}
        before = {name: lambda h, name=name: seen.__setitem__(name, h.float()) for name in names}
        return seen, sight.network(standardise(images), before=before)

    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for images in train.split(8):
        for name, h in layers(images)[0].items():
            flat = h.movedim(1, -1).flatten(0, 2)
            rows[name].append(flat[torch.randint(len(flat), (8 * POSITIONS,), generator=random)])
    means, whitening = {}, {}
    for name, parts in rows.items():
        x = torch.cat(parts)
        values, vectors = torch.linalg.eigh(torch.cov(x.T).double())
        means[name] = x.mean(0)
        whitening[name] = (vectors / (values + SHRINKAGE * values.mean()).sqrt()).float() / len(values) ** 0.5

    def maps(images: Tensor) -> dict[str, Tensor]:
        found: list[list[Tensor]] = [[], [], []]
        for part in images.split(8):
            seen, logits = layers(part)
            size = logits.shape[2:]
            distances = [
                ((h.movedim(1, -1) - means[name]) @ whitening[name]).square().sum(-1).add(1e-3).log()
                for name, h in seen.items()
            ]
            each = [F.interpolate(d[:, None], size=size, mode="bilinear", align_corners=False) for d in distances]
            found[0].append(torch.cat(each, 1).mean(1))
            found[1].append(-logits.logsumexp(1))
            found[2].append(-logits.softmax(1).amax(1))
        return dict(zip(("map of statistics", "energy", "maximum probability"), map(torch.cat, found), strict=True))

    top = torch.randint(120 - PATCH, (TEST,), generator=random)
    left = torch.randint(160 - PATCH, (TEST,), generator=random)
    rows_of, columns_of = torch.arange(120)[None, :, None], torch.arange(160)[None, None]
    inside = (rows_of >= top[:, None, None]) & (rows_of < top[:, None, None] + PATCH)
    inside = inside & (columns_of >= left[:, None, None]) & (columns_of < left[:, None, None] + PATCH)
    animals = load_cifar10("test", folder, TEST)[0]
    noise = torch.randint(256, animals.shape, generator=random).byte()
    usual = maps(test)
    print("| AUROC of positions | " + " | ".join(usual) + " |\n|" + "---|" * (1 + len(usual)))
    for name in ("CIFAR-10 image", "noise", "another scene"):
        pasted = test.clone()
        for i, (y, x) in enumerate(zip(top.tolist(), left.tolist(), strict=True)):
            place = (slice(None), slice(y, y + PATCH), slice(x, x + PATCH))
            pasted[i][place] = {"CIFAR-10 image": animals[i], "noise": noise[i]}.get(name, others[i][place])
        strange = maps(pasted)
        cells = [float(ood_auroc(usual[key][inside].double(), strange[key][inside].double())) for key in usual]
        print(f"| {name} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |", flush=True)
        across = [float(ood_auroc(strange[key][~inside].double(), strange[key][inside].double())) for key in usual]
        print(f"| {name}, against the rest of its scene | " + " | ".join(f"{c:.3f}" for c in across) + " |", flush=True)


if __name__ == "__main__":
    main()
