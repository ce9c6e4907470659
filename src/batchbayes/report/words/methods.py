"""Names of what is compared, what it is and how it is used: words that are made from the records of candidates."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from batchbayes._common.text import number

if TYPE_CHECKING:
    from batchbayes.methods.candidates import Candidate

WORDS = {
    "deterministic": ("the network as it is", "Take its own output"),
    "weight_samples": ("mean of networks with weights of their own", "Average the {name}"),
    "mc_dropout": ("mean of draws, each with its own dropout masks", "Average draws with dropout on"),
    "variational": (
        "mean of {draws} draws of all weights, which were trained further to be random",
        "Average {draws} draws of the weights",
    ),
    "last_layer_laplace": (
        "mean of {draws} draws of the last layer, from a Gaussian around the trained weights",
        "Average {draws} draws of the last layer",
    ),
}
"""By the name of a method: what it is, and how it is used. A method that is not here is described by its table."""
NOISE = {
    False: "mean of draws with the noise of the batch size of training",
    True: "mean of draws with the noise of the batch size that suits calibration data best",
}
"""Of batch-norm methods, whether they were tuned or not."""


def is_network(candidate: "Candidate") -> bool:
    """Return whether it is the network as it is, perhaps on views."""
    return candidate.method.name == "deterministic"


def short_name(candidate: "Candidate") -> str:
    """Return the name without numbers, as in "SHORT NAME with 16 views"."""
    if is_network(candidate):
        return "deterministic"
    if candidate.method.name == "weight_samples":
        return f"ensemble of {candidate.posterior.num_functions}"
    return candidate.method.label + (" tuned" if candidate.tuned else "")


def name_of(candidate: "Candidate", draws: int, *, temperature: bool) -> str:
    """Return the name in tables and figures, which no other contender has."""
    short, views = short_name(candidate), draws * candidate.views
    if views:
        name = f"{views} views" if is_network(candidate) else f"{short} with {views} views"
    elif temperature:
        name = short
    elif candidate.curve is not None and candidate.curve.at_end:
        name = f"{short} (no noise helps)"  # the best batch size is the largest that was tried
    else:
        name = f"{short}, {candidate.variant}" if candidate.variant else short
    if not temperature:
        return name
    return "temperature scaling" if is_network(candidate) and not views else f"{name} + temperature"


def about_of(candidate: "Candidate", draws: int, tuned: Mapping[str, Any], *, temperature: bool) -> str:
    """Say what it is, for somebody who has never heard of it."""
    text = _words(candidate, draws)[0]
    if candidate.views:
        seen = _views(candidate, draws)
        text = f"the network on {seen}" if is_network(candidate) else f"{text}, on {seen}"
    if temperature:
        text += ", with logits divided by one number tuned on calibration data"
    return f"{text}; observation noise tuned on calibration data" if "precision" in tuned else text


def advice_of(candidate: "Candidate", draws: int, tuned: Mapping[str, Any], *, temperature: bool) -> str:
    """Say how it is used, without a full stop."""
    text = _words(candidate, draws)[1]
    if candidate.views:
        seen = _views(candidate, draws)
        text = f"Average its outputs over {seen}" if is_network(candidate) else f"{text}, over {seen}"
    if temperature:
        text += f", and divide the logits by {number(tuned['temperature'])}"
    if "precision" in tuned:
        every = tuned["precision"] if isinstance(tuned["precision"], tuple) else (tuned["precision"],)
        noise = " and ".join(number(each**-0.5) for each in every)
        text += f", with observation noise of standard deviation {noise}"
    return text


def caution_of(candidate: "Candidate") -> str:
    """Say what one has to know if it is recommended; empty if there is nothing."""
    if candidate.linearity is None or candidate.linearity.trusted:
        return ""
    return (
        f"The tuned batch size of {candidate.method.label} is only rough. Tuning takes the network as linear in its "
        f"batch statistics, and this holds only roughly here ({candidate.linearity}). How good it is was measured "
        "with the draws that are recommended."
    )


def tuning_caption(candidate: "Candidate") -> str:
    """Say what the curve of its tuning shows."""
    return (
        f"How much noise suits {candidate.method.label}: the loss on calibration data at each effective batch size. A "
        "smaller batch size means more noise."
    )


def _words(candidate: "Candidate", draws: int) -> tuple[str, str]:
    method, size = candidate.method, candidate.settings.get("batch_size")
    if size is not None:
        return NOISE[candidate.tuned], f"Average draws at an effective batch size of {number(size)}"
    about, advice = WORDS.get(method.name, (method.about, f"Average draws of {method.label}"))
    filled = {"draws": draws, "name": short_name(candidate)}
    return about.format(**filled), advice.format(**filled)


def _views(candidate: "Candidate", draws: int) -> str:
    return f"{draws * candidate.views} random views of each input ({candidate.settings['views']})"
