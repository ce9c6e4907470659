"""Predictions for new data: a posterior file and the network, no training data."""

from pathlib import Path

from batchbayes.assess.engine import Drawing
from batchbayes.assess.load import examples, trial
from batchbayes.assess.named import build_network
from batchbayes.assess.segmentation.pixels import image_table
from batchbayes.assess.tables import Table, class_table, value_table
from batchbayes.calibrate import ConformalIntervals
from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import categorical, gaussian
from batchbayes.methods.point import deterministic
from batchbayes.prediction import Engine
from batchbayes.saving import load, load_notes


def predict_new(
    *,
    model: str,
    weights: Path | None,
    posterior_path: Path,
    source: str,
    target: str | None,
    device: str,
    engine: Engine | None,
    num_samples: int | None,
    seed: int | None,
) -> Table:
    """The columns of predictions.csv for new inputs."""
    network = build_network(model, weights, device)
    posterior, notes = load(posterior_path, network), load_notes(posterior_path)
    if "task" not in notes:
        raise BatchbayesError(
            expected="a posterior written by batchbayes assess",
            got="one without its notes",
            fix="use bb.load and bb.predict",
        )
    data = examples(source, target, "the inputs")
    trial(network, data)
    maker = Drawing(
        num_samples or notes["num_samples"], notes["seed"] if seed is None else seed, engine or notes["engine"]
    )
    answering = deterministic(network) if notes["answer"] == "network" else posterior
    if notes["task"] == "segmentation":
        return image_table(maker, answering, posterior, data, notes)
    if notes["task"] == "classification":
        answer = maker.bundle(answering, data, [categorical(temperature=notes["temperature"])]).predictives[0]
        drawn = maker.bundle(posterior, data, [categorical(temperature=notes["draw_temperature"])]).predictives[0]
        return class_table(
            answer,
            drawn,
            source="new",
            rows=data.rows(),
            labels=None,
            names=notes["class_names"],
            threshold=notes["threshold"],
        )
    answer = maker.bundle(answering, data, [gaussian(notes["precision"])]).predictives[0]
    drawn = maker.bundle(posterior, data, [gaussian(notes["draw_precision"])]).predictives[0]
    return value_table(
        answer,
        drawn,
        source="new",
        rows=data.rows(),
        targets=None,
        threshold=notes["threshold"],
        intervals=ConformalIntervals(0.9, notes["conformal_width"])(answer),
    )
