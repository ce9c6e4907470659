"""A second process that shares nothing with the tests but the code and the files: it loads posteriors and predicts.

A new process takes seconds to import torch, so one serves all tests of a session. It reads lines "CASE<TAB>FILE" and
answers each with the engine and the bytes of the predicted probabilities. A file may also be a pickle.
"""

import pickle
import subprocess
import sys
from pathlib import Path


class OtherProcess:
    """A running process, from the side of the tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-u", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answer(self, case: str, path: Path) -> list[str]:
        """Return the engine, and the probabilities as hexadecimal bytes, of a file for five examples of a case."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{case}\t{path}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip().split("\t")

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
        is_pickle = path.endswith(".pickle")
        posterior = pickle.loads(Path(path).read_bytes()) if is_pickle else bb.load(path, CASES[name].network())
        inputs = CASES[name].batches(1, size=5, seed=4)[0]
        found = bb.predict(posterior, inputs, bb.categorical(), num_samples=64, seed=3, engine="auto")
        print(found.engine, found.probs.numpy().tobytes().hex(), sep="\t")


if __name__ == "__main__":
    _serve()
