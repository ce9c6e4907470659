"""Names of what is compared, what it is and how it is used: words that are made from the records of candidates."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from batchbayes._common.text import number
from batchbayes.report.words.say import knows, say

if TYPE_CHECKING:
    from batchbayes.methods.candidates import Candidate


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


def described(what: str, candidate: "Candidate", draws: int, tuned: Mapping[str, Any], *, temperature: bool) -> str:
    """Say what a contender is ("about"), for somebody who has never heard of it, or how it is used ("advice")."""
    method, size = candidate.method, candidate.settings.get("batch_size")
    key = f"{what}.{method.name}"
    if size is not None:
        key = f"{what}.batch_size" + ("_tuned" if candidate.tuned and what == "about" else "")
    elif not knows(key):
        key = "advice.other"
    known = key != "advice.other" or what == "advice"
    text = say(key, draws=draws, size=size, name=short_name(candidate), label=method.label) if known else method.about
    if candidate.views:
        views = say("method.views", count=draws * candidate.views, views=candidate.settings["views"])
        text = say(f"{what}.{'network_' if is_network(candidate) else ''}with_views", text=text, views=views)
    if temperature:
        text = say(f"{what}.temperature", text=text, temperature=tuned["temperature"])
    if "precision" not in tuned:
        return text
    each = tuned["precision"] if isinstance(tuned["precision"], tuple) else (tuned["precision"],)
    return say(f"{what}.precision", text=text, noise=" and ".join(number(precision**-0.5) for precision in each))


def caution_of(candidate: "Candidate") -> str:
    """Say what one has to know if it is recommended; empty if there is nothing."""
    if candidate.linearity is None or candidate.linearity.trusted:
        return ""
    return say("method.caution", label=candidate.method.label, linearity=candidate.linearity)
