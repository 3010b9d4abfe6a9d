"""CUDA C++ kernels out of other projects' wheels: instances of their templates, compiled with NVRTC at run time.

Their headers are read from the wheel and never kept in this tree. They were written for a compiler that handles host
code too: NVRTC knows neither the C++ standard library nor host functions. So the wheel must bring libcu++, whose types
stand in for those of `std`, everything that was a host function becomes one of the device that nobody calls, and what
has no counterpart there (streams, exceptions, containers) is an empty stand-in of ours. No kernel uses any of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagedtune.kernels.artifact import Artifact, KernelAbi, content_key
from pagedtune.kernels.build_nvrtc import BASE_FLAGS, compile_source, compiler_name
from pagedtune.kernels.cubin import Compiled, find_cached, needs_code, store

from .foreign import unpack

_HOST_HEADER = "foreign_host.h"
_EMPTIED = (
    "algorithm", "atomic", "cmath", "cstddef", "cstdint", "exception", "iostream", "limits", "memory", "sstream",
    "stdexcept", "stdint.h", "stdlib.h", "string", "tuple", "type_traits", "utility", "vector",
)  # fmt: skip
_STAND_INS = """
#pragma once
#include <cuda/std/algorithm>
#include <cuda/std/cmath>
#include <cuda/std/cstdint>
#include <cuda/std/limits>
#include <cuda/std/tuple>
#include <cuda/std/type_traits>
#include <cuda/std/utility>
namespace std {
using namespace cuda::std;
struct string {
  string(const char* = "") {}
  const char* c_str() const { return ""; }
};
struct exception {
  virtual const char* what() const noexcept { return ""; }
};
struct ostringstream {
  template <class T> ostringstream& operator<<(const T&) { return *this; }
  string str() const { return {}; }
};
struct ostream {
  template <class T> ostream& operator<<(const T&) { return *this; }
  ostream& operator<<(ostream& (*)(ostream&)) { return *this; }
};
inline ostream& endl(ostream& stream) { return stream; }
static ostream cout, cerr;
template <class T> struct vector {
  constexpr vector(size_t = 0) {}
  T* data() const { return nullptr; }
  T* begin() const { return nullptr; }
  T* end() const { return nullptr; }
  T& operator[](size_t) const { return *data(); }
  size_t size() const { return 0; }
  void push_back(const T&) {}
};
template <class T> struct atomic {
  constexpr atomic(T) {}
  T load(int) const { return {}; }
  void store(T, int) {}
};
enum { memory_order_relaxed };
}  // namespace std
"""
# The CUDA headers come first: they still need to know what a host function is.
_PRELUDE = """
#include <cooperative_groups.h>
#include <cuda_runtime.h>
struct cudaDeviceProp;
template <class... T> cudaError_t cudaGetDeviceProperties(T...);
template <class... T> cudaError_t cudaOccupancyMaxPotentialClusterSize(T...);
using ushort = unsigned short;
#undef __host__
#define __host__
#define thread_local
"""
_FLAGS = ("-default-device", "-diag-suppress=1105")  # 1105: a CUDA header that warns of its own inclusion


@dataclass(frozen=True)
class Instance:
    """One kernel.

    Args:
        expression: the template's instance, as C++ names it after the source.
        abi: its calling convention.
    """

    expression: str
    abi: KernelAbi


@dataclass(frozen=True)
class ForeignCuda:
    """Kernels of one wheel.

    Args:
        requirement: what pip downloads, e.g. `name==1.2`.
        folders: of the wheel, each ending in a slash, in which headers are looked for, in order.
        source: includes their headers and declares what the instances need.
        instances: by a name of ours.
        flags: that the project compiles its kernels with and that change the code.
    """

    requirement: str
    folders: tuple[str, ...]
    source: str
    instances: Mapping[str, Instance]
    flags: tuple[str, ...] = ()


def build_foreign(foreign: ForeignCuda, capability: int) -> dict[str, Artifact]:
    """One artifact with one entry for each instance, all from one compile; binaries and PTX lie in the user's cache.

    Raises:
        ForeignError: the wheel cannot be had.
        BuildError: NVRTC is missing or refused the source; the message carries its log.
    """
    compiler, instances = compiler_name(), foreign.instances
    flags = (f"--gpu-architecture=sm_{capability}", *BASE_FLAGS, *_FLAGS, *foreign.flags)
    texts = (foreign.requirement, foreign.folders, foreign.source, _PRELUDE, _STAND_INS)
    abis = {n: [list(i.abi.arg_types), sorted(i.abi.align.items()), list(i.abi.offsets)] for n, i in instances.items()}
    expressions = {n: i.expression for n, i in instances.items()}
    key = content_key({"texts": texts, "flags": flags, "compiler": compiler, "abi": abis, "instances": expressions})
    cached = {name: find_cached(_cache_name(foreign, name), key) for name in instances}
    found = {name: artifact for name, artifact in cached.items() if artifact is not None}
    if len(found) == len(instances):
        return found
    if not needs_code():
        flags = (f"--gpu-architecture=compute_{capability}", *flags[1:])
    target = unpack(foreign.requirement, foreign.folders)
    headers = dict.fromkeys(_EMPTIED, f'#include "{_HOST_HEADER}"\n') | {_HOST_HEADER: _STAND_INS}
    places = [f"-I{target / folder}" for folder in foreign.folders]
    output = compile_source(
        f"{foreign.requirement}.cu", _PRELUDE + foreign.source, headers, (*flags, *places), tuple(expressions.values())
    )
    built = {}
    for (name, instance), symbol in zip(instances.items(), output.symbols, strict=True):
        compiled = Compiled(
            output.cubin, output.ptx, compiler, flags, f"sm_{capability}", {symbol: instance.abi}, {symbol: 0}
        )
        built[name] = store(_cache_name(foreign, name), key, compiled)
    return built


def _cache_name(foreign: ForeignCuda, name: str) -> str:
    return f"{foreign.requirement.partition('==')[0]}-{name}"
