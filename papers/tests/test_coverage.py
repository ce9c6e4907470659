"""The page that says what of the papers is repeated misses no experiment and no published table."""

import csv

import pytest
from batchbayes_papers.runner.experiment import EXPERIMENTS, load_experiment
from helpers.source import ROOT

VERDICTS = {"agrees", "partly", "reduced", "contradicts", "left out"}


@pytest.fixture(scope="module")
def rows():
    with (ROOT / "docs/coverage.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_experiment_has_a_row(rows):
    assert EXPERIMENTS.keys() <= {row["page"] for row in rows}


def test_rows_are_whole(rows):
    for row in rows:
        assert row["verdict"] in VERDICTS, row["item"]
        assert row["remark"] or row["verdict"] == "agrees", row["item"]
        assert row["ours"] or row["verdict"] == "left out", row["item"]
        assert not row["page"] or (ROOT / f"docs/results/{row['page']}.md").is_file(), row["item"]


def test_rows_that_agree_name_the_run_that_they_rest_on(rows):
    """A command with an experiment and one of its presets, or a file of tests."""
    named = [row for row in rows if row["verdict"] == "agrees"]
    assert len(named) > 20
    for row in named:
        words = row["run"].split()
        if words[0].startswith(("tests/", "papers/tests/")):
            assert (ROOT / words[0]).is_file(), row["item"]
        else:
            assert words[:2] == ["batchbayes", "reproduce"], row["item"]
            assert words[4] in load_experiment(words[2]).PRESETS, row["item"]
            assert row["page"] == words[2]
            assert f"reproduce {words[2]} --preset {words[4]}" in (ROOT / f"docs/results/{words[2]}.md").read_text()


FOLLOWED = {"mcbn-uci", "mcbn-batch-size", "mcbn-passes", "sbn", "sparse-vd", "random-labels", "variance-networks"}


def test_reproduce_says_where_the_preset_paper_is_not_the_full_protocol():
    """Every experiment is in the sentence of those that follow their paper, or in the table of the others."""
    text = (ROOT / "docs/reproduce.md").read_text(encoding="utf-8")
    section = text.partition("## Where `paper` is not the full protocol")[2].partition("\n## ")[0]
    sentence, _, table = section.partition("| experiment |")
    listed = {line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")}
    assert {name for name in EXPERIMENTS if name in sentence} == FOLLOWED
    assert listed == EXPERIMENTS.keys() - FOLLOWED
    without = {name for name in EXPERIMENTS if "paper" not in load_experiment(name).PRESETS}
    said = {line.split("|")[1].strip() for line in table.splitlines() if "There is no preset `paper`" in line}
    assert said == without


@pytest.mark.shared
def test_every_published_table_has_a_row(rows, data_folder):
    files = {path.name for path in (data_folder.parent / "reference").glob("*.csv")}
    assert files
    assert files == {row["reference"] for row in rows if row["reference"]}
