"""The one exception for mistakes a user can mend."""


class UserError(Exception):
    """A mistake of the user's: one line that names the field or file:line, and the mend.

    The command line prints it without a traceback and exits with code 2.
    """
