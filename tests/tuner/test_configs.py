"""The config files that ship, and what a person sees who makes a mistake in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedtune.kernels.dtypes import DType
from pagedtune.tuner.configs import Configs, ModelFile, SweepFile
from pagedtune.tuner.errors import UsageError
from pagedtune.tuner.space import cells_of
from pagedtune.tuner.yaml_files import read_yaml

MODEL = """\
num_q_heads: 32
num_kv_heads: 8
head_dim: 128
num_layers: 4
dtypes: [bf16]
source: made up
"""
SWEEP = """\
description: test
models: [m]
dtypes: [bf16]
block_sizes: [16]
layouts: [nhd]
buckets:
  - {num_seqs: 1, context_len: 1024, weight: 0.5}
  - {num_seqs: 8, context_len: 1024, weight: 0.5}
workloads: [ragged]
"""


def error_of(tmp_path: Path, text: str, model: type[ModelFile] | type[SweepFile] = ModelFile) -> str:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_yaml(path, model, "models/x.yaml")
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_file_that_ships_is_valid() -> None:
    configs = Configs()
    assert {"cpu", "h100", "h200", "a100", "l40s"} <= set(configs.names("gpus"))
    for name in configs.names("gpus"):
        assert configs.gpu(name).device(name).name == name
        assert configs.gpu(name).source
    for name in configs.names("models"):
        assert configs.model(name).source
    for name in configs.names("sweeps"):
        cells = cells_of(configs, configs.sweep(name))
        assert len({cell.key for cell in cells}) == len(cells)


def test_a_sweep_over_scales_leaves_out_pools_that_cannot_be(tmp_path: Path) -> None:
    fields = "kv_dtypes: [bf16, int8]\nscale_kinds: [none, per_head, per_token_head]\n"
    (tmp_path / "s.yaml").write_text(SWEEP + fields)
    sweep = read_yaml(tmp_path / "s.yaml", SweepFile)
    assert [pool_format.key for pool_format in sweep.formats(DType.BF16)] == [
        "b16-nhd-bf16",
        "b16-nhd-bf16-per_head",
        "b16-nhd-int8",
        "b16-nhd-int8-per_head",
        "b16-nhd-int8-per_token_head",
    ]


def test_quick_sweep_has_at_least_twelve_cells_over_two_of_everything() -> None:
    configs = Configs()
    cells = cells_of(configs, configs.sweep("quick"))
    assert len(cells) >= 12
    for spread in ("model", "pool_format", "bucket"):
        assert len({getattr(cell, spread) for cell in cells}) >= 2
    assert len({cell.problem.q_dtype for cell in cells}) >= 2


@pytest.mark.parametrize(
    ("name", "q_heads", "kv_heads", "head_dim"),
    [
        ("llama-3-8b", 32, 8, 128),
        ("llama-3-70b", 8, 1, 128),  # 64 and 8 heads on 8 ranks
        ("qwen2.5-7b", 28, 4, 128),
        ("gemma-2-9b", 16, 8, 256),
        ("phi-3-mini", 32, 32, 96),
        ("smollm2-135m", 9, 3, 64),
    ],
)
def test_heads_of_one_rank(name: str, q_heads: int, kv_heads: int, head_dim: int) -> None:
    for problem, _ in Configs().model(name).problems(DType.BF16):
        assert (problem.num_q_heads, problem.num_kv_heads, problem.head_dim) == (q_heads, kv_heads, head_dim)


def test_model_with_two_kinds_of_layers_gives_two_problems_that_add_up() -> None:
    problems = Configs().model("gemma-2-9b").problems(DType.BF16)
    assert [(problem.window, layers) for problem, layers in problems] == [(4096, 21), (None, 21)]
    assert all(problem.soft_cap == 50 for problem, _ in problems)


def test_kv_heads_are_replicated_where_ranks_outnumber_them(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(MODEL + "tensor_parallel: 16\n")
    assert read_yaml(path, ModelFile).rank_heads == (2, 1)


@pytest.mark.parametrize(
    ("text", "where", "parts"),
    [
        (MODEL + "num_head: 3\n", 7, ["unknown key 'num_head'", "allowed keys", "num_q_heads"]),
        (MODEL.replace("num_kv_heads: 8", "num_kv_heads: eight"), 2, ["num_kv_heads", "'eight'", "integer"]),
        (MODEL.replace("head_dim: 128", "head_dim: 0"), 3, ["head_dim", "0"]),
        (MODEL.replace("head_dim: 128", "head_dim: true"), 3, ["head_dim", "integer"]),
        (MODEL.replace("[bf16]", "[bf16, fp31]"), 5, ["dtypes", "fp31", "bf16"]),
        (MODEL.replace("[bf16]", "[]"), 5, ["dtypes"]),
        (MODEL.replace("head_dim: 128\n", ""), 1, ["'head_dim' is missing"]),
        (MODEL + "num_layers: 3\n", 7, ["'num_layers'", "twice", "line 4"]),
        (MODEL.replace("head_dim: 128", "head_dim: [1, 2"), 4, ["not valid YAML"]),
        (MODEL + "window: .inf\n", 7, ["window"]),
        ("- a\n- b\n", 1, ["key: value"]),
        ("", None, ["key: value"]),
        (MODEL + "tensor_parallel: 3\n", 1, ["num_q_heads=32", "tensor_parallel=3"]),
        (MODEL.replace("num_kv_heads: 8", "num_kv_heads: 5"), 1, ["num_q_heads=32", "num_kv_heads=5", "multiple"]),
        (MODEL + "num_full_layers: 2\n", 1, ["num_full_layers=2", "window"]),
    ],
)
def test_mistake_in_a_model_names_file_line_and_what_is_allowed(
    tmp_path: Path, text: str, where: int | None, parts: list[str]
) -> None:
    message = error_of(tmp_path, text)
    assert message.startswith("models/x.yaml" if where is None else f"models/x.yaml:{where}:")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "where", "parts"),
    [
        (SWEEP.replace("context_len: 1024, weight: 0.5}\nw", "context_lem: 1024, weight: 0.5}\nw"), 8, ["context_len"]),
        (SWEEP.replace("weight: 0.5}\nw", "wieght: 0.5}\nw"), 8, ["unknown key 'wieght'", "did you mean 'weight'"]),
        (SWEEP.replace("layouts:", "layout:"), 5, ["unknown key 'layout'", "did you mean 'layouts'", "allowed keys"]),
        (SWEEP.replace("[16]", "[16, 0]"), 4, ["block_sizes.1: 0 must be at least 1 (tokens per KV block, 1 to 256)"]),
        (SWEEP.replace("[16]", "[1000000]"), 4, ["block_sizes.0: 1000000 must be at most 256"]),
        (SWEEP.replace("[16]", "16"), 4, ["block_sizes: 16 must be a list"]),
        (SWEEP + "candidate_limit_s: 0\n", 10, ["candidate_limit_s: 0 must be above 0"]),
        (SWEEP.replace("[ragged]", "[raged]"), 9, ["raged", "ragged"]),
        (SWEEP.replace("[nhd]", "[ndh]"), 5, ["layouts", "ndh", "nhd"]),
        (SWEEP.replace("num_seqs: 8", "num_seqs: 1"), 6, ["n1-c1024"]),
        (SWEEP.replace("weight: 0.5}\n  -", "weight: 0}\n  -"), 7, ["weight"]),
        (SWEEP + "mode: warm\n", 10, ["mode", "cold", "hot"]),
    ],
)
def test_mistake_in_a_sweep_names_file_line_and_what_is_allowed(
    tmp_path: Path, text: str, where: int, parts: list[str]
) -> None:
    message = error_of(tmp_path, text, SweepFile)
    assert message.startswith(f"models/x.yaml:{where}:")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("group", "name", "near"),
    [("gpu", "h1000", "h100"), ("model", "llama3-8b", "llama-3-8b"), ("sweep", "quik", "quick")],
)
def test_unknown_name_offers_the_nearest(group: str, name: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"unknown .*{name}.*did you mean .*{near}"):
        getattr(Configs(), group)(name)


def test_model_and_sweep_without_a_common_dtype_are_refused(tmp_path: Path) -> None:
    for group in ("gpus", "models", "sweeps"):
        (tmp_path / group).mkdir()
    (tmp_path / "models" / "m.yaml").write_text(MODEL)
    (tmp_path / "sweeps" / "s.yaml").write_text(SWEEP.replace("dtypes: [bf16]", "dtypes: [fp32]"))
    configs = Configs(tmp_path)
    with pytest.raises(UsageError, match="model m is tuned in bf16, the sweep in fp32"):
        cells_of(configs, configs.sweep("s"))


def test_absent_config_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--configs"):
        Configs(tmp_path / "nowhere")
