"""The names of classes as numbers."""

from collections.abc import Iterable, Sequence

from batchbayes.errors import BatchbayesError, unknown_name


def class_numbers(found: Iterable[str], class_names: Sequence[str], where: str) -> list[int]:
    """Return the number of each name. Names that training did not have are refused.

    >>> class_numbers(["dog", "cat", "dog"], ("cat", "dog"), "t.csv")
    [1, 0, 1]
    """
    number = {name: label for label, name in enumerate(class_names)}
    if len(number) < len(class_names):
        twice = next(name for label, name in enumerate(class_names) if number[name] != label)
        raise BatchbayesError(
            expected=f"different names of classes for {where}", got=f"{twice} more than once", fix="rename one class"
        )
    labels = []
    for name in found:
        if name not in number:
            raise unknown_name(f"classes of training in {where}", name, class_names)
        labels.append(number[name])
    return labels
