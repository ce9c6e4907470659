"""The commands `reproduce` and `table`, inside this process."""

import csv
import errno
import json
import math
import os
import shutil
import sqlite3
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batchbayes_papers.runner import experiment as experiments
from batchbayes_papers.runner import outputs
from batchbayes_papers.runner.experiment import Unit
from batchbayes_papers.runner.leases import ProcessIdentity
from batchbayes_papers.runner.plan import make_plan
from batchbayes_papers.runner.run import run_units
from batchbayes_papers.runner.store import ResultStore, read_results
from batchbayes_papers.runner.unit_progress import UnitProgress
from own import tiny

from batchbayes import __version__, cli
from batchbayes._common.machine import Workers

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "new" / "folder"


def reproduce(out: Path, *options: str, preset: str = "smoke", name: str = "own.tiny") -> int:
    return cli.main(["reproduce", name, "--preset", preset, "--out", str(out), "--workers", "1", *options])


def table(out: Path, capsys: Printed, form: str = "terminal") -> tuple[str, str]:
    capsys.readouterr()
    assert cli.main(["table", "own.tiny", str(out), "--format", form]) == 0
    return capsys.readouterr()


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_every_experiment_has_all_parts_and_a_smoke_preset(name: str) -> None:
    found = experiments.load_experiment(name)
    assert "smoke" in found.PRESETS
    assert all(hasattr(found, part) for part in experiments.PARTS)
    for preset in found.PRESETS:
        plan = make_plan(name, preset)
        assert plan.units
        assert json.loads(plan.settings.config)
        empty = found.tables(plan.config, {})
        assert empty
        assert all(len(row) == len(table.columns) for table in empty for row in table.rows)


def test_everything_is_written(out: Path, capsys: Printed) -> None:
    assert reproduce(out) == 0
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    tables = {"tables/parts-sums.csv", "tables/sums.csv"}
    assert files == {"results.sqlite", "table.md", "index.html", "figures/all-units.png", *tables}
    parts = [math.sin(seed + len("first")) for seed in range(3)]
    with (out / "tables" / "sums.csv").open(newline="") as file:
        assert list(csv.reader(file))[1] == ["first, sum", str(math.fsum(parts))]
    assert f"| first, sum | {math.fsum(parts):.3f} |" in (out / "table.md").read_text()
    assert (out / "figures" / "all-units.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert printed.out.startswith("Parts & <sums>\nunit ")
    assert printed.out.endswith(f"No paper <has> this.\n\nTables, figures and a page: {out / 'index.html'}\n")
    lines = printed.err.splitlines()
    assert len(lines) == 8
    assert [line.split()[0] for line in lines] == [f"{number}/8" for number in range(1, 9)]


def test_the_page_holds_everything_and_escapes_it(out: Path) -> None:
    assert reproduce(out, preset="warning") == 0
    page = (out / "index.html").read_text()
    for text in ("Parts &amp; &lt;sums&gt;", "A &lt;note&gt;.", "No paper &lt;has&gt; this.", "Doubtful &lt;b&gt;."):
        assert text in page
    for text in ("<sums>", "<note>", "<has>", "<b>"):
        assert text not in page
    assert page.count("data:image/png;base64,") == 1
    assert "http" not in page.replace("http-equiv", "")
    assert "only tests the program" not in page
    assert "units: 1" in page
    assert "8 units" in page
    assert "python 3." in page


@pytest.mark.parametrize(
    ("name", "preset", "words"),
    [
        ("sg-mcmc", "quick", "Preset quick."),
        ("sg-mcmc", "smoke", "Preset smoke, which only tests the program. Networks are hardly trained: its numbers"),
        ("sparse-vd", "smoke", "Preset smoke, which only tests the program. The data is made up, and networks are"),
    ],
)
def test_the_first_line_says_the_preset_and_whether_the_data_is_made_up(name: str, preset: str, words: str) -> None:
    assert make_plan(name, preset).preset_words.startswith(words)


@pytest.mark.parametrize(("preset", "line"), [("smoke", '<p class="caveat">Preset smoke, '), ("warning", "<p>Preset ")])
def test_the_page_and_the_tables_begin_with_the_preset(preset: str, line: str, out: Path) -> None:
    assert reproduce(out, preset=preset) == 0
    page = (out / "index.html").read_text()
    assert page.index("<h1>") < page.index(line) < page.index("<main>")
    assert (out / "table.md").read_text().startswith(f"Preset {preset}")


def test_a_second_run_does_nothing_again_and_writes_the_same(out: Path, tmp_path: Path, capsys: Printed) -> None:
    assert reproduce(out, "--data-dir", str(tmp_path)) == 0
    first = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert reproduce(out, "--data-dir", str(tmp_path)) == 0
    assert len((tmp_path / "log").read_text().splitlines()) == 8
    assert capsys.readouterr().err == "8 of 8 units were finished before\n"
    changed = [path.name for path, content in first.items() if path.read_bytes() != content]
    assert changed in ([], ["results.sqlite"])


def test_expensive_units_come_first_and_sums_after_their_parts(out: Path, tmp_path: Path) -> None:
    assert reproduce(out, "--data-dir", str(tmp_path)) == 0
    names = [line.split("\t")[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert names[:2] == ["first, part 2", "second, part 2"]
    assert all(names.index(f"{dataset}, sum") > names.index(f"{dataset}, part 0") for dataset in ("first", "second"))


def test_quiet_says_nothing(out: Path, capsys: Printed) -> None:
    assert reproduce(out, "--quiet") == 0
    assert capsys.readouterr() == ("", "")


def test_results_do_not_depend_on_the_number_of_workers(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    assert reproduce(out, preset="threads") == 0
    other = tmp_path / "other"
    assert reproduce(other, "--workers", "3", preset="threads") == 0
    one, three = (read_results(folder / "results.sqlite")[1] for folder in (out, other))
    assert {name: row.result for name, row in one.items()} == {name: row.result for name, row in three.items()}
    assert one["second, part 1"].result == "[1]"  # threads of torch
    assert torch.get_num_threads() == 2
    assert os.environ["OMP_NUM_THREADS"] == "2"


class Threads(ThreadPoolExecutor, Workers):
    size = 4


def test_other_executors_can_replace_local_workers(out: Path) -> None:
    plan = make_plan("own.tiny", "smoke")
    out.mkdir(parents=True)
    shown = UnitProgress({unit.name: unit.effort for unit in plan.units})
    with ResultStore(out / "results.sqlite", plan.settings) as store:
        run_units(plan, store, Threads, None, shown)
        assert store.finished().keys() == {unit.name for unit in plan.units}


def test_data_sets_are_chosen_by_name(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reproduce(out, "--datasets", "third, first") == 0
    with (out / "tables" / "sums.csv").open(newline="") as file:
        assert [row[0] for row in csv.reader(file)][1:] == ["first, sum", "third, sum"]
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", "own.tiny", "--preset", "smoke", "--datasets", "third", "--quiet"]) == 0
    assert (tmp_path / "runs" / "own.tiny-smoke-third" / "index.html").exists()


@pytest.mark.parametrize("old_order", [False, True])
def test_data_sets_can_be_given_in_any_order_and_form(
    old_order: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    """All forms are one run. This holds also for a file that was written in the order of the command line."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/own.tiny-smoke-third-first" if old_order else "runs/own.tiny-smoke-first-third")
    assert reproduce(folder, "--datasets", "first,third") == 0
    assert read_results(folder / "results.sqlite")[0].datasets == ("first", "third")
    if old_order:
        own, given = '["first", "third"]', '["third", "first"]'
        with sqlite3.connect(folder / "results.sqlite") as connection:
            connection.execute("UPDATE meta SET value = ? WHERE key = 'datasets'", (given,))
            connection.execute("UPDATE meta SET value = replace(value, ?, ?) WHERE key = 'config'", (own, given))
        connection.close()
        assert given in read_results(folder / "results.sqlite")[0].config
    capsys.readouterr()
    forms = ["third,first"], ["third", "first"], ["third", "--datasets", "first"], ["third,", "first"]
    for form in forms:
        assert cli.main(["reproduce", "own.tiny", "--preset", "smoke", "--workers", "1", "--datasets", *form]) == 0
    assert capsys.readouterr().err == "8 of 8 units were finished before\n" * 4
    assert cli.main(["table", "own.tiny", str(folder)]) == 0
    assert [found.name for found in Path("runs").iterdir()] == [folder.name]


def test_some_units_can_be_run_with_those_that_they_need_and_the_others_later(out: Path, capsys: Printed) -> None:
    assert reproduce(out, "--unit", "first, sum") == 0
    done = [line.split(" (")[0].split("  ") for line in capsys.readouterr().err.splitlines()]
    assert [number for number, _ in done] == ["1/4", "2/4", "3/4", "4/4"]
    assert {name for _, name in done} == {"first, sum", *(f"first, part {number}" for number in range(3))}
    assert (out / "table.md").read_text().startswith("Preset smoke, ")
    assert "Finished: 4 of 8 units, without figures." in (out / "table.md").read_text()
    assert not list((out / "figures").iterdir())
    assert reproduce(out, "--unit", "part 1", "--unit", "first") == 0
    assert capsys.readouterr().err.startswith("4 of 5 units were finished before\n5/5  second, part 1 (")
    assert reproduce(out) == 0
    assert "Finished:" not in (out / "table.md").read_text()
    assert [path.name for path in (out / "figures").iterdir()] == ["all-units.png"]


@pytest.mark.parametrize("number", ["two", "0", "-1", "1.5"])
def test_a_wrong_number_of_workers_is_explained(number: str, out: Path, capsys: Printed) -> None:
    with pytest.raises(SystemExit):
        reproduce(out, f"--workers={number}")
    assert f"argument --workers: must be a whole number of at least 1, not '{number}'" in capsys.readouterr().err


def test_a_file_and_a_line_make_an_experiment(out: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    monkeypatch.setitem(experiments.EXPERIMENTS, "toy", "own.tiny")
    assert cli.main(["reproduce", "--list"]) == 0
    assert "toy: A very short experiment" in capsys.readouterr().out
    assert reproduce(out, name="toy") == 0
    assert cli.main(["table", "toy", str(out)]) == 0
    assert "Parts & <sums>" in capsys.readouterr().out


def test_the_list_names_every_experiment_and_preset(capsys: Printed) -> None:
    assert cli.main(["reproduce", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if not line.startswith(" ")] == list(experiments.EXPERIMENTS)
    assert any(line.startswith("  --preset smoke: 2 units; data ") for line in lines)


def test_tables_in_every_format(out: Path, capsys: Printed) -> None:
    assert reproduce(out) == 0
    assert "first, sum" in table(out, capsys)[0]
    assert table(out, capsys, "csv")[0].startswith('# Parts & <sums>\nunit,value\n"first, sum",')
    assert "## Sums\n\n| unit | value |\n|---|---:|\n" in table(out, capsys, "markdown")[0]
    assert "\\caption{Parts \\& \\textless{}sums\\textgreater{}. A" in table(out, capsys, "latex")[0]


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["reproduce"], "expected the name of an experiment; got none"),
        (["reproduce", "batch-size-colapse"], "(did you mean batch-size-collapse?)"),
        (["reproduce", "own.nothing"], "got 'own.nothing' (No module named 'own.nothing')"),
        (["reproduce", ".relative"], "got '.relative'"),
        (["reproduce", "os.path"], "got a module without PRESETS, units, work"),
        (["reproduce", "own.tiny", "--preset", "smok"], "(did you mean smoke?)"),
        (["reproduce", "own.tiny", "--datasets", "frist"], "one of: first, second, third; got 'frist'"),
        (["reproduce", "own.tiny", "--datasets", ""], "got ''"),
        (["reproduce", "own.tiny", "--datasets", "first,first"], "data sets, each once; got 'first,first'"),
        (["reproduce", "random-labels", "--datasets", "boston"], "random-labels, which has only one"),
        (["reproduce", "own.tiny", "--data-dir", "gone"], "got no folder at gone. Do this: check the name"),
        (["reproduce", "own.tiny", "--preset", "smoke", "--unit", "fisrt, sum"], "(did you mean first, sum?)"),
        (["reproduce", "--all", "--unit", "first"], "no --unit beside --all; got ['first']"),
        (["reproduce", "--datasets", "first", "own.tiny"], "from the output of --list, and give it before --datasets"),
        (["table", "batch-size-colapse", "."], "(did you mean batch-size-collapse?)"),
        (["table", "mcbn-toy", "."], "nothing at results.sqlite"),
        (["table", "own.tiny", "nowhere"], "nothing at nowhere/results.sqlite"),
    ],
)
def test_wrong_names_give_an_error_with_help(
    arguments: list[str], answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    assert answer in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, capsys: Printed) -> None:
    (tmp_path / "taken").write_text("mine")
    assert reproduce(tmp_path / "taken") == 2
    assert f"a folder for the results (--out); got the file {tmp_path / 'taken'}" in capsys.readouterr().err
    assert reproduce(tmp_path / "taken" / "below") == 2
    assert "permission to write to" in capsys.readouterr().err
    assert (tmp_path / "taken").read_text() == "mine"
    (tmp_path / "out" / "results.sqlite").mkdir(parents=True)
    for command in (
        ["reproduce", "own.tiny", "--out", str(tmp_path / "out")],
        ["table", "own.tiny", f"{tmp_path}/out"],
    ):
        assert cli.main(command) == 2
        assert "results.sqlite; got a folder with that name" in capsys.readouterr().err


def test_a_folder_of_another_run_is_refused(out: Path, capsys: Printed) -> None:
    assert reproduce(out) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert reproduce(out, preset="quick") == 2
    assert "preset smoke instead of quick; count 3 instead of 40" in capsys.readouterr().err
    assert reproduce(out, "--datasets", "first") == 2
    assert 'datasets ["first", "second"] instead of ["first"]' in capsys.readouterr().err
    assert cli.main(["table", "batch-size-collapse", str(out)]) == 2
    assert "got results of own.tiny" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_results_of_a_program_that_has_changed_are_refused(
    out: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reproduce(out) == 0
    capsys.readouterr()
    with monkeypatch.context() as changed:
        changed.setitem(tiny.PRESETS, "smoke", tiny.Config(count=4))
        assert cli.main(["table", "own.tiny", str(out)]) == 2
        assert "results with count 3 instead of 4" in capsys.readouterr().err
    monkeypatch.setattr(tiny, "units", lambda config: [Unit("first, sum", {"dataset": "other"})])
    assert cli.main(["table", "own.tiny", str(out)]) == 2
    assert "results of the units that own.tiny has now" in capsys.readouterr().err
    assert reproduce(out) == 2


@pytest.mark.parametrize(
    "units",
    [
        [Unit("a", {}), Unit("a", {})],
        [Unit("a", {}, needs=("b",))],
        [Unit("a", {}, needs=("b",)), Unit("b", {}, needs=("a",))],
    ],
)
def test_units_that_could_never_be_done_are_refused(
    units: list[Unit], out: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "units", lambda config: units)
    assert reproduce(out) == 2
    assert "needs that other units can meet" in capsys.readouterr().err


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_unit_that_fails_does_not_stop_the_others(workers: str, out: Path, capsys: Printed) -> None:
    assert reproduce(out, "--workers", workers, preset="bad") == 2
    *before, error = capsys.readouterr().err.splitlines()
    assert "second, part 1: failed: expected a; got b. Do this: c." in before
    assert (
        "expected a; got b, in the unit 'second, part 1'; 1 could not start without them. Do this: c; then run" in error
    )
    assert not (out / "index.html").exists()
    printed, missing = table(out, capsys)
    assert missing == "not finished: 2 of 8 units: second, sum; second, part 1\n"
    assert "first, sum" in printed
    assert len(read_results(out / "results.sqlite")[1]) == 6


def test_an_error_of_the_program_is_shown_where_it_happened(out: Path, capsys: Printed) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)second, part 1.*trouble.*ZeroDivisionError"):
        reproduce(out, "--workers", "2", preset="bug")
    assert "second, part 1: failed: ZeroDivisionError: division by zero" in capsys.readouterr().err.splitlines()
    assert len(read_results(out / "results.sqlite")[1]) == 6
    with pytest.raises(RuntimeError, match="set is not JSON serializable"):
        reproduce(out.with_name("other"), preset="object")


def test_a_run_says_once_what_it_waits_for(out: Path, capsys: Printed) -> None:
    out.mkdir(parents=True)
    with ResultStore(out / "results.sqlite", make_plan("own.tiny", "smoke").settings):
        pass
    with sqlite3.connect(out / "results.sqlite") as connection:
        owner = ProcessIdentity("elsewhere", 1, "1").to_text()
        connection.execute("INSERT INTO claims VALUES ('first, part 0', ?, ?)", (owner, time.time() + 2))
    connection.close()
    assert reproduce(out) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("Waiting")] == [
        "Waiting for another process that works on: first, part 0. If it has ended, this run continues after at most "
        "2 min."
    ]


def test_a_killed_worker_is_replaced(out: Path, tmp_path: Path, capsys: Printed) -> None:
    assert reproduce(out, "--workers", "2", "--data-dir", str(tmp_path), preset="killed") == 0
    assert "A worker was killed. These units start again: " in capsys.readouterr().err
    assert len(read_results(out / "results.sqlite")[1]) == 8


def test_the_message_names_a_unit_that_kills_its_workers(out: Path, tmp_path: Path, capsys: Printed) -> None:
    assert reproduce(out, "--workers", "2", "--data-dir", str(tmp_path), preset="deadly") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "killed or crashed, 3 times, during: " in error
    assert "second, part 1" in error


def test_a_run_continues_when_the_disk_has_space_again(tmp_path: Path, capsys: Printed) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        not shutil.which("mount")
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", disk], capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount a small disk")
    try:
        assert reproduce(disk / "out", preset="large") == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert "free space on a working disk" in error
        assert "finished units are kept" in error
        kept = read_results(disk / "out" / "results.sqlite")[1]
        assert 0 < len(kept) < 82
        subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
        assert reproduce(disk / "out", preset="large") == 0
        finished = read_results(disk / "out" / "results.sqlite")[1]
        assert len(finished) == 82
        assert {name: finished[name] for name in kept} == kept
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_disk_that_is_full_at_the_end_loses_no_result(
    out: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(outputs, "save_figure", full)
        assert reproduce(out) == 2
    assert "got No space left on device. Do this: free some space" in capsys.readouterr().err
    assert reproduce(out) == 0
    assert "8 of 8 units were finished before" in capsys.readouterr().err


def test_different_software_versions_are_reported(out: Path, capsys: Printed) -> None:
    assert reproduce(out) == 0
    with sqlite3.connect(out / "results.sqlite") as connection:
        connection.execute("UPDATE units SET torch = '1.0' WHERE name = 'first, sum'")
    connection.close()
    said = f"batchbayes {__version__} with torch 1.0: 1"
    assert said in table(out, capsys)[0].splitlines()[-1]
    assert said in table(out, capsys, "csv")[1]
    assert reproduce(out) == 0
    page = (out / "index.html").read_text()
    assert "Different versions of the software" in page
    assert "torch 1.0" in page


def test_chosen_data_sets_are_in_the_configuration(out: Path) -> None:
    assert make_plan("own.tiny", "smoke", ["third"]).config == replace(tiny.PRESETS["smoke"], datasets=("third",))


def test_a_gallery_of_all_experiments(tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "EXPERIMENTS", {"own.tiny": "own.tiny"})
    monkeypatch.setattr("batchbayes_papers.runner.command.EXPERIMENTS", {"own.tiny": "own.tiny"})
    command = ["reproduce", "--all", "--preset", "smoke", "--out", str(tmp_path / "all"), "--workers", "1"]
    assert cli.main(command) == 0
    page = (tmp_path / "all" / "index.html").read_text()
    assert '<a href="#own.tiny">own.tiny</a>' in page
    assert '<section id="own.tiny"' in page
    single = (tmp_path / "all" / "own.tiny" / "index.html").read_text()
    for each in (page, single):
        assert each.index("only tests the program") < each.index("</header>")
    before = read_results(tmp_path / "all" / "own.tiny" / "results.sqlite")[1]
    assert cli.main(command) == 0
    assert read_results(tmp_path / "all" / "own.tiny" / "results.sqlite")[1] == before
    assert "1 experiment in one page" in capsys.readouterr().out


def test_an_experiment_that_cannot_run_is_named_in_the_gallery(
    tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchbayes_papers.runner.command.EXPERIMENTS", {"own.nowhere": "own.nowhere"})
    assert cli.main(["reproduce", "--all", "--preset", "smoke", "--out", str(tmp_path)]) == 2
    assert "own.nowhere is missing" in (tmp_path / "index.html").read_text()
    assert "own.nowhere" in capsys.readouterr().err
    assert cli.main(["reproduce", "own.tiny", "--all"]) == 2


def test_a_bug_in_one_experiment_does_not_stop_the_others(
    tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("experiment", "command"):
        monkeypatch.setattr(
            f"batchbayes_papers.runner.{place}.EXPERIMENTS", {"first": "own.tiny", "second": "own.tiny"}
        )
    assert cli.main(["reproduce", "--all", "--preset", "bug", "--out", str(tmp_path), "--workers", "1"]) == 2
    page, said = (tmp_path / "index.html").read_text(), capsys.readouterr().err
    for name in ("first", "second"):
        assert f"{name} is missing" in page
        assert f"{name}: the unit 'second, part 1' failed: ZeroDivisionError" in said
    assert said.count("Traceback") == 2
