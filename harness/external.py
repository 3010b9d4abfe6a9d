"""Finds a variant by what a user writes: a name of the catalogue, a file with a class, or an installed entry point."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import MISSING, fields
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from pagedtune.kernels.catalogue import VARIANTS
from pagedtune.kernels.device import DeviceKind
from pagedtune.kernels.variant import Config, Op, Properties, Variant

GROUP = "pagedtune.variants"


class VariantLoadError(RuntimeError):
    """A variant's own code failed while it was imported or made; the message is one line with the place."""


class RequestError(ValueError):
    """What was asked for cannot be: an unknown variant, file, class or tunable. Not the fault of a variant's code."""


def load_variant(ref: str) -> Variant:
    """The variant that `ref` names: `NAME`, or `path/to/file.py:ClassName`.

    A name is looked up in the catalogue, then among the entry points of the group `pagedtune.variants` of installed
    distributions. A file's own folder is appended to the import path, so that it may import its neighbours.

    Raises:
        ValueError: no such name (with the nearest ones), file or class, or not a usable variant.
        VariantLoadError: the foreign code raised.
    """
    if is_file_ref(ref):
        return _from_file(ref)
    require_known(ref)
    known = {variant.name: variant for variant in VARIANTS}
    if ref in known:
        return known[ref]
    return _from_entry_point({point.name: point for point in entry_points(group=GROUP)}[ref])


def require_known(ref: str) -> None:
    """Raises ValueError unless there is such a name or file; runs no code of the variant."""
    if is_file_ref(ref):
        path = Path(absolute_ref(ref).rpartition(":")[0] if ".py:" in ref else absolute_ref(ref))
        if not path.is_file():
            raise ValueError(f"no file {path}: a variant of your own is given as path/to/file.py:ClassName")
        return
    names = [*(variant.name for variant in VARIANTS), *(point.name for point in entry_points(group=GROUP))]
    if ref not in names:
        near = difflib.get_close_matches(ref, names, n=3, cutoff=0.4)
        guess = f"did you mean {', '.join(near)}? " if near else "`pagedtune variants` lists those that there are. "
        raise ValueError(f"unknown variant {ref!r}: {guess}A variant of your own is given as file.py:ClassName")


def is_foreign(ref: str) -> bool:
    """Whether `ref` is anything but a name of the catalogue: its code may be anybody's."""
    return ref not in {variant.name for variant in VARIANTS}


def is_file_ref(ref: str) -> bool:
    """Whether `ref` is of the form `path.py:ClassName` (or lacks only the class)."""
    return ref.endswith(".py") or ".py:" in ref or "/" in ref


def absolute_ref(ref: str) -> str:
    """`ref` with an absolute path, where it has one: it then means the same in every process."""
    if not is_file_ref(ref):
        return ref
    path, colon, name = ref.rpartition(":") if ".py:" in ref else (ref, "", "")
    return f"{Path(path).expanduser().resolve()}{colon}{name}"


def _from_file(ref: str) -> Variant:
    location, _, name = absolute_ref(ref).rpartition(":") if ".py:" in ref else (absolute_ref(ref), "", "")
    path = Path(location)
    require_known(ref)
    module = _import_file(path)
    found = getattr(module, name, None) if name else None
    if found is None:
        classes = [n for n, c in vars(module).items() if _is_variant_class(c) and c.__module__ == module.__name__]
        missing = f"has no {name!r}" if name else "needs a class name after it"
        offer = f"it has {', '.join(classes)}" if classes else "it defines no class derived from Variant"
        raise ValueError(f"{path} {missing}: {offer}; give {path.name}:ClassName")
    return _make(found, f"{path}:{name}")


def _from_entry_point(point: EntryPoint) -> Variant:
    where = f"entry point {point.name} = {point.value}"
    return _make(_guarded(where, "does not load", point.load), where)


def _import_file(path: Path) -> ModuleType:
    """The module of `path`, imported once per process."""
    name = f"pagedtune_external_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file: a variant of your own is given as path/to/file.py:ClassName")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    loader = spec.loader
    try:
        _guarded(str(path), "does not import", lambda: loader.exec_module(module))
    except VariantLoadError:
        del sys.modules[name]
        raise
    return module


def _make(found: Any, where: str) -> Variant:
    if isinstance(found, Variant):
        variant = found
    elif not _is_variant_class(found):
        raise ValueError(f"{where} is no variant: derive it from pagedtune.kernels.variant.Variant")
    elif inspect.isabstract(found):
        raise ValueError(f"{where} does not implement {', '.join(sorted(found.__abstractmethods__))}")
    else:
        variant = _guarded(where, "cannot be made without arguments", found)
    for attribute, kind in (("name", str), ("summary", str), ("op", Op), ("device_kind", DeviceKind)):
        value = getattr(variant, attribute, None)
        if not isinstance(value, kind) or not value:
            raise ValueError(f"{where} must set the class attribute {attribute!r} to a {kind.__name__}, not {value!r}")
    _require_types(variant, where)
    return variant


def _require_types(variant: Variant, where: str) -> None:
    """Raises VariantLoadError unless tunables and promises are of the kinds that the harness works with."""
    config_type, properties = getattr(variant, "config_type", None), getattr(variant, "properties", None)
    if not (inspect.isclass(config_type) and issubclass(config_type, Config)):
        raise VariantLoadError(f"{where}: config_type must be a dataclass derived from Config, not {config_type!r}")
    own = vars(config_type)
    if own.get("__annotations__") and "__dataclass_params__" not in own:
        raise VariantLoadError(f"{where}: put @dataclass(frozen=True) before class {config_type.__name__}")
    bare = [f.name for f in fields(config_type) if f.default is MISSING and f.default_factory is MISSING]
    if bare:
        raise VariantLoadError(f"{where}: give {config_type.__name__}.{bare[0]} a default: every tunable needs one")
    if not isinstance(properties, Properties):
        raise VariantLoadError(
            f"{where}: properties must be a Properties, e.g. Properties(deterministic=False), not {properties!r}"
        )


def _is_variant_class(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Variant) and value is not Variant


def _guarded(where: str, what: str, function: Callable[[], Any]) -> Any:
    """Runs foreign code; whatever it raises becomes a VariantLoadError with the place."""
    try:
        return function()
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        text = " ".join(str(error).split())
        frames = [
            f
            for f in traceback.extract_tb(error.__traceback__)
            if f.filename != __file__ and "<frozen" not in f.filename
        ]
        place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        raise VariantLoadError(f"{where} {what}: {type(error).__name__}: {text}{place}") from error
