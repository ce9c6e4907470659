"""Somebody with a vision transformer: no batch norm, and still an honest report.

python -m examples.users.no_batch_norm FOLDER
"""

import sys
from pathlib import Path

import timm
import torch

import batchbayes as bb
from examples.users.shapes import CLASSES, draw, scaled, train


def network(dropout: float = 0.0) -> torch.nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    return timm.models.VisionTransformer(num_classes=len(CLASSES), drop_rate=dropout, **sizes)


def main(folder: Path) -> None:
    images, labels, _ = draw(500, 0)
    inputs, targets = (lambda drawn: (scaled(drawn[0]), drawn[1]))(draw(300, 1))
    torch.manual_seed(0)
    model = train(network(), scaled(images), labels, steps=150)
    said = ""
    try:
        bb.mcbn(model, scaled(images), batch_size=32)
    except bb.BatchbayesError as error:
        said = str(error)
    print(f"MCBN says: {said}")
    assert "LayerNorm" in said

    found = bb.assess(model, scaled(images), (inputs, targets), batch_size=32, draws=8, out=folder / "report")
    print(found.verdict["headline"], "| recommended:", found.recommended.name)
    seen = found.predict(inputs[:10])
    assert seen.probs.shape == (10, len(CLASSES))
    assert (folder / "report" / "report.html").exists()

    with_dropout = train(network(0.2), scaled(images), labels, steps=150)
    drawn = bb.predict(bb.mc_dropout(with_dropout), inputs, bb.categorical(), num_samples=8)
    assert drawn.mutual_information.max() > 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
