"""Views in segmentation: a public ESPNet on full-size CamVid frames. Each view's map is moved back before the average.

python benchmarks/views_camvid.py DATA_FOLDER
"""

import argparse

import torch
from batchbayes_papers.data.camvid import UNLABELLED, load_camvid_frames, standardise
from batchbayes_papers.data.folder import data_file
from batchbayes_papers.models.pretrained import espnet_camvid

import batchbayes as bb

FRAMES = 20
BLACK = tuple(standardise(torch.zeros(1, 3, 1, 1, dtype=torch.uint8)).flatten().tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    folder = parser.parse_args().folder
    images, labels = load_camvid_frames("test", folder, FRAMES)
    point = bb.deterministic(espnet_camvid(data_file("weights/espnet_camvid_sacmehta.safetensors", folder)))
    flip = bb.RandomFlip()
    rows = {
        "network": (point, 1),
        "flip": (bb.with_views(point, flip), 2),
        "crop by 8 pixels, flip": (bb.with_views(point, bb.Compose(bb.RandomCrop(8, BLACK), flip)), 8),
        "shift and scale, flip": (bb.with_views(point, bb.Compose(bb.RandomShiftScale(0.02, 0.1, BLACK), flip)), 8),
    }
    known = labels != UNLABELLED
    print("| method | passes | NLL of a pixel | accuracy of pixels |\n|---|---|---|---|")
    for name, (posterior, draws) in rows.items():
        found = bb.predict(posterior, standardise(images), bb.categorical(), num_samples=draws, chunk_size=4)
        loss = -found.log_prob(labels)[known].mean()
        right = (found.log_probs.argmax(-1) == labels)[known].float().mean()
        print(f"| {name} | {draws} | {float(loss):.4f} | {float(right):.4f} |", flush=True)


if __name__ == "__main__":
    main()
