"""Writes a wheel: the same content gives the same bytes, whenever and wherever."""

from __future__ import annotations

import base64
import hashlib
import io
import sysconfig
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NAME = "pagedtune_runtime"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip file can say
_METADATA = """\
Metadata-Version: 2.4
Name: pagedtune-runtime
Version: {version}
Summary: Paged attention for one device and its models: tuned kernels, KV block allocator and decode loop.
License-Expression: Apache-2.0
License-File: LICENSE
Keywords: paged attention,kv cache,llm inference
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: Python :: 3
Classifier: Typing :: Typed
Requires-Python: >=3.11
Requires-Dist: numpy>=1.26
Requires-Dist: torch>=2.11
{needs}Provides-Extra: transformers
Requires-Dist: transformers>=5.20; extra == "transformers"
Description-Content-Type: text/markdown

{description}"""
_WHEEL = """\
Wheel-Version: 1.0
Generator: pagedtune {version}
Root-Is-Purelib: false
Tag: {tag}
"""


@dataclass(frozen=True)
class Wheel:
    """A wheel in memory: its file name and bytes."""

    file_name: str
    data: bytes


def platform_tag() -> str:
    """The tag of this machine, e.g. `linux_x86_64`: libraries are built against its own C library.

    Not `manylinux`: that promises symbol versions nobody has checked here. The manifest says what the libraries need.
    """
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def make_wheel(
    version: str, files: Mapping[str, bytes], licence: bytes, description: str, needs: Sequence[str] = ()
) -> Wheel:
    """The wheel of the package `pagedtune_runtime`.

    Args:
        version: of the distribution.
        files: content by path below the package's folder.
        licence: text of the licence.
        description: what the index page would say, in Markdown.
        needs: requirements beside numpy and torch.
    """
    tag = f"py3-none-{platform_tag()}"
    info = f"{NAME}-{version}.dist-info"
    contents = {f"{NAME}/{path}": data for path, data in files.items()} | {
        f"{info}/METADATA": _METADATA.format(
            version=version, description=description, needs="".join(f"Requires-Dist: {n}\n" for n in needs)
        ).encode(),
        f"{info}/WHEEL": _WHEEL.format(version=version, tag=tag).encode(),
        f"{info}/licenses/LICENSE": licence,
    }
    record = f"{info}/RECORD"
    contents[record] = _record(contents, record).encode()
    return Wheel(f"{NAME}-{version}-{tag}.whl", _zip(contents, last=record))


def _record(contents: Mapping[str, bytes], own: str) -> str:
    """Digest and size of every file, as the wheel format asks for."""
    lines = [f"{path},sha256={_urlsafe(data)},{len(data)}" for path, data in sorted(contents.items())]
    return "\n".join([*lines, f"{own},,"]) + "\n"


def _urlsafe(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _zip(contents: Mapping[str, bytes], last: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for path in sorted(contents, key=lambda path: (path == last, path)):
            entry = zipfile.ZipInfo(path, _EPOCH)
            entry.external_attr = 0o100644 << 16
            entry.create_system = 3  # Unix, wherever it is written
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, contents[path], compresslevel=6)
    return buffer.getvalue()
