"""scikit-learn estimators that say how sure they are: `UncertainRegressor` and `UncertainClassifier`.

`UncertainOutputs` is for several targets, and `pipeline` for steps before an estimator.
"""

try:
    from batchbayes.sklearn.around import UncertainOutputs, UncertainPipeline, pipeline
    from batchbayes.sklearn.classifier import UncertainClassifier
    from batchbayes.sklearn.regressor import UncertainRegressor
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "sklearn":
        raise
    from batchbayes._common.checks import install_command

    raise ModuleNotFoundError(
        "expected scikit-learn for the estimators of batchbayes.sklearn; got no sklearn. Do this: "
        f"{install_command('sklearn')}.",
        name=error.name,
    ) from error

__all__ = ["UncertainClassifier", "UncertainOutputs", "UncertainPipeline", "UncertainRegressor", "pipeline"]
