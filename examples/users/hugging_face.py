"""Somebody with a Hugging Face image classifier: batches are dicts, inputs are named, outputs are objects.

python -m examples.users.hugging_face FOLDER
"""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import ResNetConfig, ResNetForImageClassification

import batchbayes as bb
from examples.users.shapes import CLASSES, draw, scaled


class Pictures(Dataset):
    """Examples as the Trainer of Hugging Face takes them."""

    def __init__(self, count: int, seed: int) -> None:
        images, self.labels, _ = draw(count, seed)
        self.pixel_values = scaled(images)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.pixel_values[index], "labels": self.labels[index]}


def network() -> ResNetForImageClassification:
    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=len(CLASSES)
    )
    return ResNetForImageClassification(config)


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model, training = network(), DataLoader(Pictures(400, 0), batch_size=32, shuffle=True, drop_last=True)
    adam = torch.optim.AdamW(model.parameters(), 5e-3)
    model.train()
    for _ in range(5):
        for batch in training:
            adam.zero_grad()
            model(**batch).loss.backward()
            adam.step()
    model.save_pretrained(folder / "model")
    model = ResNetForImageClassification.from_pretrained(folder / "model").eval()

    def pixels(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"pixel_values": batch["pixel_values"]}

    test = Pictures(200, 1)
    how = {"inputs": pixels, "output": "logits"}
    posterior = bb.mcbn(model, training, num_samples=12, center="running", **how)
    seen = bb.predict(posterior, DataLoader(test, batch_size=40), bb.categorical(), inputs=pixels, num_samples=12)
    with torch.no_grad():
        own = model(pixel_values=test.pixel_values).logits.softmax(1)
    agree = (own.argmax(1) == seen.probs.argmax(1)).float().mean()
    accuracy = float((seen.probs.argmax(1) == test.labels).float().mean())
    print(f"accuracy {accuracy:.0%}; MCBN and the network agree on {agree:.0%}")
    assert accuracy > 0.6
    assert agree > 0.9
    assert torch.equal(bb.predict(bb.deterministic(model, output="logits"), {"pixel_values": test.pixel_values},
                                  bb.categorical(), inputs=pixels).probs.argmax(1), own.argmax(1))  # fmt: skip

    bb.save(posterior, folder / "posterior.safetensors")
    other = ResNetForImageClassification.from_pretrained(folder / "model")
    again = bb.predict(
        bb.load(folder / "posterior.safetensors", other), test, bb.categorical(), inputs=pixels, num_samples=12
    )
    torch.testing.assert_close(again.probs, seen.probs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
