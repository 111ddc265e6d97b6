"""The errors that are no bugs: wrong input, and runs that cannot go on."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something given by the user is wrong; the message is one line that says what, where, and what would be right.

    The command line prints it as it is and exits with 2.
    """


class RunError(RuntimeError):
    """A run cannot go on, through no fault of its input; the message is one line. Exit code 1."""


def nearest(given: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return a hint for a wrong name: the closest right one, else all of them, or what is said instead of so many."""
    names = list(known)
    close = difflib.get_close_matches(given, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return otherwise or f"known are {', '.join(names)}"
