"""The UCI sets: files with wrong numbers are refused, and a download comes from a local server."""

import contextlib
import hashlib
import http.server
import io
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from batchbayes_papers.data import uci
from batchbayes_papers.data.uci import SETS, content_digest, load_regression
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbayes import BatchbayesError, BatchbayesWarning

TINY = np.array([[0.1, 2.0, 30.0, -1.0], [0.4, 5.0, 60.0, -2.0], [0.7, 8.0, 1e-3, -3.0]])
"""Two features, the target, and a column that is not used."""


@pytest.fixture(autouse=True)
def _no_other_folders(monkeypatch, tmp_path):
    monkeypatch.delenv("BATCHBAYES_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(uci, "SOURCE", "http://127.0.0.1:9")  # no server listens there


@pytest.fixture
def tiny(monkeypatch):
    digest = hashlib.sha256()
    for numbers in (TINY[:, :2], TINY[:, 2]):
        digest.update(repr(numbers.shape).encode())
        digest.update(b"".join(np.float64(number).astype("<f8").tobytes() for number in numbers.flat))
    monkeypatch.setitem(SETS, "tiny", uci._KnownSet("tiny-remote", 3, "c", digest.hexdigest(), "a b"))


@pytest.fixture
def server(monkeypatch):
    """Start a web server. Return its pages by path, and the list of the requested paths."""
    pages: dict[str, bytes] = {}
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200 if self.path in pages else 404)
            self.end_headers()
            self.wfile.write(pages.get(self.path, b""))

        def log_message(self, format, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        monkeypatch.setattr(uci, "SOURCE", f"http://127.0.0.1:{running.server_port}")
        yield pages, asked
        running.shutdown()
        thread.join()


def text(table) -> bytes:
    """Return the table in the format of the source: with spaces, tabs and an empty last line."""
    return "\n".join(" \t".join(map(repr, map(float, row))) + " " for row in table).encode() + b"\n\n"


def written(folder: Path, name="tiny", **arrays) -> Path:
    (folder / "uci").mkdir(parents=True)
    np.savez(folder / "uci" / f"{name}.npz", **(arrays or {"X": TINY[:, :2], "y": TINY[:, 2]}))
    return folder


def is_tiny(data) -> bool:
    assert (data.inputs.dtype, data.targets.dtype) == (np.float64, np.float64)
    assert (data.feature_names, data.target_name) == (("a", "b"), "c")
    return np.array_equal(data.inputs, TINY[:, :2]) and np.array_equal(data.targets, TINY[:, 2])


def test_the_places_are_tried_in_order(tiny, tmp_path, monkeypatch):
    good, bad = written(tmp_path / "good"), written(tmp_path / "bad", X=TINY, y=TINY[:, 0])
    cache = written(tmp_path / "cache" / "batchbayes")
    assert is_tiny(load_regression("tiny"))  # from the cache
    monkeypatch.setenv("BATCHBAYES_DATA", str(bad))
    with pytest.raises(BatchbayesError, match="bad/uci"):
        load_regression("tiny")
    assert is_tiny(load_regression("tiny", good))
    (bad / "uci" / "tiny.npz").unlink()
    assert is_tiny(load_regression("tiny", tmp_path / "nowhere"))
    (cache / "uci" / "tiny.npz").unlink()
    with pytest.raises(BatchbayesError, match=r"no file at .*nowhere/uci/tiny.npz or .*, and a download that failed"):
        load_regression("tiny", tmp_path / "nowhere")


def test_without_data_every_place_is_named(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHBAYES_DATA", str(tmp_path / "b"))
    with pytest.raises(BatchbayesError) as caught:
        load_regression("tiny", tmp_path / "a")
    places = ["a/uci/tiny.npz", "a/tiny.npz", "b/uci/tiny.npz", "b/tiny.npz", "cache/batchbayes/uci/tiny.npz"]
    assert " or ".join(str(tmp_path / place) for place in places) in caught.value.got


def test_files_may_lie_in_the_folder_itself(tiny, tmp_path, monkeypatch):
    flat = written(tmp_path) / "uci"
    assert is_tiny(load_regression("tiny", flat))
    monkeypatch.setenv("BATCHBAYES_DATA", str(flat))
    assert is_tiny(load_regression("tiny"))


def test_a_cache_that_cannot_be_written_costs_a_download_and_a_warning(tiny, server, tmp_path):
    server[0]["/tiny-remote/data/data.txt"] = text(TINY)
    (tmp_path / "cache").write_text("a file")
    for _ in range(2):
        with pytest.warns(BatchbayesWarning, match="cannot be saved at .*tiny.npz"):
            assert is_tiny(load_regression("tiny"))
    assert len(server[1]) == 2


def test_the_home_folder_has_the_cache_where_nothing_else_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert uci.cache_folder() == tmp_path / ".cache" / "batchbayes"


def test_compression_layout_and_type_of_a_file_do_not_matter(tiny, tmp_path):
    (tmp_path / "uci").mkdir()
    inputs = np.asfortranarray(TINY[:, :2].astype(">f8"))
    np.savez_compressed(tmp_path / "uci" / "tiny.npz", X=inputs, y=TINY[:, 2], more=np.array("text"))
    assert is_tiny(load_regression("tiny", tmp_path))


CHANGES = {
    "a number": (lambda x: x + np.eye(3, 2) * 1e-15, lambda y: y, "other numbers"),
    "the order": (lambda x: x[::-1], lambda y: y[::-1], "other numbers"),
    "the target's order": (lambda x: x, lambda y: y[::-1], "other numbers"),
    "a row less": (lambda x: x[1:], lambda y: y[1:], r"'X': \(2, 2\)"),
    "a column of targets": (lambda x: x, lambda y: y[:, None], r"'y': \(3, 1\)"),
    "text": (lambda x: x.astype(str), lambda y: y.astype(str), "no arrays of numbers"),
    "NaN": (lambda x: x * np.nan, lambda y: y, "other numbers"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_altered_file_is_refused(tiny, tmp_path, change):
    inputs, targets, message = CHANGES[change]
    written(tmp_path, X=inputs(TINY[:, :2]), y=targets(TINY[:, 2]))
    with pytest.raises(BatchbayesError, match=rf"tiny\.npz.*{message}.*remove it.*the columns of X are a, b"):
        load_regression("tiny", tmp_path)


def test_a_file_without_targets_is_refused(tiny, tmp_path):
    with pytest.raises(BatchbayesError, match=r"got arrays of numbers \{'X': \(3, 2\)\}"):
        load_regression("tiny", written(tmp_path, X=TINY[:, :2]))


class Bomb:
    """An object that makes a folder if it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_a_pickle_inside_is_refused_and_not_run(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, X=np.array([Bomb()], dtype=object), y=TINY[:, 2])
    with pytest.raises(BatchbayesError, match=r"damaged file.*allow_pickle=False"):
        load_regression("tiny", tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_a_single_array_is_refused(tiny, tmp_path):
    (tmp_path / "uci").mkdir()
    with (tmp_path / "uci" / "tiny.npz").open("wb") as file:
        np.save(file, TINY)
    with pytest.raises(BatchbayesError, match="a single array"):
        load_regression("tiny", tmp_path)


@pytest.fixture(scope="module")
def whole() -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, X=TINY[:, :2], y=TINY[:, 2])
    return file.getvalue()


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_file_is_refused_or_still_right(whole, data, tmp_path_factory):
    position = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    if data.draw(st.booleans(), label="cut"):
        del damaged[position:]
    else:
        damaged[position] ^= data.draw(st.integers(1, 255))
    folder = tmp_path_factory.mktemp("damaged") / "uci"
    folder.mkdir()
    (folder / "tiny.npz").write_bytes(bytes(damaged))
    known = uci._KnownSet("tiny-remote", 3, "c", content_digest(TINY[:, :2], TINY[:, 2]), "a b")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SETS, "tiny", known)
        with contextlib.suppress(BatchbayesError):
            assert is_tiny(load_regression("tiny", folder.parent))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bostonHousing", "did you mean boston"),
        ("Yatch", "did you mean yacht"),
        ("zzz", "choose one of them"),
        (3, "choose one"),
    ],
)
def test_an_unknown_name_is_answered_with_a_known_one(name, message):
    with pytest.raises(BatchbayesError, match=message):
        load_regression(name)


def test_without_a_network_the_error_says_what_to_do_by_hand():
    with pytest.raises(BatchbayesError) as caught:
        load_regression("energy")
    for part in (
        "uci/energy.npz",
        "--data-dir",
        "BATCHBAYES_DATA",
        "y is heating_load",
        "surface_area, wall_area",
        "X=table[:, :8]",
    ):
        assert part in caught.value.fix


def test_a_download_is_kept_in_the_cache(tiny, server, tmp_path):
    pages, asked = server
    pages["/tiny-remote/data/data.txt"] = text(TINY)
    assert is_tiny(load_regression("tiny"))
    assert is_tiny(load_regression("tiny"))
    assert asked == ["/tiny-remote/data/data.txt"]
    folder = tmp_path / "cache" / "batchbayes" / "uci"
    assert [path.name for path in folder.iterdir()] == ["tiny.npz"]
    with np.load(folder / "tiny.npz", allow_pickle=False) as file:
        assert (file["features"].tolist(), str(file["target"])) == (["a", "b"], "c")


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (None, "download that failed .*404"),
        (b"", "download that failed"),
        (b"<html>come back later</html>", "download that failed"),
        (b"\xff\xfe\x00", "download that failed"),
        (text(TINY[:, :2]), r"'y': \(0,\)"),
        (text(TINY[:2]), r"'X': \(2, 2\)"),
        (text(TINY + 1), "other numbers"),
    ],
)
def test_a_bad_download_is_refused_and_not_kept(tiny, server, tmp_path, page, message):
    if page is not None:
        server[0]["/tiny-remote/data/data.txt"] = page
    with pytest.raises(BatchbayesError, match=message):
        load_regression("tiny")
    assert not (tmp_path / "cache").exists()


def test_every_set_has_a_name_for_each_column():
    widths = {name: len(known.feature_names) for name, known in SETS.items()}
    assert widths == {
        "boston": 13, "concrete": 8, "energy": 8, "kin8nm": 8, "power": 4, "protein": 9, "wine": 11, "yacht": 6,
    }  # fmt: skip
    assert len({known.digest for known in SETS.values()}) == 8


@pytest.mark.shared
@pytest.mark.parametrize("name", SETS)
def test_the_real_files_are_the_known_ones(data_folder, name):
    data = load_regression(name, data_folder)
    with np.load(data_folder / "uci" / f"{name}.npz", allow_pickle=False) as file:
        assert tuple(file["features"]) == data.feature_names
        assert str(file["target"]) == data.target_name
        assert np.array_equal(file["X"], data.inputs)
        assert np.array_equal(file["y"], data.targets)
    assert np.isfinite(data.inputs).all()
    assert np.isfinite(data.targets).all()


@pytest.mark.shared
def test_a_real_set_survives_its_way_through_text_and_the_network(data_folder, server):
    real = load_regression("energy", data_folder)
    cooling = np.ones_like(real.targets)  # the source has a second target after the first
    server[0]["/energy/data/data.txt"] = text(np.column_stack([real.inputs, real.targets, cooling]))
    fetched = load_regression("energy")
    assert np.array_equal(fetched.inputs, real.inputs)
    assert np.array_equal(fetched.targets, real.targets)
