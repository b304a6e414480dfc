"""The ways in which a command ends with a sentence instead of a traceback."""

LONGEST_LINE = 4000


class UserError(Exception):
    """A mistake in the config, the data or the arguments: exit status 2.

    Its text is the one sentence the user reads: what, where, the rule, the remedy. The command prints it
    once, from one process. Further arguments are further lines.
    """

    def __str__(self) -> str:
        """All of its lines."""
        return "\n".join(map(str, self.args))


class RunError(Exception):
    """A run that cannot go on, through no mistake of the user's: exit status 1. Its text says what to do."""


class OneRankError(RunError):
    """A RunError of one rank, of which the others know nothing: it says so itself, and torchrun ends them."""


class InterruptionError(Exception):
    """A run that was asked to stop, on all ranks, and has saved its state and said so: exit status 1."""


def one_line(text: object) -> str:
    """A text as one line that a terminal, a log or a page can show: what cannot be seen is spelled out.

    Names of files and keys of foreign files may hold line breaks, escape sequences and bytes that are no UTF-8. Of a
    very long text the middle is left out.
    """
    line = "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in str(text)
    )
    half = LONGEST_LINE // 2
    return line if len(line) <= LONGEST_LINE else f"{line[:half]} ... {line[-half:]}"
