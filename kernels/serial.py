"""Strict JSON for frozen dataclasses: what is written can be read back, and nothing else can."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")


def to_jsonable(value: Any) -> Any:
    """`value` as plain JSON types: dataclasses and mappings as objects, tuples as arrays, enums as their value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): to_jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(v) for v in value]
    return value


def from_jsonable(kind: type[T], data: Any, where: str = "") -> T:
    """The `kind` that `data` describes.

    Raises:
        ValueError: an unknown, missing or mistyped field; the message gives its path, what was expected and what
            was found.
    """
    result: T = _convert(kind, data, where or kind.__name__)
    return result


def _convert(kind: Any, data: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if kind is Any:
        return data
    if origin in (types.UnionType, typing.Union):
        return _convert_union(kind, data, where)
    if dataclasses.is_dataclass(kind):
        return _convert_dataclass(kind, data, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _convert_enum(kind, data, where)
    if origin is tuple:
        return _convert_tuple(typing.get_args(kind), data, where)
    if origin in (dict, Mapping):
        _expect(isinstance(data, dict), where, "an object", data)
        value_kind = typing.get_args(kind)[1]
        return {k: _convert(value_kind, v, f"{where}.{k}") for k, v in data.items()}
    return _convert_plain(kind, data, where)


def _convert_plain(kind: Any, data: Any, where: str) -> Any:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    matches = isinstance(data, kind) and not (isinstance(data, bool) and kind is not bool)
    _expect(matches, where, kind.__name__, data)
    return data


def _convert_union(kind: Any, data: Any, where: str) -> Any:
    options = typing.get_args(kind)
    if data is None and type(None) in options:
        return None
    return _convert(next(o for o in options if o is not type(None)), data, where)


def _convert_enum(kind: type[Enum], data: Any, where: str) -> Enum:
    values = [member.value for member in kind]
    _expect(data in values, where, f"one of {', '.join(map(str, values))}", data)
    return kind(data)


def _convert_tuple(args: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    _expect(isinstance(data, list | tuple), where, "an array", data)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_convert(args[0], v, f"{where}[{i}]") for i, v in enumerate(data))
    _expect(len(data) == len(args), where, f"{len(args)} values", data)
    return tuple(_convert(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, data, strict=True)))


def _convert_dataclass(kind: Any, data: Any, where: str) -> Any:
    _expect(isinstance(data, dict), where, "an object", data)
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(data) - set(known))
    _expect(not unknown, where, f"only the keys {', '.join(known)}", ", ".join(unknown))
    required = {n for n, f in known.items() if f.default is dataclasses.MISSING is f.default_factory}
    missing = sorted(required - set(data))
    _expect(not missing, where, f"the keys {', '.join(missing)}", "none of them")
    return kind(**{n: _convert(hints[n], v, f"{where}.{n}") for n, v in data.items()})


def _expect(condition: bool, where: str, expected: str, found: Any) -> None:
    if not condition:
        raise ValueError(f"{where}: expected {expected}, found {found!r}")
