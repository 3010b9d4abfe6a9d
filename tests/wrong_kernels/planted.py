"""Planted faults: kernels that are wrong in one known way, for the gate to refuse.

Each source fault is one edit of the real C++ kernel, so the planted kernels go the whole way of the real one: build,
plan, bind, launch. An edit whose text no longer occurs in the source is an error, not a fault that counts as caught.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pagedtune.harness.case import Case
from pagedtune.harness.verdicts import Check
from pagedtune.kernels.artifact import Artifact, cache_dir, content_key, publish
from pagedtune.kernels.build_native import build_library
from pagedtune.kernels.cpu_split import ABI, CpuSplit, defines
from pagedtune.kernels.device import Device
from pagedtune.kernels.native_args import SOURCE_DIR
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Config, Variant

ATTENTION = "attention_impl.h"
HOST = "attention.cpp"


@dataclass(frozen=True)
class Edit:
    """One replacement in a source file; `old` must occur there exactly once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Planted:
    """A fault and what must become of it.

    Args:
        name: what is wrong, in a few words.
        source: where such a fault was seen, as numbered in the list of public bugs, or what class it is of.
        edits: the change of the kernel.
        expected: the checks that may refuse it; any other reason fails the test.
        where: which cases of the gate's corner level reach the fault.
        num_splits: `num_splits` of the config it runs with.
    """

    name: str
    source: str
    edits: tuple[Edit, ...]
    expected: tuple[Check, ...]
    where: Callable[[Case], bool] = lambda case: True
    num_splits: int = 1

    def variant(self) -> Variant:
        """The wrong kernel, under the real one's declarations."""
        return MutatedSplit(self)

    def config(self, case: Case) -> Config:
        """A config that reaches the fault. Splits are short, so that small contexts have several."""
        base = CpuSplit().config_from({"num_splits": self.num_splits, "split_tokens": 16, "tile_tokens": 16})
        return dataclasses.replace(base, prefetch_tokens=0)


class MutatedSplit(CpuSplit):
    """`cpu_split` with one edit."""

    def __init__(self, fault: Planted) -> None:
        self._fault = fault

    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        """Builds the edited source, without the optimisation that only speed needs."""
        folder = mutated_sources(self._fault.edits)
        headers = sorted(folder.glob("*.h"))
        return (build_library(folder / HOST, headers, defines(problem, pool_format), ABI, optimise=1),)


def mutated_sources(edits: tuple[Edit, ...]) -> Path:
    """A folder with the kernel's sources, edited."""
    texts = {path.name: path.read_text() for path in SOURCE_DIR.iterdir() if path.suffix in (".h", ".cpp")}
    for edit in edits:
        count = texts[edit.file].count(edit.old)
        if count != 1:
            raise ValueError(f"the text to edit occurs {count} times in {edit.file}, expected once: {edit.old!r}")
        texts[edit.file] = texts[edit.file].replace(edit.old, edit.new)
    folder = cache_dir() / "planted" / content_key(texts)
    for name, text in texts.items():
        if not (folder / name).exists():
            publish(text.encode(), folder / name)
    return folder
