"""Results as they come: one line of JSON each, on disk before the next begins."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedtune.kernels.artifact import publish
from pagedtune.kernels.serial import to_jsonable


@dataclass(frozen=True)
class Journal:
    """The files of one day.

    Args:
        folder: where they are kept.
        run: which day, part of every line.
        evidence: `on-device`, or `emulated` for a dry run; part of every line.
    """

    folder: Path
    run: str
    evidence: str

    @property
    def dry(self) -> bool:
        """Whether nothing here comes from silicon."""
        return self.evidence == "emulated"

    def add(self, stage: str, **fields: Any) -> None:
        """Appends a line to the stage's file.

        Raises:
            OSError: the folder cannot be written.
        """
        head = {
            "run": self.run,
            "evidence": self.evidence,
            **({"dry": "DRY: nothing here was measured"} if self.dry else {}),
        }
        line = {**head, "stage": stage, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **fields}
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{stage}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(to_jsonable(line)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def lines(self, stage: str) -> list[dict[str, Any]]:
        """The lines of this day; a half-written one is left out."""
        return list(self._lines(self.folder / f"{stage}.jsonl"))

    def _lines(self, path: Path) -> Iterator[dict[str, Any]]:
        if not path.exists():
            return
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if line.get("run") == self.run:
                yield line

    def write_summary(self, text: str) -> Path:
        """Writes the summary of this day."""
        path = self.folder / "summary.txt"
        publish(text.encode(), path)
        return path
