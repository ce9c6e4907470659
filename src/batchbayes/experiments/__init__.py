"""The experiments of `batchbayes reproduce`. Each one is a module as `batchbayes.reproduce.experiment` describes it."""
