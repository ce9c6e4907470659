"""A second process that shares nothing with the tests but the code and the files: it loads posteriors and predicts.

A new process takes seconds to import torch, so one serves all tests of a session. It reads lines "CASE<TAB>FILE" and
answers each with the bytes of the predicted probabilities.
"""

import subprocess
import sys
from pathlib import Path


class OtherProcess:
    """A running process, from the side of the tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-u", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def probs(self, case: str, path: Path) -> str:
        """Return the probabilities for five examples of a case, by the posterior in a file, as hexadecimal bytes."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{case}\t{path}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        self._process.communicate()


def _serve() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch

    import batchbayes as bb
    from helpers.cases import CASES

    torch.set_num_threads(1)
    for line in sys.stdin:
        name, path = line.rstrip("\n").split("\t")
        posterior = bb.load(path, CASES[name].network())
        inputs = CASES[name].batches(1, size=5, seed=4)[0]
        probs = bb.predict(posterior, inputs, bb.categorical(), num_samples=8, seed=3).probs
        print(probs.numpy().tobytes().hex())


if __name__ == "__main__":
    _serve()
