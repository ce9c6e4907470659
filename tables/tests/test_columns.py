"""Frames as they are: words, categories, booleans, dates and missing values, of pandas, of polars and of neither."""

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal

import numpy as np
import pytest
from batchbayes_tables.columns import MISSING, NO_TEXT, Column, Columns, as_meant, read_frame

from batchbayes.errors import BatchbayesError, BatchbayesWarning
from batchbayes.sklearn import UncertainClassifier, UncertainRegressor

QUICK = {"hidden_widths": (16,), "num_steps": 100, "num_seeds": 2, "num_folds": 3, "weight_decays": (1e-3,),
         "num_draws": 2, "random_state": 0}  # fmt: skip


class Series:
    """The little of a column that is read, so that these tests need neither pandas nor polars."""

    def __init__(self, values):
        self._values = list(values)
        kinds = {type(value) for value in values if value is not None and not getattr(value, "tzinfo", None)}
        self.dtype = np.dtype(
            "datetime64[us]" if kinds == {datetime} else float if kinds and kinds <= {float} else object
        )

    def to_list(self):
        return self._values

    def to_numpy(self):
        return np.array(self._values, dtype=self.dtype)


class Frame(dict):
    """A frame of such columns."""

    dtypes = None

    @property
    def columns(self):
        return list(self)

    def __len__(self):
        return len(next(iter(self.values())).to_list())

    @property
    def shape(self):
        return len(self), len(self.columns)


def columns():
    random = np.random.default_rng(0)
    count = 240
    size = random.standard_normal(count)
    shop = random.choice(["north", "south", "east"], count).tolist()
    shop[3] = None
    day = [datetime(2024, 1, 1) + timedelta(hours=7 * i) for i in range(count)]
    y = size + 2 * (np.array(shop) == "north") + np.array([each.month for each in day]) / 3
    sizes = [None if i % 17 == 0 else float(each) for i, each in enumerate(size)]
    return {"size": sizes, "shop": shop, "day": day, "open": (size > 0).tolist()}, y + 0.05 * random.standard_normal(
        count
    )


def made(library):
    values, y = columns()
    if library == "neither":
        return Frame({name: Series(each) for name, each in values.items()}), y
    package = pytest.importorskip(library, reason=f"needs {library}: run `make users`")
    return package.DataFrame(values), y


LIBRARIES = pytest.mark.parametrize("library", ["neither", "pandas", "polars"])


@LIBRARIES
def test_a_column_is_read_by_its_kind(library):
    frame, _ = made(library)
    read = read_frame(frame)
    assert {name: kind for name, (kind, _) in read.items()} == {
        "size": "number", "shop": "words", "day": "date", "open": "number",
    }  # fmt: skip
    numbers, flags = Columns.raw([Column.learn(name, *each) for name, each in read.items()], read)
    assert numbers.shape == (240, 6)  # size, four of the day, open
    assert flags.shape == (240, 5)  # size is missing, three shops, and others
    wanted = np.array([None if each is None else float(each) for each in columns()[0]["size"]], dtype=float)
    np.testing.assert_array_equal(numbers[:, 0], np.where(np.isnan(wanted), np.nanmedian(wanted), wanted))
    np.testing.assert_array_equal(flags[:, 0], np.isnan(wanted))
    day = columns()[0]["day"][100]
    assert numbers[100, 1:5].tolist() == [
        (day - datetime(2000, 1, 1)) / timedelta(days=1), day.month - 1, day.weekday(), day.hour,
    ]  # fmt: skip


@LIBRARIES
def test_frames_end_to_end(library, tmp_path):
    frame, y = made(library)
    model = UncertainRegressor(**QUICK).fit(frame, y)
    assert model.score(frame, y) > 0.8
    plain = made("neither")[0]
    assert (model.predict(frame) == UncertainRegressor(**QUICK).fit(plain, y).predict(plain)).all()
    model.save(tmp_path / "model.safetensors")
    assert (UncertainRegressor.load(tmp_path / "model.safetensors").predict(frame) == model.predict(frame)).all()
    classes = UncertainClassifier(**QUICK).fit(frame, y > 3)
    assert classes.score(frame, y > 3) > 0.85


class NAType:
    """As NA of pandas: comparisons with it have no truth."""

    def __ne__(self, other):
        return self

    def __bool__(self):
        raise TypeError("boolean value of NA is ambiguous")


def test_objects_are_read_by_what_they_are():
    gone, days = NAType(), [date(2024, 1, 1) + timedelta(days=i) for i in range(3)]
    read = read_frame(
        Frame(
            whole=Series([1, gone, 3]),
            word=Series(["a", gone, "b"]),
            day=Series([days[0], None, days[2]]),
            price=Series([Decimal("1.5"), None, Decimal("2")]),
        )
    )
    assert [kind for kind, _ in read.values()] == ["number", "words", "date", "number"]
    np.testing.assert_array_equal(read["whole"][1], [1, np.nan, 3])
    assert read["word"][1].tolist() == ["a", MISSING, "b"]
    np.testing.assert_array_equal(read["day"][1], np.array(["2024-01-01", "NaT", "2024-01-03"], "datetime64[ns]"))
    np.testing.assert_array_equal(read["price"][1], [1.5, np.nan, 2])


def test_types_of_pandas():
    """Whole numbers and booleans with NA, categories that are numbers, and periods."""
    pandas = pytest.importorskip("pandas", reason="needs pandas: run `make users`")
    frame = pandas.DataFrame(
        {
            "whole": pandas.array([1, None, 3], dtype="Int64"),
            "flag": pandas.array([True, None, False], dtype="boolean"),
            "text": pandas.array(["a", None, "b"], dtype="string"),
            "code": pandas.Categorical([10, 20, 10]),
            "month": pandas.period_range("2024-01", periods=3, freq="M"),
        }
    )
    read = read_frame(frame)
    assert [kind for kind, _ in read.values()] == ["number", "number", "words", "words", "date"]
    np.testing.assert_array_equal(read["whole"][1], [1, np.nan, 3])
    np.testing.assert_array_equal(read["flag"][1], [1, np.nan, 0])
    assert read["code"][1].tolist() == [f"{NO_TEXT}10", f"{NO_TEXT}20", f"{NO_TEXT}10"]  # not the words "10", "20"
    assert read["month"][1][2] == np.datetime64("2024-03-01")


def test_dates_far_away_do_not_wrap_round():
    days = [datetime(1, 1, 1), datetime(1816, 3, 29), datetime(9999, 12, 31, 23)]
    kind, values = read_frame(Frame(day=Series(days)))["day"]
    numbers = Column.learn("day", kind, values).numbers(values)
    assert numbers[:, 0].tolist() == [(day - datetime(2000, 1, 1)) / timedelta(days=1) for day in days]
    assert numbers[:, 1:].tolist() == [[day.month - 1, day.weekday(), day.hour] for day in days]


def test_the_same_instants_in_another_time_zone_are_the_same_inputs():
    there = timezone(timedelta(hours=11))
    instants = [datetime(2024, 5, 31, 22, tzinfo=UTC), datetime(2024, 1, 1, tzinfo=UTC)]
    own, other = (
        read_frame(Frame(day=Series(each)))["day"][1] for each in (instants, [t.astimezone(there) for t in instants])
    )
    assert (own == other).all()
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"day": pandas.to_datetime(instants)})
    moved = pandas.DataFrame({"day": frame["day"].dt.tz_convert("Asia/Vladivostok")})
    assert (read_frame(frame)["day"][1] == own).all()
    assert (read_frame(moved)["day"][1] == own).all()


def test_dates_in_words_are_dates_and_stay_so():
    frame, y = made("neither")
    days = frame["day"].to_list()
    words = Frame(frame | {"day": Series([day.isoformat(" ") for day in days])})
    model, other = UncertainRegressor(**QUICK).fit(frame, y), UncertainRegressor(**QUICK).fit(words, y)
    assert (model.predict(frame) == other.predict(words)).all()
    assert (model.predict(frame) == other.predict(frame)).all()
    with pytest.raises(BatchbayesError, match=r"dates in column day, as in training; got .*31\.12\.2024"):
        other.predict(Frame(words | {"day": Series(["31.12.2024"] * 240)}))


@pytest.mark.parametrize(
    ("words", "what"), [(["31.12.2024", "1.1.2025"], "dates as words"), (["1.5", "-2"], "numbers as words")]
)
def test_words_that_are_something_else_are_told_at_the_fit(words, what):
    values = np.array(words, dtype=object)
    with pytest.warns(BatchbayesWarning, match=f"column a has {what}, such as '{words[0]}'. They are read as categ"):
        assert as_meant("a", "words", values)[0] == "words"


def test_categories_that_share_a_column_are_told():
    values = np.repeat([f"level {number}" for number in range(100)], 4).astype(object)
    with pytest.warns(BatchbayesWarning, match="column a has 100 categories, of which the 68 rarest, in 272 rows, are"):
        assert len(Column.learn("a", "words", values).levels) == 32
    assert len(Column.learn("a", "words", values, num_levels=100).levels) == 100


def test_a_missing_word_is_no_empty_word_and_a_number_is_no_text():
    read = read_frame(Frame(a=Series(["", None, "1", 1] * 3)))
    column = Column.learn("a", *read["a"])
    assert column.flags(read["a"][1])[:4].argmax(1).tolist() == [
        column.levels.index(each) for each in ("", MISSING, "1", f"{NO_TEXT}1")
    ]
    assert len(set(column.flags(read["a"][1])[:4].argmax(1))) == 4


def test_unknown_categories_are_told():
    frame, y = made("neither")
    model = UncertainRegressor(**QUICK).fit(frame, y)
    odd = Frame(frame | {"shop": Series(["west", *frame["shop"].to_list()[1:]])})
    with pytest.warns(UserWarning, match=r"unknown categories.*shop \(1 rows\)"):
        model.predict(odd)
    assert model.novelty(odd)[0] == 0
    assert (model.novelty(odd)[1:] == model.novelty(frame)[1:]).all()


def test_another_kind_of_column_is_refused():
    frame, y = made("neither")
    model = UncertainRegressor(**QUICK).fit(frame, y)
    with pytest.raises(BatchbayesError, match=r"number in column size.*got words"):
        model.predict(Frame(frame | {"size": Series(["a"] * 240)}))
    with pytest.raises(BatchbayesError, match="some values in column size"):
        UncertainRegressor(**QUICK).fit(Frame(frame | {"size": Series([float("nan")] * 240)}), y)
    with pytest.raises(BatchbayesError, match="finite numbers in column size"):
        UncertainRegressor(**QUICK).fit(Frame(frame | {"size": Series([float("inf")] * 240)}), y)


def test_missing_numbers_of_an_array():
    random = np.random.default_rng(0)
    x = random.standard_normal((200, 2))
    y = x[:, 0] + 3.0 * (x[:, 1] > 1)
    x[x[:, 1] > 1, 1] = np.nan
    model = UncertainRegressor(**QUICK).fit(x, y)
    assert model.score(x, y) > 0.8  # that a value is missing says much here
    with pytest.warns(UserWarning, match=r"missing where none were in training: 0 \(200 rows\)"):
        model.predict(np.column_stack([np.full(200, np.nan), x[:, 1]]))
