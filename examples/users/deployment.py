"""Whoever deploys it: another process with the weights and one posterior file, then a file without Python at all.

python -m examples.users.deployment FOLDER
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import batchbayes as bb
from examples.users.research import small_network
from examples.users.shapes import draw, scaled, train

SERVER = """
import json, sys, torch, batchbayes as bb
from safetensors.torch import load_file
from examples.users.research import small_network
folder, example = sys.argv[1], torch.load(sys.argv[2], weights_only=True)
network = small_network()
network.load_state_dict(load_file(folder + "/weights.safetensors"))
seen = bb.predict(bb.load(folder + "/posterior.safetensors", network), example, bb.categorical(), num_samples=8, seed=3)
print(json.dumps(seen.probs.tolist()))
"""


def main(folder: Path) -> None:
    images, labels, _ = draw(600, 0)
    torch.manual_seed(0)
    network = train(small_network(), scaled(images), labels, steps=150)
    posterior = bb.mcbn(network, scaled(images), batch_size=32, num_samples=16)
    bb.save(posterior, folder / "posterior.safetensors")
    save_file(network.state_dict(), folder / "weights.safetensors")
    example = scaled(draw(5, 9)[0])
    torch.save(example, folder / "example.pt")
    seen = bb.predict(posterior, example, bb.categorical(), num_samples=8, seed=3)

    call = [sys.executable, "-c", SERVER, str(folder), str(folder / "example.pt")]
    served = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    np.testing.assert_allclose(np.array(json.loads(served)), seen.probs.numpy(), rtol=0, atol=1e-7)

    torch.manual_seed(5)
    said = ""
    try:  # weights of another training must not pass
        bb.load(folder / "posterior.safetensors", small_network())
    except bb.BatchbayesError as error:
        said = str(error)
    print(f"with other weights: {said}")
    assert "weights" in said

    written = bb.export(posterior, folder / "network.onnx", example, bb.categorical(), num_samples=8, seed=3)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(written.path))
    for count in (1, 5):
        names = [output.name for output in session.get_outputs()]
        answers = dict(
            zip(names, session.run(None, {session.get_inputs()[0].name: example[:count].numpy()}), strict=True)
        )
        np.testing.assert_allclose(answers["probs"], seen.probs[:count].numpy(), rtol=0, atol=1e-4)
    print(f"{written.path.name}: {written.num_bytes / 1000:.0f} kB, outputs {', '.join(written.outputs)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
