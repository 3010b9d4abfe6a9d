"""Allocator, tables and ledger over random operations: see ledger_model.py. Faults planted here are found."""

from __future__ import annotations

import os
from functools import partial

import pytest

from .ledger_model import LedgerModel
from .machine import run

MODELS = [partial(LedgerModel, window) for window in (None, None, 2, 4, 7)]
SHARDS = 2  # so that a slow machine stays within the time limit of a test
OPERATIONS = int(os.environ.get("PAGEDTUNE_STATEFUL_OPS", "100000")) * 2 // 5  # the rest: the other machines


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_token_is_where_it_belongs_after_every_operation(shard: int) -> None:
    run(MODELS, OPERATIONS // SHARDS, shard * 1000)
