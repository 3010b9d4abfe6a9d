"""Where the binaries of a variant come from: built in a source tree, shipped in an exported package."""

from __future__ import annotations

from typing import Protocol

from ..kernels.artifact import Artifact
from ..kernels.device import Device
from ..kernels.pool_format import PoolFormat
from ..kernels.problem import Problem
from ..kernels.variant import BuildError, Config, Variant
from .errors import PagedRuntimeError


class ArtifactUnavailable(PagedRuntimeError):
    """This source has no binary for the combination; the message says why. Dispatch goes on to its next choice."""


class ArtifactSource(Protocol):
    """Hands out the binaries that `Variant.plan` launches."""

    def artifacts(
        self, variant: Variant, problem: Problem, pool_format: PoolFormat, config: Config, device: Device
    ) -> tuple[Artifact, ...]:
        """The binaries; empty for a variant that needs none.

        Raises:
            ArtifactUnavailable: there are none here.
        """
        ...


class BuiltArtifacts:
    """Builds through `Variant.build`, or finds what an earlier build left in the cache. Needs a compiler."""

    def artifacts(
        self, variant: Variant, problem: Problem, pool_format: PoolFormat, config: Config, device: Device
    ) -> tuple[Artifact, ...]:
        """See `ArtifactSource.artifacts`."""
        try:
            return variant.build(problem, pool_format, config, device)
        except BuildError as error:
            raise ArtifactUnavailable(str(error)) from error
        except ModuleNotFoundError as error:  # an exported package has no builders
            raise ArtifactUnavailable(f"nothing can be built here: {error}") from error
