"""What timing tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagedtune.harness import count_run


@pytest.fixture(scope="module")
def own_counts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Counts are kept in a folder of these tests."""
    folder = tmp_path_factory.mktemp("counts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(count_run, "cache_dir", lambda: folder)
        yield
