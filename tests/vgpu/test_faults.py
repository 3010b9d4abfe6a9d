"""Every faulty kernel is caught at its line under every schedule, and its corrected twin is clean: prints the table."""

from __future__ import annotations

import faulty_control
import faulty_copies
import faulty_global
import faulty_memory
import faulty_order
import faulty_shared
import faulty_warp
import pytest
from vgpu_pairs import Pair, check_pair

from pagedtune.harness.vgpu.report import FaultKind

TOPICS = (faulty_memory, faulty_shared, faulty_global, faulty_order, faulty_copies, faulty_control, faulty_warp)
PAIRS: dict[str, Pair] = {name: pair for topic in TOPICS for name, pair in topic.PAIRS.items()}
# Needs two launches: test_programmatic_launch.py.
ELSEWHERE = {FaultKind.PROGRAMMATIC_ORDER}


@pytest.mark.parametrize("name", PAIRS)
def test_fault_is_found_at_its_line_and_the_twin_is_clean(name: str) -> None:
    print(f"{name}: {check_pair(PAIRS[name])}")


def test_every_kind_of_fault_has_a_faulty_kernel() -> None:
    kinds: dict[FaultKind, list[str]] = {kind: [] for kind in FaultKind}
    for name, pair in PAIRS.items():
        kinds[pair.kind].append(name)
    for kind, names in kinds.items():
        for name in names:
            print(f"{kind.name.lower():22s} {name}")
    print(f"{len(PAIRS)} faulty kernels")
    assert sum(len(topic.PAIRS) for topic in TOPICS) == len(PAIRS), "a name occurs twice"
    assert len(PAIRS) >= 25
    assert {kind for kind, names in kinds.items() if not names} <= ELSEWHERE
