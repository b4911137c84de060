"""Errors that a user caused or can mend: one sentence that names the place and the fix."""

from __future__ import annotations


class UserError(Exception):
    """Shown as one sentence without a traceback; the process exits with `code`."""

    code = 1
    told_by_main = False  # of several processes all raise it, and the first one tells


class UsageError(UserError):
    """A wrong command line, config or prompt file: nothing has been loaded or written yet."""

    code = 2
