"""The one exception for mistakes a user can mend."""

_LONGEST = 2000  # characters of a line; what is beyond was some file's, and nobody reads it


class UserError(Exception):
    """A mistake of the user's: one line that names the field or file:line, and the mend; or several, each with its own.

    The command line prints it without a traceback and exits with code 2.
    """

    def __str__(self) -> str:
        return "\n".join(one_line(str(fault)) for fault in self.args)


def one_line(text: str) -> str:
    """A text that may quote a stranger's file, as one line of signs that a terminal shows and does not obey."""
    shown = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text[:_LONGEST])
    return shown if len(text) <= _LONGEST else f"{shown} ..."
