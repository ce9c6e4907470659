"""The seven users, to the end, with the packages that they use. `make users` has these packages; others are skipped."""

import importlib
import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
USERS = {
    "tables": ["pandas", "sklearn"],
    "images": ["timm"],
    "segmentation": ["segmentation_models_pytorch"],
    "lightning_module": ["lightning"],
    "hugging_face": ["transformers"],
    "research": [],
    "deployment": ["onnx", "onnxscript", "onnxruntime"],
    "no_batch_norm": ["timm"],
}


pytestmark = pytest.mark.usefixtures("torchvision_operators")


@pytest.mark.slow
@pytest.mark.parametrize("user", USERS)
def test_a_user_gets_to_the_end(user, tmp_path, monkeypatch, capsys):
    missing = [package for package in USERS[user] if find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: run `make users`")
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of third parties are theirs
        importlib.import_module(f"examples.users.{user}").main(tmp_path)
    assert "Traceback" not in capsys.readouterr().err
