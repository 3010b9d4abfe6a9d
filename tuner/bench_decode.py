"""Decode throughput of a real model on the paged cache beside the same model with transformers' own cache.

    python -m pagedtune.tuner.bench_decode --tokens 64 --rounds 5

Both run in one process, on one model object, in turns: what disturbs the machine disturbs both. Only decode steps are
timed: prefill and each side's first token are not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from pagedtune.harness.probe import cpu_facts
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.runtime.adapters.transformers import PagedTransformer
from pagedtune.runtime.decode_loop import DecodeLoop
from pagedtune.runtime.dispatch import Dispatch
from pagedtune.runtime.limits import BatchLimits
from pagedtune.runtime.sequence import Request
from pagedtune.runtime.step_times import StepTimes

from . import smollm2
from .errors import UsageError

MAX_CONTEXT_LEN = 1024
POOL_FORMAT = PoolFormat(16, DType.FP32)


@dataclass
class Side:
    """Measurements of one way to decode.

    Args:
        tokens_per_s: of each round.
        outputs: of the last round, by prompt.
    """

    tokens_per_s: list[float] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)


@dataclass
class Comparison:
    """Both ways at one batch size.

    Args:
        batch: sequences.
        paged, own: the two ways.
        times: where the paged steps' time went, over all rounds.
        kernel: what served them.
    """

    batch: int
    paged: Side = field(default_factory=Side)
    own: Side = field(default_factory=Side)
    times: StepTimes = field(default_factory=StepTimes)
    kernel: str = ""

    @property
    def ratios(self) -> list[float]:
        """Paged over own throughput, round by round."""
        return [p / o for p, o in zip(self.paged.tokens_per_s, self.own.tokens_per_s, strict=True)]

    def __str__(self) -> str:
        same = sum(a == b for a, b in zip(self.paged.outputs, self.own.outputs, strict=True))
        ratios, speeds = self.ratios, [statistics.median(s.tokens_per_s) for s in (self.paged, self.own)]
        kernel_share = self.times.kernel_ns / self.times.total_ns
        return "\n".join(
            (
                f"batch {self.batch}: paged {speeds[0]:.1f} tokens/s, transformers {speeds[1]:.1f} tokens/s "
                f"(medians of {len(ratios)} rounds)",
                f"  paged / transformers, paired: median {statistics.median(ratios):.3f}, "
                f"{min(ratios):.3f} to {max(ratios):.3f}",
                f"  paged: {self.times}; kernels {kernel_share:.1%}",
                f"  same tokens in {same} of {self.batch} sequences",
                f"  {self.kernel}",
            )
        )


class _StepClock:
    """A stopping criterion that never stops, and notes when each step has ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.ends.append(perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def decode_paged(loop: DecodeLoop, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, Side, StepTimes]:
    """Decode tokens/s of one round on the paged cache, with outputs and times of the decode steps."""
    requests = [Request(f"bench-{i}", tuple(prompt), num_tokens) for i, prompt in enumerate(prompts)]
    loop.add_all(requests)
    outputs: dict[str, tuple[int, ...]] = {}
    first: set[str] = set()
    while len(first) < len(requests):
        output = loop.step()
        if output is None:
            raise UsageError("the pool or the token budget is too small for this batch")
        first |= set(output.request_ids)
    loop.times = StepTimes()
    start, decoded = perf_counter(), 0
    while output := loop.step():
        decoded += len(output.tokens)
        outputs |= {finished.request_id: finished.tokens for finished in output.finished}
    return decoded / (perf_counter() - start), Side(outputs=[outputs[r.request_id] for r in requests]), loop.times


def decode_own(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, Side]:
    """Decode tokens/s of one round of `generate` with its own cache, left-padded, with outputs."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    clock = _StepClock()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[clock],
        )
    elapsed = clock.ends[-1] - clock.ends[0]
    rows = [tuple(row) for row in out[:, width:].tolist()]
    return len(prompts) * (len(clock.ends) - 1) / elapsed, Side(outputs=rows)


def compare(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int, rounds: int) -> Comparison:
    """Both ways in turns, after one round each to warm up; the order changes from round to round."""
    batch = len(prompts)
    blocks = batch * -(-MAX_CONTEXT_LEN // POOL_FORMAT.block_size)
    limits = BatchLimits(batch, MAX_CONTEXT_LEN, token_budget=max(512, batch))
    paged = PagedTransformer(model, POOL_FORMAT, blocks, Dispatch(cpu_facts()), limits)
    loop, result = DecodeLoop(paged), Comparison(batch)
    longest = max(map(len, prompts)) + num_tokens
    result.kernel = str(paged.attention[0].explain(Bounds(batch, longest)))
    paged.close()

    def run_paged() -> None:
        with paged:
            speed, side, times = decode_paged(loop, prompts, num_tokens)
        result.paged.tokens_per_s.append(speed)
        result.paged.outputs = side.outputs
        result.times.add(times)

    def run_own() -> None:
        speed, side = decode_own(model, prompts, num_tokens)
        result.own.tokens_per_s.append(speed)
        result.own.outputs = side.outputs

    for number in range(rounds + 1):
        for side in (run_paged, run_own) if number % 2 else (run_own, run_paged):
            side()
        if number == 0:  # the warm-up is not a measurement
            result.paged, result.own, result.times = Side(), Side(), StepTimes()
    loop.check(idle=True)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a comparison for each batch size. Returns 0, or 2 after a message about what is missing."""
    parser = argparse.ArgumentParser(prog="bench_decode", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that each sequence generates (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="batch sizes up to 16 (default 1 16)")
    options = parser.parse_args(arguments)
    if min(options.tokens - 1, options.rounds, *options.batch) < 1 or max(options.batch) > len(smollm2.PROMPTS):
        parser.error(f"at least 2 tokens, 1 round and a batch of 1; at most {len(smollm2.PROMPTS)} sequences")
    try:
        model, tokenizer = smollm2.load(smollm2.find_file())
    except UsageError as error:
        print(f"bench_decode: {error}", file=sys.stderr)
        return 2
    print(f"SmolLM2-135M fp32, {cpu_facts().fingerprint}, torch threads {torch.get_num_threads()}")
    for batch in options.batch:
        prompts = [tokenizer(text)["input_ids"] for text in smollm2.PROMPTS[:batch]]
        print(compare(model, prompts, options.tokens, options.rounds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
