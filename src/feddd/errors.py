"""The one error that means "your input", not "our bug"."""


class InputError(ValueError):
    """Something given by the user is wrong; the message is one line that says what, where, and what would be right.

    The command line prints it as it is and exits with 2.
    """
