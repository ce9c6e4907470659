"""Tables of the pages that have their source elsewhere: methods, experiments, options, columns, results."""

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path

from batchbayes_papers.runner.experiment import EXPERIMENTS

from batchbayes.methods.table import METHODS
from batchbayes.report.compare.columns import CLASSES, PIXELS, STRANGE_CLASSES, STRANGE_VALUES, VALUES, MetricColumn
from batchbayes.report.options import AssessOptions, Settings

PEERS = "peers"
"""The results page with all methods on one network. Its rows are named in methods.csv."""
NO_RUN = (
    "`python benchmarks/peers.py` makes this table. Its run has not been made yet. What was measured beside other "
    "libraries so far, each in a run of its own: [novelty beside pytorch-ood](results/novelty.md), [last-layer Laplace "
    "beside laplace-torch](results/laplace.md), [mean-field networks beside bayesian-torch and "
    "torch-uncertainty](results/weights-cost.md), [views beside temperature scaling](results/views.md)."
)


@dataclass(frozen=True)
class Paper:
    """A paper, or several that belong together, and the pages that repeat it."""

    title: str
    about: str
    pages: tuple[str, ...]


PAPERS = (
    Paper(
        "MCBN (Teye et al., 2018)",
        "Teye, Azizpour and Smith: [Bayesian Uncertainty Estimation for Batch Normalized Deep "
        "Networks](https://arxiv.org/abs/1802.06455), ICML 2018. A network that was trained with batch norm is a "
        "distribution over networks: draw its batch statistics anew for each prediction.",
        (
            "mcbn-uci", "mcbn-batch-size", "mcbn-passes", "precision-sensitivity", "mcbn-toy", "mcbn-normality",
            "mcbn-cifar", "mcbn-camvid", "mnf-uci",
        ),
    ),
    Paper(
        "Stochastic batch norm (Atanov et al., 2018) and batch size (Mukhoti et al., 2021)",
        "Atanov, Ashukha, Molchanov, Neklyudov and Vetrov: [Uncertainty Estimation via Stochastic Batch "
        "Normalization](https://arxiv.org/abs/1802.04893). Mukhoti, Dokania, Torr and Gal: [On Batch Normalisation for "
        "Approximate Bayesian Inference](https://arxiv.org/abs/2012.13220). A Gaussian in the place of the batches; "
        "and what large batches do to the uncertainty.",
        ("sbn", "batch-size-collapse", "elbo-batch-size"),
    ),
    Paper(
        "Random weights (Molchanov et al., 2017; Neklyudov et al., 2019)",
        "Molchanov, Ashukha and Vetrov: [Variational Dropout Sparsifies Deep Neural "
        "Networks](https://arxiv.org/abs/1701.05369), ICML 2017. Neklyudov, Molchanov, Ashukha and Vetrov: [Variance "
        "Networks](https://arxiv.org/abs/1803.03764), ICLR 2019. Weights with noise that training may turn up until "
        "only the noise, or nothing, is left.",
        (
            "sparse-vd", "vgg-like", "random-labels", "variance-networks", "variance-claims", "mean-propagation",
            "gradient-variance", "attack", "rl",
        ),
    ),
    Paper(
        "Ensembles, samples, data in parts",
        "Ashukha, Lyzhov, Molchanov and Vetrov: [Pitfalls of In-Domain Uncertainty Estimation and "
        "Ensembling](https://arxiv.org/abs/2002.06470), ICLR 2020, and what lectures on the subject teach: samplers, "
        "students of an ensemble, learning part by part, and which examples to label.",
        ("ensembles", "sg-mcmc", "distillation", "online", "active-learning"),
    ),
)  # fmt: skip


def substitutions(docs: Path) -> dict[str, str]:
    """Return what `{{ name }}` stands for in the pages."""
    columns = {
        "classification": CLASSES + STRANGE_CLASSES,
        "regression": VALUES + STRANGE_VALUES,
        "segmentation": PIXELS,
    }
    return {
        "methods": methods_table(docs),
        "experiments": experiments_table(docs),
        "coverage": coverage_tables(docs),
        "coverage_counts": coverage_counts(docs),
        "settings": settings_table(),
        "papers": papers(docs),
        "gallery": gallery(docs),
        "peers": peers_table(docs),
    } | {f"columns_{task}": columns_table(listed) for task, listed in columns.items()}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table in Markdown.

    >>> print(table(["a", "b"], [["1", "x | y"]]))
    | a | b |
    |---|---|
    | 1 | x \\| y |
    """
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [header, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def method_facts(docs: Path) -> dict[str, dict[str, str]]:
    """Return what methods.csv says about each method."""
    with (docs / "methods.csv").open(encoding="utf-8", newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def methods_table(docs: Path) -> str:
    """Return a line for each method. Names and descriptions are those of the table of methods."""
    known, measured = method_facts(docs), peers_rows(docs)
    rows = []
    for name, method in METHODS.items():
        if not str(method.fit).startswith("batchbayes."):
            continue  # a method of a page of this site
        facts = known[name]
        quality = _quality(facts, measured, docs)
        link = f"[`bb.{name}`](#batchbayes.{name})"
        rows.append([link, method.about, facts["layers"], facts["labels"], facts["training"], facts["passes"], quality])
    header = ["call", "what is random", "layers", "labels", "training", "passes of a prediction", "measured here"]
    return table(header, rows)


def _quality(facts: dict[str, str], measured: dict[str, dict[str, str]], docs: Path) -> str:
    found = measured.get(facts["row"], {})
    said = f"NLL {found['NLL']}, ECE {found['ECE']}" if found else ""
    page = facts["results"] if (docs / "results" / f"{facts['results']}.md").exists() else ""
    link = f"[{'more' if said else 'results'}](results/{page}.md)" if page else ""
    return "; ".join(filter(None, [said, link])) or "not measured"


def peers_rows(docs: Path) -> dict[str, dict[str, str]]:
    """Return the rows of the first table of the page on peers, by their first cell."""
    path = docs / "results" / f"{PEERS}.md"
    if not path.exists():
        return {}
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [[cell.strip().strip("*") for cell in line.strip("|").split("|")] for line in lines]
    header = cells[0]
    return {row[0]: dict(zip(header, row, strict=False)) for row in cells[2:] if len(row) == len(header)}


def peers_table(docs: Path) -> str:
    """Return the tables of the page on peers, without its other text."""
    path = docs / "results" / f"{PEERS}.md"
    if not path.exists():
        return NO_RUN
    groups = re.findall(r"(?:^\|.*\n)+", path.read_text(encoding="utf-8"), re.MULTILINE)
    more = f"[The page of the run](results/{PEERS}.md) has the command, the settings of each library and remarks."
    return "\n\n".join([*groups, more])


def experiments_table(docs: Path) -> str:
    """Return a line for each experiment, with its results if there are any."""
    rows = []
    for name, module in EXPERIMENTS.items():
        about = (import_module(module).__doc__ or "").strip().splitlines()[0]
        page = docs / "results" / f"{name}.md"
        rows.append(
            [f"`{name}`", about, f"[results](results/{name}.md)" if page.exists() else "no run is published yet"]
        )
    return table(["name", "what it repeats", ""], rows)


VERDICTS = {
    "agrees": "agree",
    "partly": "agree in part",
    "reduced": "are too much reduced to tell",
    "contradicts": "contradict the paper",
    "left out": "are left out",
}
"""What a row of coverage.csv may say, and how a sentence says it of several."""


def coverage_rows(docs: Path) -> list[dict[str, str]]:
    """Return a row for each table, figure and method of the papers."""
    with (docs / "coverage.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def coverage_counts(docs: Path) -> str:
    """Say in one sentence how many rows have each verdict."""
    found = [row["verdict"] for row in coverage_rows(docs)]
    counts = ", ".join(f"{found.count(verdict)} {said}" for verdict, said in VERDICTS.items())
    return f"Of {len(found)} tables, figures and methods of the papers: {counts}."


def coverage_tables(docs: Path) -> str:
    """Return a table for each paper."""
    rows, parts = coverage_rows(docs), []
    for paper in dict.fromkeys(row["paper"] for row in rows):
        cells = []
        for row in rows:
            if row["paper"] == paper:
                item = f"[{row['item']}](results/{row['page']}.md)" if row["page"] else row["item"]
                run = f" Run: {row['run'].removeprefix('batchbayes ').rpartition('/')[2]}." if row["run"] else ""
                cells.append([item, row["published"], row["ours"], f"**{row['verdict']}**", row["remark"] + run])
        parts.append(f"## {paper}\n\n" + table(["what", "published", "ours", "", "remark"], cells))
    return "\n\n".join(parts)


def gallery(docs: Path) -> str:
    """Return a card for each tutorial, and for each page of results that has a picture."""
    order = re.findall(r"^[\w-]+$", (docs / "tutorials/index.md").read_text(encoding="utf-8"), re.MULTILINE)
    tutorials = [
        _card(docs, f"tutorials/{name}.md", f"/_generated/tutorials-{name}.png")
        for name in order
        if (docs / f"tutorials/{name}.md").exists()
    ]
    results = [
        _card(docs, f"results/{path.name}", f"/{found[1]}")
        for path in sorted((docs / "results").glob("*.md"))
        if (found := re.search(r"!\[[^\]]*\]\(\.\./([^)]+)\)", path.read_text(encoding="utf-8")))
    ]
    return f"## Tutorials\n\n{_grid(tutorials)}\n\n## Papers and measurements\n\n{_grid(results)}"


def _card(docs: Path, page: str, picture: str) -> str:
    title = (docs / page).read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
    return f":::{{container}} card\n[![{title}]({picture})]({page})\n\n[{title}]({page})\n:::"


def _grid(cards: list[str]) -> str:
    return "\n".join(["::::{container} gallery", *cards, "::::"])


def papers(docs: Path) -> str:
    """Return a section for each paper: what it says of itself, and its pages, each with its first sentences."""
    parts = []
    for paper in PAPERS:
        rows = []
        for name in paper.pages:
            text = (docs / f"results/{name}.md").read_text(encoding="utf-8")
            rows.append([f"[{text.splitlines()[0].lstrip('# ')}](results/{name}.md)", _summary(text)])
        contents = "\n".join(f"results/{name}" for name in paper.pages)
        parts.append(
            f"## {paper.title}\n\n{paper.about}\n\n{table(['page', 'what was found'], rows)}\n\n"
            f"```{{toctree}}\n:hidden:\n:caption: {paper.title}\n\n{contents}\n```"
        )
    return "\n\n".join(parts)


def _summary(text: str) -> str:
    """Return the sentences below the first picture of a page."""
    below = re.search(r"!\[[^\]]*\]\([^)]+\)\n\n(.+?)\n\n", text, re.DOTALL)
    assert below, text[:80]
    return re.sub(r"\]\((?=[\w-]+\.md)", "](results/", " ".join(below[1].split()))


def settings_table() -> str:
    """Return the options of an assessment with their explanations."""
    rows = []
    for cls in (AssessOptions, Settings):
        for field in fields(cls):
            if field.metadata and field.name not in [row[0].strip("`") for row in rows]:
                help_text = field.metadata["help"]
                text = help_text() if callable(help_text) else help_text
                both = field.name in {each.name for each in fields(Settings)}
                rows.append([f"`{field.name}`", text.replace("%%", "%"), "both" if both else "command line"])
    return table(["option", "what it says", "where"], rows)


def columns_table(columns: Iterable[MetricColumn]) -> str:
    """Return the columns of the report's tables with their meaning."""
    better = {"lower": "lower", "higher": "higher", "target": "near its target"}
    return table(
        ["in metrics.json", "in the report", "better", "meaning"],
        [[f"`{column.key}`", column.label, better[column.better], column.meaning] for column in columns],
    )
