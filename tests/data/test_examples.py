import numpy as np
import pytest
import torch
from PIL import Image

from batchbayes import BatchbayesError
from batchbayes.data.examples import from_tensors
from batchbayes.data.files import read_examples


def everything(examples):
    inputs = torch.cat([x for x, _ in examples])
    return inputs, examples.targets()


def test_arrays_with_names(tmp_path):
    x, y = np.arange(12.0).reshape(6, 2), np.array([0, 1, 2, 0, 1, 2])
    np.savez(tmp_path / "d.npz", X=x, y=y, class_names=np.array(["a", "b", "c"]))
    examples = read_examples(tmp_path / "d.npz")
    inputs, targets = everything(examples)
    assert inputs.dtype == torch.float32
    assert targets.tolist() == y.tolist()
    assert examples.class_names == ("a", "b", "c")


def paint(path, colour, size=(4, 3)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_image_folders_number_their_classes_by_name(tmp_path):
    paint(tmp_path / "data" / "zebra" / "1.png", (255, 0, 0))
    paint(tmp_path / "data" / "ant" / "2.png", (0, 51, 0))
    examples = read_examples(tmp_path / "data")
    inputs, targets = everything(examples)
    assert examples.class_names == ("ant", "zebra")
    assert targets.tolist() == [0, 1]
    assert inputs.shape == (2, 3, 3, 4)
    assert inputs[0, :, 0, 0].tolist() == pytest.approx([0, 0.2, 0])


def test_images_without_classes_have_no_targets(tmp_path):
    paint(tmp_path / "1.png", (0, 0, 0))
    assert [targets for _, targets in read_examples(tmp_path)] == [None]


def test_images_of_another_size_are_refused(tmp_path):
    paint(tmp_path / "1.png", (0, 0, 0))
    paint(tmp_path / "2.png", (0, 0, 0), size=(9, 9))
    with pytest.raises(BatchbayesError, match=r"images of one size, 4 x 3; got 9 x 9 in 2.png"):
        list(read_examples(tmp_path))


def test_a_damaged_image_is_named(tmp_path):
    (tmp_path / "1.png").write_bytes(b"no image")
    with pytest.raises(BatchbayesError, match=r"1\.png; got a damaged file"):
        list(read_examples(tmp_path))


def test_the_two_parts_of_a_split_are_the_whole_and_know_their_rows():
    x = torch.arange(500.0)[:, None]
    part, rest = from_tensors("x", x, x[:, 0]).split(0.3, seed=1)
    assert sorted(part.rows().tolist() + rest.rows().tolist()) == list(range(500))
    for some in (part, rest):
        assert torch.equal(some.rows().float(), some.targets())
        assert torch.equal(some.rows(), some.rows())
    assert 110 < len(part.rows()) < 190  # 150, with a standard deviation of 10
    assert not torch.equal(part.rows(), from_tensors("x", x, x[:, 0]).split(0.3, seed=2)[0].rows())


def test_taking_keeps_the_order_asked_for():
    x = torch.arange(300.0)[:, None]
    assert from_tensors("x", x).take([250, 3, 130])[:, 0].tolist() == [250, 3, 130]
