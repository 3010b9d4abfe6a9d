"""Decode kernels of other projects as their wheels ship them, launched as their own host code does, on the virtual GPU.

Facts of those projects that their kernels depend on are stated beside their source; none of their code is here.
"""

from __future__ import annotations

from . import emulated_sglang, emulated_vllm
from .emulated_flashinfer import FlashInferPeer
from .emulated_peer import Peer

PEERS: tuple[Peer, ...] = (
    emulated_vllm.UNIFIED_PEER, emulated_vllm.DECODE_PEER, emulated_sglang.DECODE_PEER, FlashInferPeer(),
)  # fmt: skip
