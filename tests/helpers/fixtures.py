"""Fixtures that the tests of both packages share. Each `conftest.py` imports them."""

import shutil
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

from helpers import shared

settings.register_profile("untimed", deadline=None)  # how long an example takes says nothing about the code
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def one_thread_and_a_seed():
    """Small networks are fastest, and repeatable, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def data_folder():
    """The folder of real data sets and public weights; the test is skipped where it is absent."""
    if shared.FOLDER is None:
        pytest.skip(shared.REASON)
    return shared.FOLDER


@pytest.fixture(scope="session")
def torchvision_operators():
    """Declare two operators that `import torchvision` looks for: PyPI's build cannot load its own without CUDA."""
    if find_spec("torchvision") is None:
        yield
        return
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    yield
    del library


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser():
    """A browser without a window. Without one the test is skipped, and says so."""
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium (make test tries it where it may)")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()
