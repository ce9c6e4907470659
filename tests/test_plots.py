from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Polygon
from PIL import Image

from batchbayes import BatchbayesError
from batchbayes.metrics import equal_width_reliability
from batchbayes.plots import (
    Band,
    Triptych,
    band_figure,
    batch_size_figure,
    boxes_figure,
    certainty_figure,
    interval_coverage_figure,
    novelty_figure,
    price_figure,
    reliability_figure,
    risk_coverage_figure,
    save_figure,
    segmentation_figure,
    shift_figure,
    uncertainty_error_figure,
)

X = np.linspace(-4, 4, 33)


def bands() -> Figure:
    wide, narrow = Band("wide", X / 2, 0.5 + np.abs(X)), Band("narrow", X / 2, np.full_like(X, 0.25))
    data = np.array([[-2.0], [1.0]]), np.array([[-1.0], [0.5]])
    return band_figure(X, [wide, narrow], data=data, truth=X / 2, support=((-3, -1), (0, 2)))


def test_bands_have_the_height_of_their_standard_deviations() -> None:
    for panel, std in zip(bands().axes, (0.5 + np.abs(X), np.full_like(X, 0.25)), strict=True):
        areas = {c.get_label(): c for c in panel.collections if isinstance(c, PolyCollection)}
        for label, multiple in (("± 1 std", 1), ("± 2 std", 2)):
            corners = areas[label].get_paths()[0].vertices
            at_two = corners[np.isclose(corners[:, 0], 2.0)][:, 1]
            half_width = multiple * std[np.isclose(X, 2.0)][0]
            np.testing.assert_allclose([at_two.min(), at_two.max()], [1 - half_width, 1 + half_width])


def test_panels_share_axes_and_show_mean_truth_and_data() -> None:
    left, right = bands().axes
    assert (left.get_title(), right.get_title()) == ("wide", "narrow")
    assert left.get_ylim() == right.get_ylim()
    assert left.get_xlim() == right.get_xlim() == (-4, 4)
    lines = {line.get_label(): line for line in right.get_lines()}
    np.testing.assert_allclose(lines["mean"].get_ydata(), X / 2)
    np.testing.assert_allclose(lines["training data"].get_xydata(), [[-2, -1], [1, 0.5]])
    assert "true function" in lines


def test_bands_of_more_levels_and_rows() -> None:
    three = [Band(name, X / 2, np.ones_like(X)) for name in "abc"]
    figure = band_figure(X, three, data=(X, X), truth=X / 2, support=((-3, 3),), levels=(0.5, 3, 2), columns=2)
    shown = [panel for panel in figure.axes if panel.get_visible()]
    assert [panel.get_title() for panel in shown] == ["a", "b", "c"]
    areas = [c for c in shown[2].collections if isinstance(c, PolyCollection)]
    assert [area.get_label() for area in areas] == ["± 3 std", "± 2 std", "± 0.5 std"]  # the narrow lie on the wide
    assert len({tuple(area.get_facecolor()[0]) for area in areas}) == 3
    assert [panel.get_ylabel() for panel in shown] == ["y", "", "y"]


def test_what_lies_outside_the_support_is_shaded() -> None:
    spans = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in bands().axes[0].patches]  # type: ignore[attr-defined]
    assert spans == [(-4, -3), (-1, 0), (2, 4)]


def digits() -> Figure:
    images = np.arange(5)[:, None, None, None] * np.ones((5, 1, 8, 8))
    return certainty_figure(
        images,
        labels=[0, 1, 2, 3, 4],
        predicted=[0, 1, 2, 9, 4],
        entropy=[0.9, 0.8, 0.7, 0.6, 0.5],
        mutual_information=[0.02, 0.0001, 0.03, 0.4, 0.01],
        count=2,
    )


def test_images_are_ordered_by_mutual_information() -> None:
    cells = digits().axes
    assert [float(cell.images[0].get_array()[0, 0]) for cell in cells] == [1, 4, 3, 2]  # type: ignore[index]
    assert [cell.get_title() for cell in cells] == ["says 1, is 1", "says 4, is 4", "says 9, is 3", "says 2, is 2"]
    assert [cell.get_xlabel() for cell in cells] == [
        "MI < 0.001\nH 0.800",
        "MI 0.010\nH 0.500",
        "MI 0.400\nH 0.600",
        "MI 0.030\nH 0.700",
    ]


def test_only_wrong_answers_stand_out() -> None:
    weights = [cell.title.get_fontweight() for cell in digits().axes]
    assert weights == ["normal", "normal", "bold", "normal"]


@pytest.mark.parametrize("make", [bands, digits])
def test_saved_figures_are_whole_png_files(make: object, tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    save_figure(make(), path)  # type: ignore[operator]
    with Image.open(BytesIO(path.read_bytes())) as image:
        image.load()
        assert image.format == "PNG"
        assert len(image.getcolors(maxcolors=2**20) or []) > 20  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == [path]


def test_reliability_shows_the_gap_and_hollows_small_bins() -> None:
    confidence = torch.cat([torch.full((20,), 0.95), torch.full((3,), 0.45)])
    correct = torch.cat([torch.arange(20) < 10, torch.ones(3, dtype=torch.bool)])
    figure = reliability_figure({"one $": equal_width_reliability(confidence, correct)})
    many, few = (line.get_xydata() for line in figure.axes[0].get_lines()[1:])
    np.testing.assert_allclose(many, [[0.95, 0.5]], atol=1e-6)
    np.testing.assert_allclose(few, [[0.45, 1.0]], atol=1e-6)
    bars = [patch.get_height() for patch in figure.axes[1].patches]  # type: ignore[attr-defined]
    assert sum(bars) == pytest.approx(1)


def test_risk_and_coverage_are_drawn_as_given() -> None:
    figure = risk_coverage_figure({"a": ([0.5, 1.0], [0.0, 0.25])}, risk="error")
    np.testing.assert_allclose(figure.axes[0].get_lines()[0].get_xydata(), [[0.5, 0], [1, 0.25]])


def test_errors_are_sorted_by_predicted_spread() -> None:
    figure = uncertainty_error_figure([3.0, 1.0, 2.0], [-9.0, 1.0, 4.0], constant_std=2.0)
    panel = figure.axes[0]
    lines = {line.get_label(): line for line in panel.get_lines()}
    np.testing.assert_allclose(lines["error of a point"].get_ydata(), [1, 4, 9])
    np.testing.assert_allclose(lines["95 % band, one spread for all"].get_ydata(), 3.92)
    wide = next(c for c in panel.collections if str(c.get_label()).startswith("95 %"))
    assert wide.get_paths()[0].vertices[:, 1].max() == pytest.approx(1.96 * 3)


def test_coverage_is_drawn_against_its_level() -> None:
    figure = interval_coverage_figure([0.5, 0.9], {"a": [0.4, 0.8]})
    np.testing.assert_allclose(figure.axes[0].get_lines()[1].get_xydata(), [[0.5, 0.4], [0.9, 0.8]])


def test_shift_shows_shares_of_both() -> None:
    figure = shift_figure({"entropy": ([0.1, 0.2, 0.3, 0.4], [0.8, 0.9])})
    above, below = figure.axes
    outlines = [patch for patch in above.patches if isinstance(patch, Polygon)]
    np.testing.assert_allclose([outline.get_xy()[:, 1].max() for outline in outlines], [0.25, 0.5])
    ends = [line.get_ydata()[-1] for line in below.get_lines()]
    assert ends == [1, 1]


def test_the_best_batch_size_lies_on_the_curve() -> None:
    figure = batch_size_figure([4, 64, 16], [3.0, 2.0, 1.0], best=16, trained_with=64, score="NLL")
    curve, trained, best = figure.axes[0].get_lines()
    np.testing.assert_allclose(curve.get_xydata(), [[4, 3], [16, 1], [64, 2]])
    np.testing.assert_allclose(trained.get_xdata(), [64, 64])
    np.testing.assert_allclose(best.get_xydata(), [[16, 1]])


def test_a_triptych_shows_image_prediction_uncertainty_and_errors() -> None:
    image, predicted = np.zeros((4, 6, 3)), np.arange(24).reshape(4, 6) % 3
    row = Triptych(image, predicted, predicted / 3, predicted == 1)
    figure = segmentation_figure([row, row], num_classes=3, names=["a", "b", "c $"])
    cells = [axes for axes in figure.axes if axes.get_images()]
    np.testing.assert_array_equal(cells[1].get_images()[0].get_array(), predicted)
    np.testing.assert_array_equal(cells[7].get_images()[0].get_array(), predicted == 1)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", r"c \$"]


def test_coloured_images_and_names() -> None:
    figure = certainty_figure(
        np.zeros((2, 3, 4, 4)), [0, 1], [0, 0], entropy=[0, 1], mutual_information=[0, 1], count=1, names=["$", "cat"]
    )
    assert [cell.get_title() for cell in figure.axes] == ["says $\nis $", "says $\nis cat"]
    assert figure.axes[0].get_images()[0].get_array().shape == (4, 4, 3)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "draw",
    [
        lambda ax: batch_size_figure([4, 64], [3.0, 2.0], best=64, trained_with=64, score="NLL", ax=ax),
        lambda ax: risk_coverage_figure({"a": ([0.5, 1.0], [0.0, 0.25])}, ax=ax),
        lambda ax: uncertainty_error_figure([3.0, 1.0, 2.0], [-9.0, 1.0, 4.0], constant_std=2.0, ax=ax),
        lambda ax: interval_coverage_figure([0.5, 0.9], {"a": [0.4, 0.8]}, ax=ax),
        lambda ax: novelty_figure({"test": [0.2, 0.4]}, level=0.01, ax=ax),
    ],
)
def test_a_single_panel_is_drawn_into_given_axes(draw) -> None:
    figure = Figure()
    other, given = figure.subplots(1, 2)
    assert draw(given) is figure
    assert given.has_data()
    assert not other.has_data()
    assert figure.legends == []
    alone = draw(None)
    assert alone is not figure
    assert alone.axes[0].has_data()


def prices(ax=None) -> Figure:
    qualities = {"NLL (lower is better)": [0.4, 0.3], "right answers": [0.9, 0.92]}
    return price_figure(["network", "views $"], [1, 16], qualities, recommended="views $", ax=ax)


def test_price_shows_each_quality_and_rings_the_recommended() -> None:
    figure = prices()
    assert [panel.get_title() for panel in figure.axes] == ["NLL (lower is better)", "right answers"]
    for panel, values in zip(figure.axes, ([0.4, 0.3], [0.9, 0.92]), strict=True):
        network, views, ring = (line.get_xydata().tolist() for line in panel.get_lines())
        assert [network, views] == [[[1, values[0]]], [[16, values[1]]]]
        assert ring == views
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["network", r"views \$", "recommended"]


def test_price_leaves_out_an_infinite_nll() -> None:
    assert price_figure(["network", "views"], [1, 16], {"accuracy": [0.0, 0.0]}).axes[0].get_ylim() == (-0.01, 0.01)
    panel = price_figure(["network", "views", "none"], [1, 16, 2], {"NLL": [0.4, 0.3, float("inf")]}).axes[0]
    low, high = panel.get_ylim()
    assert 0.2 < low < 0.3 < 0.4 < high < 0.5


def test_novelty_counts_what_is_flagged() -> None:
    figure = novelty_figure({"test": [0.2, 0.4, 0.6, 0.8], "strange": [0.001, 0.9]}, level=0.01)
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]  # type: ignore[union-attr]
    assert texts[1:] == ["test: 0.0 % with p ≤ 0.01", "strange: 50.0 % with p ≤ 0.01"]


def test_a_best_batch_size_at_the_end_means_no_noise() -> None:
    figure = batch_size_figure([4, 64, 4096], [3.0, 2.0, 1.0], best=4090, trained_with=64, score="NLL")
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]  # type: ignore[union-attr]
    assert texts == ["as trained, M = 64", "no noise helps"]


@pytest.mark.parametrize(
    "draw",
    [
        prices,
        lambda ax: band_figure(X, [Band("a", X, X)] * 2, data=(X, X), truth=X, support=((-3, 3),), ax=ax),
        lambda ax: certainty_figure(
            np.zeros((2, 1, 4, 4)), [0, 1], [0, 0], entropy=[0, 1], mutual_information=[0, 1], count=1, ax=ax
        ),
        lambda ax: reliability_figure({"a": equal_width_reliability(torch.ones(3), torch.ones(3) > 0)}, ax=ax),
        lambda ax: segmentation_figure([Triptych(np.zeros((4, 4, 3)), *[np.zeros((4, 4))] * 3)], num_classes=2, ax=ax),
        lambda ax: shift_figure({"entropy": ([0.1], [0.9])}, ax=ax),
    ],
)
@pytest.mark.parametrize("layout", ["constrained", None])
def test_several_panels_take_the_place_of_given_axes(draw, layout) -> None:
    figure = Figure(layout=layout)
    other, given = figure.subplots(1, 2)
    assert draw(given) is figure
    figure.canvas.draw()
    assert given not in figure.axes
    panels = [panel for panel in figure.axes if panel is not other]
    assert any(panel.has_data() for panel in panels)
    assert not other.has_data()
    assert all(panel.get_window_extent().x0 >= 0.4 * figure.bbox.width for panel in panels)


def test_axes_outside_a_grid_have_no_place_for_panels() -> None:
    with pytest.raises(BatchbayesError, match="axes of a grid"):
        prices(Figure().add_axes((0, 0, 1, 1)))


def test_frames_of_boxes_reach_two_standard_deviations() -> None:
    from batchbayes import merge_detections

    box = torch.tensor([[2.0, 3.0, 8.0, 9.0]])
    found = merge_detections([(box + shift, [0.9], [1]) for shift in (-0.5, 0.5)] + [(box[:0], [], [])])
    figure = boxes_figure(np.zeros((12, 12)), found, names=["cat", "dog"], truth=box)
    patches = [patch.get_bbox().extents.tolist() for patch in figure.axes[0].patches]
    assert [2.0, 3.0, 8.0, 9.0] in patches
    assert [1.0, 3.0, 3.0, 9.0] in patches
    assert [2.0, 8.0, 8.0, 10.0] in patches
    assert [text.get_text() for text in figure.axes[0].texts] == ["dog 0.60"]
    hidden = boxes_figure(np.zeros((12, 12)), found, least_score=0.7)
    assert not hidden.axes[0].patches
