"""Where the real data sets and public weights are, if they are there: BATCHBAYES_DATA, or beside the checkout."""

import os
from pathlib import Path

_BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"
FOLDER = next((p for p in (Path(os.environ.get("BATCHBAYES_DATA", _BESIDE)),) if p.is_dir()), None)
REASON = "needs the real data sets and weights: set BATCHBAYES_DATA to their folder"
