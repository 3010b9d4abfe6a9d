"""Settings that every test of a real model needs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Before transformers is imported: no test may reach for a network.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Models this small gain nothing from threads, and lose much by waiting for them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
