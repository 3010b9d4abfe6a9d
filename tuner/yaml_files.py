"""Reads a YAML file into a strict pydantic model; every error names file, line, key and what is allowed."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import UsageError

M = TypeVar("M", bound="StrictModel")
MAX_SHOWN = 60  # characters of a wrong value
RULES = {  # what a kind of pydantic error means for a person; filled in from the error's context
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "too_short": "needs at least {min_length} entry",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list such as [a, b]",
    "model_type": "must hold `key: value` lines",
    "enum": "must be {expected}",
    "literal_error": "must be {expected}",
}


class StrictModel(BaseModel):
    """A part of a config file: no unknown key, no silent conversion, nothing changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def read_yaml(path: Path, model: type[M], shown: str = "") -> M:
    """The content of `path` as `model`.

    Args:
        path: the file.
        model: what it must hold.
        shown: how to call the file in messages (default: its path).

    Raises:
        UsageError: it cannot be read, is not YAML, or does not fit the model; one line, `FILE:LINE: ...`.
    """
    shown = shown or str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{shown}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    root = _compose(text, shown)
    _refuse_duplicates(root, shown)
    data = _construct(text, root, shown)
    try:
        # JSON mode: enums come from their names and tuples from lists, everything else stays strict.
        return model.model_validate_json(_to_json(data))
    except ValidationError as error:
        raise UsageError(_describe(error, root, model, shown)) from error


def _compose(text: str, shown: str) -> yaml.MappingNode:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{shown}:{mark.line + 1}" if mark is not None else shown
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"{where}: not valid YAML: {problem}") from error
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{shown}:1: expected `key: value` lines at the top level")
    return root


def _construct(text: str, root: yaml.Node, shown: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None) or root.start_mark
        raise UsageError(f"{shown}:{mark.line + 1}: {getattr(error, 'problem', None) or error}") from error


def _refuse_duplicates(node: yaml.Node, shown: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise UsageError(f"{shown}:{line}: key {key.value!r} is given twice, first on line {seen[key.value]}")
            seen[str(key.value)] = line
            _refuse_duplicates(value, shown)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(item, shown)


def _to_json(data: Any) -> str:
    import json

    return json.dumps(data, default=str)


def _describe(error: ValidationError, root: yaml.Node, model: type[BaseModel], shown: str) -> str:
    errors = error.errors()
    # A misspelled key is also missing: naming the wrong one says more.
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    path = tuple(first["loc"])
    where = f"{shown}:{_line_of(root, path)}"
    name = ".".join(str(p) for p in path)
    if first["type"] == "extra_forbidden":
        allowed = sorted(_model_at(model, path[:-1]).model_fields)
        near = difflib.get_close_matches(str(path[-1]), allowed, n=1)
        guess = f" (did you mean {near[0]!r}?)" if near else ""
        return f"{where}: unknown key {str(path[-1])!r}{guess}; allowed keys: {', '.join(allowed)}"
    if first["type"] == "missing":
        return f"{where}: key {name!r} is missing: {_purpose(_model_at(model, path[:-1]), path[-1])}"
    label = f"{name}: " if name else ""
    rule = RULES.get(first["type"])
    if rule is not None:
        meaning = _description_of(model, path)
        return f"{where}: {label}{_short(first['input'])} {rule.format(**first.get('ctx', {}))}{meaning}"
    message = first["msg"].removeprefix("Value error, ")
    found = "" if first["type"] == "value_error" else f", found {_short(first['input'])}"
    return f"{where}: {label}{message[:1].lower() + message[1:]}{found}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def _description_of(model: type[BaseModel], path: tuple[int | str, ...]) -> str:
    """What the key at (or around) `path` is for, in brackets; nothing where that is not stated."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    field = _model_at(model, path[:-1]).model_fields.get(str(path[-1])) if path else None
    return f" ({field.description})" if field is not None and field.description else ""


def _purpose(model: type[BaseModel], name: int | str) -> str:
    field = model.model_fields.get(str(name))
    return (field.description if field is not None else None) or "it is required"


def _model_at(model: type[BaseModel], path: tuple[int | str, ...]) -> type[BaseModel]:
    """The model that describes the part of a file at `path`."""
    for step in path:
        if isinstance(step, int):
            continue
        annotation: Any = model.model_fields[step].annotation
        inner = [a for a in (annotation, *getattr(annotation, "__args__", ())) if isinstance(a, type)]
        found = [a for a in inner if issubclass(a, BaseModel)]
        if not found:
            break
        model = found[0]
    return model


def _line_of(root: yaml.Node, path: tuple[int | str, ...]) -> int:
    """1-based line of the key (or list entry) at `path`, or of the nearest part above it."""
    node, line = root, root.start_mark.line + 1
    for step in path:
        child: tuple[yaml.Node, yaml.Node] | None = None
        if isinstance(node, yaml.MappingNode):
            child = next(((k, v) for k, v in node.value if k.value == str(step)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            child = (node.value[step], node.value[step])
        if child is None:
            return line
        line, node = child[0].start_mark.line + 1, child[1]
    return line
