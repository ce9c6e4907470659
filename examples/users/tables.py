"""A data scientist: a pandas table, a network in torch, a report for the boss, and new rows from another system.

python -m examples.users.tables FOLDER
"""

import io
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pandas as pd
import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from torch import nn

from batchbayes.cli import main as batchbayes


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))


def main(folder: Path) -> None:
    table = load_diabetes(as_frame=True, scaled=False).frame
    table.insert(0, "patient", [f"P{i:03}" for i in range(len(table))])
    train, test = train_test_split(table, test_size=0.4, random_state=0)
    train.to_csv(folder / "train.csv", index=False)
    test.to_csv(folder / "test.csv", index=False)

    rows, target = train.drop(columns=["patient", "target"]), train["target"]
    inputs = torch.tensor(((rows - rows.mean()) / rows.std(ddof=0)).to_numpy()).float()
    torch.manual_seed(0)
    model = network()
    answer = torch.tensor(target.to_numpy()).float()[:, None]
    adam = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(40):
        for batch in torch.randperm(len(inputs)).split(32):
            adam.zero_grad()
            nn.functional.mse_loss(model(inputs[batch]), answer[batch]).backward()
            adam.step()
    torch.save(model.state_dict(), folder / "model.pt")

    model_options = ["--model", "examples.users.tables:network", "--weights", str(folder / "model.pt")]
    files = ["--train", str(folder / "train.csv"), "--test", str(folder / "test.csv"), "--target", "target"]
    more = ["--id", "patient", "--standardise", "--batch-size", "32", "--draws", "16", "--quiet"]
    assert batchbayes(["assess", *model_options, *files, *more, "--out", str(folder / "report")]) == 0
    told = pd.read_csv(folder / "report" / "predictions.csv")

    # The other system has its columns in another order, one more of them, and no target.
    new = test[["age", *[c for c in test.columns[::-1] if c not in ("age", "target")]]].assign(clinic="north")
    new.to_csv(folder / "new.csv", index=False)
    printed = io.StringIO()
    with redirect_stdout(printed):
        posterior = ["--posterior", str(folder / "report" / "posterior.safetensors")]
        assert batchbayes(["predict", *model_options, *posterior, "--input", str(folder / "new.csv"), "--quiet"]) == 0
    answered = pd.read_csv(io.StringIO(printed.getvalue())).set_index("id")
    same = answered.loc[told["id"]].reset_index()
    columns = ["mean", "std", "lower", "upper"]
    pd.testing.assert_frame_equal(same[columns], told[columns], rtol=1e-5)

    inside = (told["lower"] <= told["target"]) & (told["target"] <= told["upper"])
    print(f"{inside.mean():.0%} of {len(told)} patients are inside their 90 % interval")
    assert 0.8 < inside.mean() <= 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
