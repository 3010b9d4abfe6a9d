"""A variant of your own, complete: paged attention as a gather and torch's scaled_dot_product_attention.

    pagedtune check examples/out_of_tree_variant.py:SdpaGather --cases tiny

Replace `attend` by a call of your kernel. The gate hands it poisoned, strided and oddly sized tensors, and compares
`out` and `lse` with a float64 oracle. `kernels/slots.py` says what each named tensor holds.
"""

from functools import partial

import torch

from pagedtune.kernels.device import DeviceKind
from pagedtune.kernels.launch import CallStep, LaunchPlan
from pagedtune.kernels.pool_format import Layout, ScaleKind
from pagedtune.kernels.slots import attention_slots, batch_limits
from pagedtune.kernels.variant import Properties, Variant


class SdpaGather(Variant):
    """All of this is needed; tunables, numerics and a search space are optional."""

    name = "sdpa_gather"
    summary = "gathers each sequence, then torch's scaled_dot_product_attention in fp32"
    device_kind = DeviceKind.CPU
    properties = Properties(deterministic=True, batch_invariant=True)

    def reject(self, problem, pool_format, config, device):  # what it does not support: shown, never run
        if problem.soft_cap is not None or problem.sinks or problem.alibi:
            return "no soft cap, sinks or ALiBi"
        plain = pool_format.layout is not Layout.XPACKED and pool_format.scale_kind is ScaleKind.NONE
        return None if plain else "layouts nhd and hnd without scales only"

    def build(self, problem, pool_format, config, device):  # nothing to compile
        return ()

    def plan(self, problem, pool_format, config, bounds):
        step = CallStep(partial(attend, problem, pool_format))
        return LaunchPlan((step,), attention_slots(problem, pool_format), limits=batch_limits(bounds))


def attend(problem, pool_format, tensors):
    """One sequence at a time; `tensors` maps the names of the slots to tensors, `lse` may be absent."""
    starts, axes = tensors["query_start_loc"].tolist(), pool_format.k_axes
    for seq, context_len in enumerate(tensors["context_lens"].tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        q = tensors["q"][rows].float().transpose(0, 1)  # [num_q_heads, queries, head_dim]
        window = problem.window or context_len + 1
        keys = torch.arange(max(0, context_len - q.shape[1] - window + 1), context_len)  # all that a query sees
        block, slot = tensors["block_table"][seq, keys // pool_format.block_size], keys % pool_format.block_size
        pools = (tensors[n].movedim((axes.block, axes.slot), (0, 1)) for n in ("k_cache", "v_cache"))
        k, v = (pool[block, slot].float().transpose(0, 1) for pool in pools)  # [num_kv_heads, keys, dim]
        k, v = (x.repeat_interleave(problem.gqa_ratio, 0) for x in (k, v))
        age = torch.arange(context_len - q.shape[1], context_len)[:, None] - keys  # [queries, keys]
        seen = (age >= 0) & (age < window)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=problem.softmax_scale)
        tensors["out"][rows] = out.transpose(0, 1) if context_len else 0.0
        if "lse" in tensors:
            scores = (q @ k.transpose(1, 2) * problem.softmax_scale).masked_fill(~seen, -torch.inf)
            tensors["lse"][rows] = scores.logsumexp(-1).transpose(0, 1) if context_len else -torch.inf
