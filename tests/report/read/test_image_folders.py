import os

import pytest
import torch
from PIL import Image

from batchbayes import BatchbayesError
from batchbayes.report.read.preprocess import Preprocessing
from batchbayes.report.read.reading import Reading
from batchbayes.report.read.sources import read_examples


def paint(path, colour=(0, 0, 0), size=(4, 3)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def everything(examples):
    inputs = torch.cat([x for x, _ in examples])
    return inputs, examples.targets()


def test_classes_are_numbered_by_name_and_files_keep_their_names(tmp_path):
    paint(tmp_path / "data" / "zebra" / "1.png", (255, 0, 0))
    paint(tmp_path / "data" / "ant" / "2.png", (0, 51, 0))
    paint(tmp_path / "data" / "ant" / "deep" / "1.PNG", (0, 51, 0))
    examples = read_examples(tmp_path / "data")
    inputs, targets = everything(examples)
    assert examples.class_names == ("ant", "zebra")
    assert targets.tolist() == [0, 0, 1]
    assert examples.ids() == ("ant/2.png", "ant/deep/1.PNG", "zebra/1.png")
    assert inputs.shape == (3, 3, 3, 4)
    assert inputs[0, :, 0, 0].tolist() == pytest.approx([0, 0.2, 0])


def test_a_folder_that_lacks_a_class_keeps_the_numbers_of_training(tmp_path):
    for name in ("ant", "bee", "cat"):
        paint(tmp_path / "train" / name / "1.png")
    for name in ("cat", "ant"):
        paint(tmp_path / "test" / name / "1.png")
    (tmp_path / "test" / "bee").mkdir()
    classes = read_examples(tmp_path / "train").class_names
    test = read_examples(tmp_path / "test", Reading(class_names=classes))
    assert (test.ids(), test.targets().tolist()) == (("ant/1.png", "cat/1.png"), [0, 2])
    assert test.class_names == ("ant", "bee", "cat")
    with pytest.raises(BatchbayesError, match=r"images in each sub-folder of .*; got none in bee"):
        read_examples(tmp_path / "test")


def test_an_unknown_class_is_refused(tmp_path):
    paint(tmp_path / "test" / "bea" / "1.png")
    with pytest.raises(
        BatchbayesError, match=r"classes of training in .*, one of: ant, bee; got 'bea'.*did you mean bee"
    ):
        read_examples(tmp_path / "test", Reading(class_names=("ant", "bee")))


def test_images_without_classes_have_no_targets(tmp_path):
    paint(tmp_path / "1.png")
    paint(tmp_path / ".hidden" / "1.png")
    paint(tmp_path / "._1.png")
    examples = read_examples(tmp_path, Reading(class_names=("a", "b")))
    assert [targets for _, targets in examples] == [None]
    assert examples.class_names == ("a", "b")
    assert examples.ids() == ("1.png",)


def test_one_image(tmp_path):
    paint(tmp_path / "photo.jpeg", (255, 255, 255))
    examples = read_examples(tmp_path / "photo.jpeg")
    ((inputs, targets),) = examples
    assert (inputs.shape, targets, examples.ids()) == ((1, 3, 3, 4), None, ("photo.jpeg",))
    assert inputs.unique().tolist() == [1]


def test_images_beside_classes_are_refused(tmp_path):
    paint(tmp_path / "ant" / "1.png")
    paint(tmp_path / "2.png")
    with pytest.raises(BatchbayesError, match=r"got 2\.png beside sub-folders with images"):
        read_examples(tmp_path)


def test_images_of_another_size_are_refused_or_resized(tmp_path):
    paint(tmp_path / "1.png")
    paint(tmp_path / "2.png", size=(9, 8))
    with pytest.raises(BatchbayesError, match=r"images of one size, 4 x 3; got 9 x 8 in 2.png"):
        list(read_examples(tmp_path))
    ((inputs, _),) = read_examples(tmp_path, Reading(preprocessing=Preprocessing(resize=(5, 6))))
    assert inputs.shape == (2, 3, 5, 6)


def test_a_damaged_image_is_named(tmp_path):
    (tmp_path / "1.png").write_bytes(b"no image")
    with pytest.raises(BatchbayesError, match=r"1\.png; got a damaged file"):
        list(read_examples(tmp_path))


def test_folders_without_images(tmp_path):
    (tmp_path / "notes.txt").write_text("none")
    (tmp_path / "1.png").mkdir()
    with pytest.raises(BatchbayesError, match=r"expected images in .*; got none"):
        read_examples(tmp_path)


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "1.csv")
    with pytest.raises(BatchbayesError, match=r"a \.npz, \.zarr, \.csv or \.parquet file, .*; got .*1\.csv"):
        read_examples(tmp_path / "1.csv")
    with pytest.raises(BatchbayesError, match="nothing at"):
        read_examples(tmp_path / "2.csv")


def test_what_systems_add_is_no_class(tmp_path):
    paint(tmp_path / "ant" / "1.png")
    paint(tmp_path / "bee" / "1.png")
    for extra in ("__MACOSX/ant/._1.png", "ant/__MACOSX/1.png", "@eaDir/1.png", ".ipynb_checkpoints/1.png"):
        (tmp_path / extra).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / extra).write_bytes(b"junk")
    examples = read_examples(tmp_path)
    assert (examples.class_names, examples.ids()) == (("ant", "bee"), ("ant/1.png", "bee/1.png"))


@pytest.mark.parametrize("link", ["ant/2.png", "cow"])
def test_links_to_nowhere_are_refused(tmp_path, link):
    paint(tmp_path / "ant" / "1.png")
    paint(tmp_path / "bee" / "1.png")
    (tmp_path / link).symlink_to(tmp_path / "gone")
    with pytest.raises(BatchbayesError, match=r"got 1 that are links to nowhere, such as (2\.png|cow)"):
        read_examples(tmp_path)


def test_folders_whose_names_look_the_same_are_refused(tmp_path):
    for name in ("caf\u00e9", "cafe\u0301"):
        paint(tmp_path / name / "1.png")
    with pytest.raises(BatchbayesError, match=r"sub-folders with different names in .*; got two that differ in"):
        read_examples(tmp_path)
    for folder in list(tmp_path.iterdir()):
        folder.rename(tmp_path / ("true" if folder.name == "caf\u00e9" else "True"))
    with pytest.raises(BatchbayesError, match="upper and lower case in the sub-folders"):
        read_examples(tmp_path)
