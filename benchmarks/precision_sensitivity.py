"""How much the scores of MCBN hinge on the precision tau of the observation noise, which is chosen by CRPS.

    python benchmarks/precision_sensitivity.py DATA_FOLDER

The network of each split is chosen by cross-validation at one batch size, as in `mcbn-passes`; then every tau is tried.
"""

import argparse
import warnings
from statistics import fmean

import torch
from batchbayes_papers.mcbn.methods import chosen_mcbn
from batchbayes_papers.mcbn.passes import PRESETS
from batchbayes_papers.mcbn.scores import crps, scores_of
from batchbayes_papers.mcbn.scores import tune_fold_precision as tune_precision
from batchbayes_papers.mcbn.splits import load_split

from batchbayes import BatchbayesWarning

FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)


def rows(dataset: str, split: int, folder: str) -> None:
    protocol = PRESETS["quick"].of(dataset)
    data = load_split(dataset, split, folder)
    _, folds, tests = chosen_mcbn(protocol, dataset, data, protocol.batch_sizes[0])
    best, _ = tune_precision(folds, limits=data.precisions)
    constant, _ = tune_precision([fold.constant() for fold in folds], limits=data.precisions)
    for factor in FACTORS:
        tau = best * factor
        held_out = fmean(float(crps(fold, tau).mean()) for fold in folds)
        scores = [scores_of(test, tau, constant) for test in tests]
        crps_norm, pll_norm = (fmean(run[name] for run in scores) for name in ("crps_norm", "pll_norm"))
        chosen = " (chosen)" if factor == 1 else ""
        print(f"| {dataset}, {split} | {tau:.3g}{chosen} | {held_out:.4g} | {crps_norm:.1f} | {pll_norm:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| data set, split | tau | CRPS of the folds left out | test CRPS, normalised | test PLL, normalised |")
    print("|---|---:|---:|---:|---:|")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BatchbayesWarning)
        for dataset in ("concrete", "yacht"):
            for split in (1, 2):
                rows(dataset, split, options.folder)


if __name__ == "__main__":
    main()
