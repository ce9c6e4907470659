"""Numbers as text, for verdicts, captions and messages."""


def percent(share: float, digits: int = 1) -> str:
    """Format a share from 0 to 1 in percent.

    >>> percent(0.9273), percent(0.1, 0)
    ('92.7 %', '10 %')
    """
    return f"{100 * share:.{digits}f} %"


def number(value: float) -> str:
    """Format a number with three significant digits and without an exponent.

    >>> number(0.012345), number(1234.5), number(2.0)
    ('0.0123', '1234', '2.00')
    """
    text = f"{value:#.3g}"
    return f"{value:.0f}" if abs(value) >= 100 or "e" in text else text


def count(amount: int, noun: str) -> str:
    """Format a number of things, with the noun in the singular or plural.

    >>> count(1, "example"), count(2000, "example")
    ('1 example', '2,000 examples')
    """
    return f"{amount:,} {noun}" + ("" if amount == 1 else "s")
