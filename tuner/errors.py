"""What a command line user did or has that stops a command: shown as one line, with exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UsageError(Exception):
    """Wrong input or an unfit environment. The message says what was wrong, what was expected and what to do."""


def unknown_name(kind: str, name: str, known: Iterable[str], hint: str = "") -> UsageError:
    """The error for a `name` that is none of `known`, with the nearest of them first."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    guess = f"did you mean {' or '.join(near)}? " if near else ""
    return UsageError(f"unknown {kind} {name!r}: {guess}known: {', '.join(names) or 'none'}{hint}")
