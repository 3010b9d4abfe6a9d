"""Sixteen prompts in one continuous batch through the installed wheel, against transformers' own greedy generation."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import PROLOGUE

Run = Callable[..., subprocess.CompletedProcess[str]]
NUM_PROMPTS = 16
# `model` and `prompts` are there. The pool holds a part of the batch only, so some are preempted.
COMPARE = """
import pagedtune_runtime as pr
package = pr.load()
pool_format = package.pool_format(pr.problem_of_config(model.config, model.dtype))
longest = max(map(len, prompts)) + NEW
blocks_of_all = sum(-(-(len(p) + NEW) // pool_format.block_size) for p in prompts)
num_blocks = max(blocks_of_all // 3, -(-longest // pool_format.block_size))
limits = pr.BatchLimits(max_num_seqs=16, max_context_len=longest, token_budget=64)
with pr.PagedTransformer(model, pool_format, num_blocks, package.dispatch, limits, debug=True) as paged:
    loop = pr.DecodeLoop(paged, debug=True)
    results = loop.generate(prompts, NEW)
    loop.check(idle=True)
    found = paged.attention[0].explain(pr.Bounds(16, longest))
options = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
same = 0
for prompt, result in zip(prompts, results):
    ids = torch.tensor([prompt])
    own = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt):]
    same += tuple(own.tolist()) == result.tokens
print("same", same, "of", len(prompts), "preempted", sum(r.num_preemptions for r in results), "ran", found.variant)
assert not {"pagedtune", "triton"} & set(sys.modules)
"""
RANDOM = """
import torch, transformers
torch.manual_seed(3)
NEW = 20
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=199, hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=256, initializer_range=0.3,
    bos_token_id=None, eos_token_id=None)).eval()
prompts = [torch.randint(1, 199, (1 + 3 * i,)).tolist() for i in range(16)]
"""
SMOLLM2 = """
import os
os.environ["HF_HUB_OFFLINE"] = os.environ["TQDM_DISABLE"] = "1"
import pathlib, torch, transformers
NEW = 64
path = pathlib.Path(sys.argv[1])
place = dict(pretrained_model_name_or_path=str(path.parent), gguf_file=path.name)
tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
model.generation_config.eos_token_id = None
text = "Paged attention keeps keys and values in blocks, so that a sequence grows without moving what it has. " * 2
words = text.split()
prompts = [tokenizer(" ".join(words[i : 2 * i + 2]))["input_ids"] for i in range(16)]
"""


def test_a_random_model_generates_what_transformers_does(installed: Path, run_isolated: Run) -> None:
    done = run_isolated(RANDOM + COMPARE, installed)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[:4] == ["same", "16", "of", "16"], done.stdout
    assert int(words[words.index("preempted") + 1]) > 0
    assert words[-1] == "cpu_split"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_smollm2_generates_what_transformers_does(root: Path) -> None:
    """In the environment of `make generate`, in which there is no pagedtune."""
    python = root / "build/generate/venv/bin/python"
    models = sorted((root / "build/generate/model").glob("*/*.gguf"))
    if not (python.exists() and models):
        pytest.skip("`make generate` has not been run here: it makes the environment and gets the model")
    prologue = PROLOGUE % (str(root / "build/nothing"), str(root / "build/nothing"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-I", "-c", prologue + SMOLLM2 + COMPARE, models[0]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root / "build", env=environment)
    assert done.returncode == 0, done.stderr
    assert f"same {NUM_PROMPTS} of {NUM_PROMPTS}" in done.stdout
