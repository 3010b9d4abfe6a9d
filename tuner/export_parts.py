"""What an export builds, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass

from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Config, Variant
from pagedtune.runtime.exported.manifest import Binary, Fallback, Library


@dataclass(frozen=True)
class Wanted:
    """One combination that must run from the package."""

    variant: Variant
    problem: Problem
    pool_format: PoolFormat
    config: Config

    @property
    def binary(self) -> tuple[str, str]:
        """What it needs, by variant and `Variant.binary_id`."""
        return self.variant.name, self.variant.binary_id(self.problem, self.pool_format, self.config)


@dataclass(frozen=True)
class Binaries:
    """All native code of a package.

    Args:
        contents: of each library, by its path in the package.
        libraries, binaries, host_only, fallbacks: see `Manifest`.
        isa: the widest vector path that a config asks for by name.
        glibc: the newest symbol version that a library needs.
        driver: for a GPU, the oldest driver that takes all binaries.
    """

    contents: dict[str, bytes]
    libraries: tuple[Library, ...]
    binaries: tuple[Binary, ...]
    host_only: tuple[str, ...]
    isa: str
    glibc: str
    driver: str = ""
    fallbacks: tuple[Fallback, ...] = ()
