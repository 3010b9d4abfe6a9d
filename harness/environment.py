"""What a later reader needs to judge a time: versions, machine, and its state."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedtune.harness.contention import CpuUse
from pagedtune.kernels.build_native import find_compiler
from pagedtune.kernels.cpu_facts import cpu_info, product_name, read_text, usable_cores
from pagedtune.kernels.memory import huge_page_mode
from pagedtune.kernels.variant import BuildError

_CPUFREQ = Path("/sys/devices/system/cpu/cpu0/cpufreq")


def environment() -> dict[str, Any]:
    """Facts by name, as plain JSON; what the system does not tell is left out.

    `load_1min` and `clock_mhz` are of this moment, everything else holds for the process.
    """
    info = cpu_info()
    facts: dict[str, Any] = {
        "pagedtune": _package_version("pagedtune"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "compiler": _compiler(),
        "system": f"{platform.system()} {platform.release()}",
        "libc": " ".join(platform.libc_ver()).strip(),
        "cpu": product_name(info),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "virtual_machine": "hypervisor" in info.get("flags", "").split(),
        "huge_pages": huge_page_mode(),
        "governor": read_text(_CPUFREQ / "scaling_governor").strip(),
        "clock_mhz": _clock_mhz(info.get("cpu MHz", "")),
        "load_1min": round(os.getloadavg()[0], 2),
        **_git_state(Path(__file__).resolve().parents[1]),
    }
    return {name: value for name, value in facts.items() if value not in ("", None)}


def foreign_load(before: CpuUse) -> float:
    """Share of the usable cores' time that other processes have used since `before`, in [0, 1]."""
    return round(before.foreign_share(CpuUse.now(), usable_cores()), 3)


def _package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # run from a tree that is not installed
        return None


def _compiler() -> str:
    try:
        return find_compiler().version
    except BuildError as error:
        return f"none: {error}"


def _clock_mhz(text: str) -> float | None:
    try:
        return round(float(text), 1)
    except ValueError:
        return None


def _git_state(root: Path) -> dict[str, Any]:
    """`revision` and `dirty` of the checkout that this code runs from; nothing for an installed package."""
    if not (root / ".git").exists():
        return {}
    revision = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain")
    return {} if revision is None else {"revision": revision, "dirty": status is None or bool(status)}


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
