"""What attention a transformers model asks for, found out by running one token through it.

A config says what its authors thought of, in fields that differ by model. The attention interface says what each
layer really passes: heads, scale, window, soft cap, sinks, and the mask function that would be applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ...kernels.dtypes import DType
from ...kernels.problem import Problem
from ..errors import PagedRuntimeError

MaskFunction = Callable[[int, int, Any, Any], Any]  # (batch, head, query position, key position) -> visible
# Query positions at which masks are compared: the start, and far beyond any window or chunk in use.
_PROBED_QUERIES = (0, 1, 1000, 200_000)
_MASK = "pagedtune_mask_function"  # attribute of the stand-in for a mask
# Arguments that models pass along and that change nothing for causal attention over positions given as such.
_HARMLESS = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
)


class UnsupportedModel(PagedRuntimeError, ValueError):
    """The model needs attention that the paged cache does not serve; the message says what and in which layer."""


class Attend(Protocol):
    """What stands behind the attention function during one forward pass."""

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: dict[str, Any]
    ) -> torch.Tensor:
        """[1, tokens, num_q_heads, head_dim_v] from query, key and value [1, heads, tokens, head_dim]."""
        ...


@dataclass(frozen=True, eq=False)
class LayerCall:
    """What one layer passed to the attention interface.

    Args:
        q, k, v: shapes [batch, heads, tokens, head_dim].
        dtype: of the query.
        scale, window, soft_cap, is_causal: as passed, None where absent.
        sinks: the layer's sink logits, [num_q_heads].
        mask: the mask that its model made for it, None where it made none.
        extra: names of other arguments that are neither None nor known to be harmless.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    dtype: torch.dtype
    scale: float | None
    window: int | None
    soft_cap: float | None
    is_causal: bool
    sinks: torch.Tensor | None
    mask: MaskFunction | None
    extra: tuple[str, ...] = ()

    def problem(self) -> Problem:
        """The attention problem of this layer.

        Raises:
            ValueError: no problem can be like that.
        """
        head_dim = self.q[3]
        default = self.scale is None or self.scale == head_dim**-0.5
        return Problem(
            num_q_heads=self.q[1],
            num_kv_heads=self.k[1],
            head_dim=head_dim,
            head_dim_v=self.v[3],
            q_dtype=DType.of(self.dtype),
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=self.sinks is not None,
            scale=None if default else self.scale,
        )


def problems_of(calls: Mapping[int, LayerCall], num_layers: int) -> tuple[Problem, ...]:
    """The problem of each layer.

    Raises:
        UnsupportedModel: a layer does not use the attention interface, is not causal, hides or shows other keys than
            its window says, or differs from the others in what it stores.
    """
    if sorted(calls) != list(range(num_layers)):
        silent = sorted(set(range(num_layers)) - set(calls)) or sorted(calls)
        raise UnsupportedModel(
            f"layers {_short(silent)} of {num_layers} do not attend through the attention interface once each: only "
            "models whose every layer does can run on a paged cache"
        )
    problems = []
    for index in range(num_layers):
        call = calls[index]
        _require_plain(index, call)
        try:
            problems.append(call.problem())
        except ValueError as error:
            raise UnsupportedModel(f"layer {index}: {error}") from error
    stored = {(p.num_q_heads, p.num_kv_heads, p.head_dim, p.head_dim_v, p.q_dtype) for p in problems}
    if len(stored) > 1:
        raise UnsupportedModel(f"layers have {len(stored)} kinds of heads, head dims and dtype: a pool holds one")
    return tuple(problems)


def base_problem(problems: Iterable[Problem]) -> Problem:
    """What all layers have in common: heads, dims and dtype, which shape the pool."""
    first = next(iter(problems))
    return replace(first, window=None, soft_cap=None, sinks=False, scale=None)


def _require_plain(index: int, call: LayerCall) -> None:
    if not call.is_causal:
        raise UnsupportedModel(f"layer {index} attends in both directions: only causal attention runs on a paged cache")
    if call.extra:
        raise UnsupportedModel(f"layer {index} passes {', '.join(call.extra)} to its attention, which no kernel takes")
    if call.mask is not None and not _is_causal_window(call.mask, call.window):
        seen = "all earlier keys" if call.window is None else f"the last {call.window} keys"
        raise UnsupportedModel(
            f"layer {index} attends in a pattern other than {seen} (chunked, prefix or block-wise attention): the "
            "kernels serve full and sliding-window causal attention only"
        )


def _is_causal_window(mask: MaskFunction, window: int | None) -> bool:
    """Whether a mask shows exactly the keys `max(0, i - window + 1)` to `i`, at probed places."""
    for query in _PROBED_QUERIES:
        low = 0 if window is None else max(0, query - window + 1)
        for key in {0, 1, low - 1, low, query // 2, query - 1, query, query + 1}:
            if key >= 0 and _evaluate(mask, query, key) != (low <= key <= query):
                return False
    return True


def _evaluate(mask: MaskFunction, query: int, key: int) -> bool | None:
    """None where the mask depends on the batch at hand, so that it cannot be asked about other positions."""
    try:
        return bool(mask(0, 0, torch.tensor(query), torch.tensor(key)))
    except (IndexError, RuntimeError, TypeError):
        return None


def _short(values: list[int]) -> str:
    shown = ", ".join(map(str, values[:5]))
    return f"{shown}, ..." if len(values) > 5 else shown


def mask_stand_in(*_: Any, mask_function: MaskFunction | None = None, **__: Any) -> torch.Tensor:
    """Stands in for a mask: it has no element, and remembers what it would have shown."""
    carrier = torch.empty((1, 1, 0, 0))
    setattr(carrier, _MASK, mask_function)
    return carrier


def recorder(calls: dict[int, LayerCall]) -> Attend:
    """Notes in `calls` what each layer passes, and gives zeros back."""

    def record(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: dict[str, Any]
    ) -> torch.Tensor:
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in calls:
            raise UnsupportedModel(f"{type(module).__name__} attends without a layer number of its own ({index})")
        calls[index] = _layer_call(module, query, key, value, dict(call))
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))

    return record


def _layer_call(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: dict[str, Any]
) -> LayerCall:
    mask, is_causal = call.pop("attention_mask"), call.pop("is_causal", None)
    if mask is not None and not hasattr(mask, _MASK):
        raise UnsupportedModel(f"{type(module).__name__} makes a mask of its own: only those of transformers are known")
    known = {name: call.pop(name, None) for name in ("scaling", "sliding_window", "softcap", "s_aux", "dropout")}
    extra = sorted(n for n, v in call.items() if n not in _HARMLESS and v is not None and v is not False)
    if known["dropout"]:
        extra.append("dropout")
    return LayerCall(
        q=tuple(query.shape),
        k=tuple(key.shape),
        v=tuple(value.shape),
        dtype=query.dtype,
        scale=known["scaling"],
        window=known["sliding_window"],
        soft_cap=known["softcap"],
        is_causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        sinks=known["s_aux"],
        mask=getattr(mask, _MASK, None),
        extra=tuple(extra),
    )
