"""Generates text with a GGUF model of the Llama family on the exported runtime, token by token.

    pip install dist/pagedtune_runtime-*.whl
    python examples/generate.py --model SmolLM2-135M-Instruct.Q4_1.gguf "Why is the sky blue?"

`make generate PROMPT="..."` does all of it, model included.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
import transformers

import pagedtune_runtime as pr


def main() -> int:
    options = arguments()
    model, tokenizer = load(options.model)
    package = pr.load()
    prompt = encode(tokenizer, options.prompt, options.raw)
    stop = model.generation_config.eos_token_id if not options.ignore_stop else None
    stops = tuple([stop] if isinstance(stop, int) else stop or ())
    limits = pr.BatchLimits(max_num_seqs=1, max_context_len=len(prompt) + options.max_new_tokens)
    pool_format = package.pool_format(pr.problem_of_config(model.config, model.dtype))
    num_blocks = -(-limits.max_context_len // pool_format.block_size)
    sampling = pr.SamplingParams(options.temperature, options.top_k, options.top_p, options.seed)
    request = pr.Request("prompt", prompt, options.max_new_tokens, sampling, stops)
    with pr.PagedTransformer(model, pool_format, num_blocks, package.dispatch, limits) as paged:
        loop = pr.DecodeLoop(paged)
        report(paged, loop, limits, len(prompt), *run(loop, tokenizer, request))
        loop.check(idle=True)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generates text on the exported paged-attention runtime.")
    parser.add_argument("prompt", help="what to answer; with --raw, what to continue")
    parser.add_argument("--model", type=Path, required=True, metavar="FILE.gguf")
    parser.add_argument("--raw", action="store_true", help="continue the text itself, without a chat format")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0: the most probable token each time")
    parser.add_argument("--top-k", type=int, default=0, metavar="K")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument("--ignore-stop", action="store_true", help="go on after the end of the answer")
    options = parser.parse_args()
    if not options.model.is_file():
        parser.error(f"--model {options.model} is no file: `make generate` gets one")
    return options


def load(path: Path) -> tuple[Any, Any]:
    """Model in fp32 and tokenizer of a GGUF file, without a network."""
    print(f"loading {path.name} ...", file=sys.stderr)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(**place)


def encode(tokenizer: Any, text: str, raw: bool) -> tuple[int, ...]:
    """Token ids of the prompt, as a chat turn where the model has a chat format."""
    if raw or not tokenizer.chat_template:
        return tuple(tokenizer(text)["input_ids"])
    turns = [{"role": "user", "content": text}]
    written = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer(written, add_special_tokens=False)["input_ids"])


def run(loop: pr.DecodeLoop, tokenizer: Any, request: pr.Request) -> tuple[list[float], pr.Snapshot]:
    """Streams one request to the terminal: the time of each token in seconds, and the pool when it was fullest."""
    times, fullest = [time.perf_counter()], loop.snapshot()
    for text in pieces(tokenizer, (token for _, token in loop.stream([request]))):
        times.append(time.perf_counter())
        now = loop.snapshot()
        fullest = max(fullest, now, key=lambda s: s.live_tokens)
        print(text, end="", flush=True)
    print()
    return times, fullest


def pieces(tokenizer: Any, tokens: Iterator[int]) -> Iterator[str]:
    """New text of each token; a character of several tokens comes with its last."""
    seen: list[int] = []
    shown = ""
    for token in tokens:
        seen.append(token)
        text = tokenizer.decode(seen, skip_special_tokens=True)
        new = "" if text.endswith("\ufffd") else text[len(shown) :]
        shown += new
        yield new


def report(
    paged: pr.PagedTransformer, loop: pr.DecodeLoop, limits: pr.BatchLimits, prompt: int, times: list[float],
    fullest: pr.Snapshot,
) -> None:  # fmt: skip
    tokens, first, rest = len(times) - 1, times[1] - times[0], times[-1] - times[1]
    rate = f"{(tokens - 1) / rest:.1f} tokens/s after the first" if tokens > 1 else "one token"
    slots = fullest.referenced * fullest.block_size
    print(f"\n{prompt} prompt and {tokens} new tokens: {rate}, the first after {first * 1e3:.0f} ms")
    print(
        f"blocks: {fullest.referenced} of {fullest.num_blocks} used at most, {fullest.block_size} tokens each; "
        f"{fullest.waste_tokens} of {slots} slots empty ({fullest.waste_tokens / max(slots, 1):.1%} waste)"
    )
    print(f"time: {loop.times}")
    print(f"kernel: {paged.attention[0].explain(pr.Bounds(1, limits.max_context_len))}")


if __name__ == "__main__":
    sys.exit(main())
