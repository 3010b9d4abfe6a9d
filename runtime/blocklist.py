"""Switching variants off without a new release: a file that names them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

BLOCKLIST_VARIABLE = "PAGEDTUNE_BLOCKLIST"  # path of a blocklist file
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Blocklist:
    """Variants that must not run.

    Args:
        names: names of variants.
        source: where they were read, for messages.
    """

    names: frozenset[str] = frozenset()
    source: str = "the blocklist"

    @classmethod
    def read(cls, path: Path) -> Blocklist:
        """The names in a file: one a line; `#` starts a comment.

        Raises:
            ValueError: the file cannot be read, or a line is no name.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"blocklist {path} cannot be read: {error}. Mend the path, or unset it") from error
        names = set()
        for number, line in enumerate(lines, 1):
            text = line.partition("#")[0].strip()
            if text and not _NAME.fullmatch(text):
                raise ValueError(f"{path}:{number}: {text!r} is no variant's name: write one a line, such as cpu_split")
            if text:
                names.add(text)
        return cls(frozenset(names), str(path))

    @classmethod
    def from_environment(cls) -> Blocklist:
        """The file that `$PAGEDTUNE_BLOCKLIST` names; empty where the variable is not set.

        Raises:
            ValueError: as for `read`.
        """
        path = os.environ.get(BLOCKLIST_VARIABLE)
        return cls.read(Path(path)) if path else cls()
