"""Why a command did not do what it was asked to."""


class CommandError(Exception):
    """The operation failed: `str()` is one sentence for the person at the terminal, who gets exit status 1."""


class UsageError(Exception):
    """The command was not used as it can be: one sentence, exit status 2."""
