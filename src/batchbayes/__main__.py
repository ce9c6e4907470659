"""`python -m batchbayes` is the command `batchbayes`."""

from batchbayes.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
