"""Runs an unmodified causal language model of transformers (5.x) on a paged KV cache.

All query tokens of a step, of whatever sequences, go through the model as one row with their positions; only attention
tells the sequences apart, and that runs on the pool. No cache object and no mask of transformers is involved.
"""

from __future__ import annotations

import weakref
from time import perf_counter_ns
from types import TracebackType
from typing import Any

import torch

from ...kernels.pool_format import PoolFormat
from ...kernels.problem import Problem
from ..attention import PagedAttention, Workspaces
from ..dispatch import Dispatch
from ..errors import CacheInUse, PagedRuntimeError
from ..kv_cache import KVCache
from ..launch_group import LayerAttention
from ..limits import BatchLimits
from ..model_attention import ModelAttention
from ..plan import StepPlan
from ..step_model import Forward
from .attention_probe import (
    Attend,
    LayerCall,
    UnsupportedModel,
    base_problem,
    mask_stand_in,
    problems_of,
    recorder,
)

ATTENTION_NAME = "pagedtune"  # as transformers knows it; see `AttentionInterface`
_CONTEXT = "pagedtune_attend"  # keyword argument that carries the step to the attention function
# Their frequencies depend on the longest sequence of a batch, so a sequence would depend on its neighbours, and keys
# already in the cache would be out of date.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


class PagedTransformer:
    """A transformers model whose attention runs on a paged cache; a `StepModel` for `DecodeLoop`.

    The model's attention is switched over while this is open, and back by `close` or once nothing refers to this any
    more; nothing else of it changes. It must not be used for anything else meanwhile.

    Args:
        model: a `PreTrainedModel` with a language-model head, in evaluation mode.
        pool_format: layout of the pool; its KV dtype may differ from the model's.
        num_blocks: blocks of the pool, in each layer.
        dispatch: kernels, and how to choose among them.
        limits: the largest step.
        debug: guard blocks and poison in the pool; see `KVCache`.

    Attributes:
        problems: attention of each layer.
        attention: by layer, to `explain`.

    Raises:
        UnsupportedModel: it needs attention that the kernels do not serve. Nothing was allocated or changed.
        ValueError: limits beyond the model's own, or a model on another device than the kernels.
        CacheInUse: another one is open on this model.
    """

    def __init__(
        self,
        model: Any,
        pool_format: PoolFormat,
        num_blocks: int,
        dispatch: Dispatch,
        limits: BatchLimits | None = None,
        debug: bool = False,
    ) -> None:
        limits = limits or BatchLimits()
        _require_own_attention(model)
        _require_usable(model, dispatch, limits)
        previous = model.config._attn_implementation
        _switch(model, ATTENTION_NAME)
        try:
            calls, self.vocab_size = _probe(model)
            self.problems = problems_of(calls, model.config.get_text_config().num_hidden_layers)
            self.cache = KVCache(
                base_problem(self.problems), pool_format, len(self.problems), num_blocks, model.device, debug
            )
            self.attention, self._paged = _attention_of(self.cache, self.problems, calls, dispatch, limits)
        except BaseException:
            _switch(model, previous)
            raise
        self.model, self.limits = model, limits
        self._restore = _restorer(self, model, previous)

    def forward(self, plan: StepPlan) -> Forward:
        """See `StepModel.forward`."""
        if not self._restore.alive:
            raise PagedRuntimeError("this PagedTransformer is closed: open() it again")
        paged = self._paged
        kernel_ns = paged.kernel_ns
        with torch.inference_mode():
            paged.begin(plan)
            inside_ns = paged.overhead_ns  # from here on, overhead is part of the time that the model takes
            start = perf_counter_ns()
            output = self.model(
                input_ids=plan.input_ids.unsqueeze(0),
                position_ids=plan.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=plan.sample_index,
                **{_CONTEXT: self._attend},
            )
            total_ns = perf_counter_ns() - start
        kernel_ns = paged.kernel_ns - kernel_ns
        return Forward(output.logits[0], total_ns - kernel_ns - (paged.overhead_ns - inside_ns), kernel_ns)

    def open(self) -> None:
        """Switches the model's attention over again after a `close`; the pool is what it was.

        Raises:
            CacheInUse: another one was opened on this model meanwhile.
        """
        if not self._restore.alive:
            _require_own_attention(self.model)
            previous = self.model.config._attn_implementation
            _switch(self.model, ATTENTION_NAME)
            self._restore = _restorer(self, self.model, previous)

    def close(self) -> None:
        """Gives the model its own attention back. The pool goes with this object."""
        self._restore()  # the second time, this does nothing

    def __enter__(self) -> PagedTransformer:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: dict[str, Any]
    ) -> torch.Tensor:
        # [1, heads, tokens, head_dim] -> [tokens, heads, head_dim]
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return self._paged(module.layer_idx, q, k, v).unsqueeze(0)


def _attention_of(
    cache: KVCache, problems: tuple[Problem, ...], calls: dict[int, LayerCall], dispatch: Dispatch, limits: BatchLimits
) -> tuple[tuple[PagedAttention, ...], ModelAttention]:
    workspaces = Workspaces(cache.device)
    kinds = {p: PagedAttention(p, cache.pool_format, dispatch, workspaces) for p in dict.fromkeys(problems)}
    layers = [LayerAttention(kinds[problem], _constants(calls[i])) for i, problem in enumerate(problems)]
    paged = ModelAttention(cache, layers, dispatch, limits, workspaces)
    return tuple(layer.attention for layer in layers), paged


def _constants(call: LayerCall) -> dict[str, torch.Tensor]:
    return {} if call.sinks is None else {"sinks": call.sinks.detach().float().contiguous()}


def _restorer(owner: object, model: Any, implementation: str) -> weakref.finalize[..., Any]:
    """Gives the model its own attention back: once, when called or when `owner` is garbage."""
    restore = weakref.finalize(owner, _switch, model, implementation)
    restore.atexit = False  # nobody uses the model after that
    return restore


def _require_own_attention(model: Any) -> None:
    if model.config._attn_implementation == ATTENTION_NAME:
        raise CacheInUse(
            f"the attention of this {type(model).__name__} is switched to {ATTENTION_NAME!r} already: another "
            "PagedTransformer is open on it, or on a model that shares its config. Use that one or close() it first"
        )


def _require_usable(model: Any, dispatch: Dispatch, limits: BatchLimits) -> None:
    """What can be known without running the model."""
    kind, config = type(model).__name__, model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{kind} is an encoder-decoder: only decoder-only models run on a paged cache")
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{kind} does not attend through the attention interface of transformers")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModel(f"{kind} uses multi-head latent attention: its latents need a pool of their own kind")
    rope = _rope_types(getattr(config, "rope_parameters", None) or {}) & _BATCH_DEPENDENT_ROPE
    if rope:
        raise UnsupportedModel(
            f"{kind} uses {', '.join(sorted(rope))} rotary embeddings: their frequencies depend on the longest "
            "sequence of a batch, so keys already in the cache would no longer fit"
        )
    if model.training:
        raise ValueError(f"{kind} is in training mode: call its eval() first")
    if model.device.type != dispatch.device.kind:
        raise ValueError(f"{kind} is on {model.device}, and the kernels are for {dispatch.device.kind}")
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and limits.max_context_len > longest:
        raise ValueError(f"max_context_len={limits.max_context_len} is beyond the {longest} positions of {kind}")


def _rope_types(parameters: dict[str, Any]) -> set[str]:
    """The types of one set of parameters, or of one set for each type of layer."""
    if "rope_type" in parameters:
        return {parameters["rope_type"]}
    return {p["rope_type"] for p in parameters.values() if isinstance(p, dict) and "rope_type" in p}


def _switch(model: Any, implementation: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _attention_function)
    AttentionMaskInterface.register(ATTENTION_NAME, mask_stand_in)
    model.set_attn_implementation(implementation)


def _attention_function(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **call: Any
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer; the step at hand comes along as a keyword argument of the model."""
    attend: Attend | None = call.pop(_CONTEXT, None)
    if attend is None:
        raise PagedRuntimeError(
            f"the attention of this model is switched to {ATTENTION_NAME!r}: run it through a DecodeLoop, or close() "
            "its PagedTransformer first"
        )
    call["attention_mask"] = attention_mask
    return attend(module, query, key, value, call), None


def _probe(model: Any) -> tuple[dict[int, LayerCall], int]:
    """What each layer passes to its attention, and the size of the vocabulary; from a pass over two tokens.

    Raises:
        UnsupportedModel: it cannot be run in one row with logits of chosen tokens only.
    """
    calls: dict[int, LayerCall] = {}
    positions = torch.arange(2, device=model.device).unsqueeze(0)
    with torch.inference_mode():
        output = model(
            input_ids=torch.zeros_like(positions),
            position_ids=positions,
            use_cache=False,
            logits_to_keep=torch.tensor([1], device=model.device),
            **{_CONTEXT: recorder(calls)},
        )
    shape = tuple(output.logits.shape)
    if shape[:2] != (1, 1):
        raise UnsupportedModel(f"{type(model).__name__} cannot give the logits of chosen tokens: it gave {shape}")
    return calls, min(shape[2], model.get_input_embeddings().num_embeddings)
