"""A small engine on the exported runtime: requests come in at any time, are batched as they run, and stream out.

python examples/engine.py                                  # a tiny random model
python examples/engine.py --model SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import pagedtune_runtime as pr

Sink = Callable[[str, int], None]  # (request id, token)


class Engine:
    """Serves one model; `submit` and `cancel` at any time between two `step`s."""

    def __init__(self, model: Any, num_blocks: int, limits: pr.BatchLimits) -> None:
        package = pr.load()
        pool_format = package.pool_format(pr.problem_of_config(model.config, model.dtype))
        self.paged = pr.PagedTransformer(model, pool_format, num_blocks, package.dispatch, limits)
        self.loop = pr.DecodeLoop(self.paged)
        self.sinks: dict[str, Sink] = {}

    def submit(self, request: pr.Request, sink: Sink) -> None:
        """Queues a request whose tokens go to `sink`; raises `InvalidRequest` if it can never run."""
        self.loop.add(request)
        self.sinks[request.request_id] = sink

    def cancel(self, request_id: str) -> pr.Finished:
        self.sinks.pop(request_id, None)
        return self.loop.cancel(request_id)

    def step(self) -> list[pr.Finished]:
        """One token for everything that runs; those that ended."""
        output = self.loop.step()
        if output is None:
            return []
        for request_id, token in zip(output.request_ids.tolist(), output.tokens.tolist(), strict=True):
            self.sinks[request_id](request_id, token)
        for finished in output.finished:
            del self.sinks[finished.request_id]
        return list(output.finished)


def random_model() -> Any:
    """Two layers with the heads of the first problem that was tuned, and random weights."""
    problem = pr.load().problems[0]
    size = 16 * problem.num_q_heads
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=size, intermediate_size=2 * size, num_hidden_layers=2, head_dim=problem.head_dim,
        num_attention_heads=problem.num_q_heads, num_key_value_heads=problem.num_kv_heads, max_position_embeddings=512,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(problem.q_dtype.torch).eval()


def gguf_model(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()


def show(request_id: str, token: int) -> None:
    print(f"{request_id}:{token}", end=" ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves a burst of requests that arrive one after the other.")
    parser.add_argument("--model", type=Path, metavar="FILE.gguf", help="default: a tiny random model")
    parser.add_argument("--requests", type=int, default=12)
    options = parser.parse_args()
    model = gguf_model(options.model) if options.model else random_model()
    engine = Engine(model, num_blocks=24, limits=pr.BatchLimits(max_num_seqs=8, max_context_len=256, token_budget=64))
    started, finished, step = time.perf_counter(), 0, 0
    while finished < options.requests:
        if step % 3 == 0 and step // 3 < options.requests:  # the next one arrives
            index = step // 3
            prompt = tuple(range(1, 8 + 5 * index % 60))
            sampling = pr.SamplingParams(temperature=0.8, top_p=0.95, seed=index)
            engine.submit(pr.Request(f"r{index}", prompt, 40, sampling), show)
        for done in engine.step():
            finished += 1
            preempted = f", preempted {done.num_preemptions} times" if done.num_preemptions else ""
            print(f"\n[{done.request_id}: {len(done.tokens)} tokens, {done.reason}{preempted}]")
        step += 1
    print(f"{step} steps in {time.perf_counter() - started:.2f} s; {engine.loop.times}")
    print(engine.paged.attention[0].explain(pr.Bounds(8, 256)))
    engine.loop.check(idle=True)  # every block is free again


if __name__ == "__main__":
    main()
