"""The records of one device: an append-only file of JSON lines that survives being killed at any moment."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pagedtune.kernels.record import SCHEMA_VERSION, Record
from pagedtune.kernels.serial import from_jsonable, to_jsonable

from .errors import UsageError

FILE_NAME = "records.jsonl"


@dataclass(frozen=True)
class Loaded:
    """What a records file holds.

    Args:
        records: in file order.
        good_bytes: length of the part that holds them.
        torn: what follows it: the unfinished last write of a process that was killed.
        needs_newline: the last record is whole but for its line end.
    """

    records: tuple[Record, ...]
    good_bytes: int
    torn: bytes
    needs_newline: bool = False


def read_records(folder: Path) -> tuple[Record, ...]:
    """The records in `folder`, without what an unfinished last write left; empty if there is no file.

    Raises:
        UsageError: a damaged line, or records of a newer version.
    """
    path = folder / FILE_NAME
    try:
        return _load(path, path.read_bytes()).records if path.exists() else ()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error


def _load(path: Path, data: bytes) -> Loaded:
    """Splits a file into whole records and a torn tail."""
    records: list[Record] = []
    lines = data.split(b"\n")
    ends: list[int] = []
    position = 0
    for number, line in enumerate(lines, 1):
        is_last = number == len(lines) or (number == len(lines) - 1 and not lines[-1])
        if not line and is_last:
            break
        record = _parse(path, number, line, is_last)
        if record is None:
            break
        records.append(record)
        position += len(line) + 1
        ends.append(min(position, len(data)))
    whole = len(records) - _unfinished_group(records)
    good = ends[whole - 1] if whole else 0
    return Loaded(tuple(records[:whole]), good, data[good:], whole > 0 and data[good - 1 : good] != b"\n")


def _parse(path: Path, number: int, line: bytes, is_last: bool) -> Record | None:
    """The record of one line; None for a last line that is cut off."""
    try:
        data = json.loads(line)
    except ValueError as error:
        if is_last:
            return None
        raise UsageError(
            f"{path}:{number}: damaged line (not JSON); a killed run damages only the last line, so something else "
            "wrote here: delete that line, or start anew with --fresh"
        ) from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if isinstance(schema, int) and schema > SCHEMA_VERSION:
        raise UsageError(
            f"{path}:{number}: written by a newer pagedtune (schema {schema}, this one reads up to {SCHEMA_VERSION}): "
            "upgrade pagedtune, or use another folder with --results"
        )
    try:
        return from_jsonable(Record, data)
    except ValueError as error:
        raise UsageError(f"{path}:{number}: not a record: {error}; delete that line, or start with --fresh") from error


def _unfinished_group(records: Sequence[Record]) -> int:
    """How many records at the end belong to a group of which the last members are missing."""
    if not records or "group" not in records[-1].provenance:
        return 0
    group = records[-1].provenance["group"]
    present = 0
    for record in reversed(records):
        if record.provenance.get("group") != group:
            break
        present += 1
    return 0 if present == records[-1].provenance["group_size"] else present


class Store:
    """The records file of one folder, locked for one writer. Made by `open_store`."""

    # `records` holds all, oldest first; the first `num_loaded` were there when it was opened.

    def __init__(self, folder: Path, records: Sequence[Record], notes: Sequence[str]) -> None:
        self.path = folder / FILE_NAME
        self.records = list(records)
        self.notes = tuple(notes)
        self.num_loaded = len(self.records)
        self._last_time = max((r.recorded_at for r in records), default="")

    def append(self, *records: Record) -> tuple[Record, ...]:
        """Writes records that stand alone and returns them with their time; on disk when this returns."""
        return self._write(records)

    def append_group(self, records: Sequence[Record], group: str) -> tuple[Record, ...]:
        """Writes records that only mean something together: a killed process leaves all of them or none."""
        marks = ({"group": group, "group_size": len(records), "group_index": i} for i in range(len(records)))
        return self._write([replace(r, provenance={**r.provenance, **m}) for r, m in zip(records, marks, strict=True)])

    def _write(self, records: Sequence[Record]) -> tuple[Record, ...]:
        stamped = tuple(replace(record, recorded_at=self._next_time()) for record in records)
        lines = "".join(json.dumps(to_jsonable(r), separators=(",", ":"), allow_nan=False) + "\n" for r in stamped)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            _write_all(descriptor, lines.encode())
            os.fsync(descriptor)
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be written: {error.strerror}; free space and run again") from error
        finally:
            os.close(descriptor)
        self.records += stamped
        return stamped

    def _next_time(self) -> str:
        """UTC now, but later than every record before: their order then does not depend on the file's."""
        now = datetime.now(UTC)
        if self._last_time and now <= (last := datetime.fromisoformat(self._last_time)):
            now = last + timedelta(microseconds=1)
        self._last_time = now.isoformat(timespec="microseconds")
        return self._last_time


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


@contextlib.contextmanager
def open_store(folder: Path, fresh: bool = False) -> Iterator[Store]:
    """The store in `folder`, created if need be; nobody else can open it meanwhile.

    Args:
        folder: e.g. `results/cpu`.
        fresh: set the records found there aside and start without any.

    Raises:
        UsageError: the folder cannot be written, another process has it, or its records cannot be read.
    """
    lock = _lock(folder)
    try:
        path = folder / FILE_NAME
        notes = _set_aside(path) if fresh else []
        loaded = _load(path, path.read_bytes()) if path.exists() else Loaded((), 0, b"")
        notes += _repair(path, loaded)
        yield Store(folder, loaded.records, notes)
    finally:
        lock.release()


def require_usable(folder: Path, fresh: bool = False) -> None:
    """Raises the UsageError that `open_store` would raise; changes no record."""
    lock = _lock(folder)
    try:
        if not fresh:
            read_records(folder)
    finally:
        lock.release()


def _lock(folder: Path) -> FileLock:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire(timeout=0)
        # A lock file may already be there in a folder that has become read-only.
        with open(folder / FILE_NAME, "ab"):
            pass
    except Timeout as error:
        raise UsageError(
            f"{folder} is in use by another tune: wait for it, or use another folder with --results"
        ) from error
    except OSError as error:
        raise UsageError(
            f"results folder {folder} cannot be written: {error.strerror}; choose another with --results"
        ) from error
    return lock


def _set_aside(path: Path) -> list[str]:
    if not path.exists() or not path.stat().st_size:
        return []
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    target = path.with_name(f"records-until-{stamp}.jsonl")
    path.rename(target)
    return [f"earlier records kept in {target}"]


def _repair(path: Path, loaded: Loaded) -> list[str]:
    """Cuts off a torn tail, which is kept beside the file; returns what to tell the user."""
    if loaded.needs_newline:
        with open(path, "ab") as file:
            file.write(b"\n")
    if not loaded.torn:
        return []
    aside = path.with_name(f"{FILE_NAME}.torn")
    with open(aside, "ab") as file:
        file.write(loaded.torn.rstrip(b"\n") + b"\n")
    os.truncate(path, loaded.good_bytes)
    return [f"an earlier run was stopped while writing: its unfinished last entry was moved to {aside}"]


def canonical(record: Record) -> str:
    """One text per content: for comparing and ordering records."""
    data: Any = to_jsonable(record)
    return json.dumps(data, sort_keys=True, separators=(",", ":"))
