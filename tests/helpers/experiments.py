"""Run an experiment without a results file."""

import json
from typing import Any

import torch


def run_experiment(module: Any, config: Any) -> dict[str, Any]:
    """Do all units one after another on one thread. Convert their results to JSON and back, as a results file does."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for unit in module.units(config):
        needed = {name: results[name] for name in unit.needs}
        results[unit.name] = json.loads(json.dumps(module.work(config, unit, needed, None)))
    return results
