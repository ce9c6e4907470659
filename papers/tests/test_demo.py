import math
from pathlib import Path

import pytest
import torch
from batchbayes_papers.demo import OOD_COLUMNS, DemoConfig, Row, format_table, run_demo
from PIL import Image

from batchbayes import BatchbayesError
from batchbayes.metrics import ood_auroc
from batchbayes.training.loop import TrainingConfig

SMOKE = DemoConfig(
    toy=TrainingConfig(epochs=100, batch_size=32),
    digits=TrainingConfig(epochs=1, batch_size=32),
    toy_draws=8,
    digits_draws=4,
    seeds=2,
)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Row]]]:
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    return out, run_demo(out, seed=1, config=SMOKE)


def test_every_task_has_a_row_for_each_method(smoke: tuple[Path, list[list[Row]]]) -> None:
    tasks = ("toy, near the data", "toy, gap and beyond", "digits")
    assert len(smoke[1]) == 2
    for rows in smoke[1]:
        assert [(row.task, row.method) for row in rows] == [
            (task, method) for task in tasks for method in ("deterministic", "MCBN")
        ]
        assert all(math.isfinite(row.nll) for row in rows)
    assert smoke[1][0] != smoke[1][1]


def test_auroc_stands_where_it_makes_sense(smoke: tuple[Path, list[list[Row]]]) -> None:
    columns = [sorted(row.auroc) for row in smoke[1][0]]
    assert columns == [[]] * 4 + [["inverted H", "shuffled H"], sorted(OOD_COLUMNS)]
    assert all(0 <= value <= 1 for row in smoke[1][0] for value in row.auroc.values())


def test_one_epoch_of_digits_beats_guessing(smoke: tuple[Path, list[list[Row]]]) -> None:
    for row in smoke[1][0][-2:]:
        assert row.nll < math.log(10)


def test_figures_are_written(smoke: tuple[Path, list[list[Row]]]) -> None:
    assert sorted(path.name for path in smoke[0].iterdir()) == ["digits.png", "toy.png"]
    for path in smoke[0].iterdir():
        with Image.open(path) as image:
            image.load()
            assert min(image.size) > 300


def test_the_same_seed_prints_the_same_table(
    smoke: tuple[Path, list[list[Row]]], capsys: pytest.CaptureFixture[str]
) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    again = run_demo(smoke[0], seed=1, config=SMOKE)
    assert again == smoke[1]
    assert capsys.readouterr().out.startswith(format_table(smoke[1]))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_auroc_counts_ties_as_half() -> None:
    assert ood_auroc(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0])) == 0.875


def test_a_file_in_place_of_the_folder_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(BatchbayesError, match="a place to write to"):
        run_demo(tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"
