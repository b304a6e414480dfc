"""The two ways in which a command ends with a sentence instead of a traceback."""


def in_one_line(text: object) -> str:
    """A name or a text from elsewhere as a sentence may hold it: no line ends, nothing that a terminal obeys."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in str(text))


class UserError(Exception):
    """A mistake in the config, the data or the arguments: exit status 2.

    Its text is the one sentence the user reads: what, where, the rule, the remedy. The command prints it
    once, from one process.
    """


class RunError(Exception):
    """A run that cannot go on, through no mistake of the user's: exit status 1. Its text says what to do."""
