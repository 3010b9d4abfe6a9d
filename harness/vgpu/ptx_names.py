"""What names mean in the body of a function, scope by scope."""

from __future__ import annotations

import re

from .ptx_module import Function, Imm, Operand, Reg, Scope, Sink, Special, Symbol
from .ptx_tokens import PtxError

_SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]"
    r"|%(laneid|warpid|nwarpid|smid|nsmid|gridid|lanemask_(eq|le|lt|ge|gt)|clock|clock_hi|clock64|globaltimer"
    r"|globaltimer_lo|globaltimer_hi|dynamic_smem_size|total_smem_size|aggr_smem_size|is_explicit_cluster"
    r"|cluster_ctarank|cluster_nctarank)"
)


class Names:
    """The names of `function` as seen from the scope that is open, `scope`; the function's own is 0."""

    def __init__(self, function: Function) -> None:
        self._scopes = function.scopes
        self.scope = 0

    @property
    def current(self) -> Scope:
        """The open scope."""
        return self._scopes[self.scope]

    def enter(self) -> None:
        """Opens a scope within the current one."""
        self._scopes.append(Scope(self.scope))
        self.scope = len(self._scopes) - 1

    def leave(self) -> None:
        """Closes the current scope."""
        self.scope = self._scopes[self.scope].parent or 0

    def find_register(self, name: str) -> Reg | None:
        """The register of a name; one of a numbered range comes into being here."""
        scope: int | None = self.scope
        prefix, number = _numbered(name)
        while scope is not None:
            names = self._scopes[scope]
            if name in names.registers:
                return names.registers[name]
            if number and prefix in names.ranges:
                count, kind = names.ranges[prefix]
                if int(number) < count:
                    register = names.registers[name] = Reg(f"{name}@{scope}", kind)
                    return register
            scope = names.parent
        return None

    def operand(self, name: str, line: int) -> Operand:
        """What a word means as an operand.

        Raises:
            PtxError: it is written like a register and is none.
        """
        if name == "_":
            return Sink()
        if name == "WARP_SZ":
            return Imm(32)
        register = self.find_register(name)
        if register is not None:
            return register
        if _SPECIAL.fullmatch(name):
            return Special(name)
        if name.startswith("%"):
            raise PtxError(line, f"unknown register {name!r}")
        return Symbol(name, self.scope)


def _numbered(name: str) -> tuple[str, str]:
    """A name without the number at its end, and the number, "" if there is none; no number starts with a zero."""
    prefix = name.rstrip("0123456789")
    number = name[len(prefix) :]
    if number.startswith("0"):
        number = number.lstrip("0") or "0"
        prefix = name[: -len(number)]
    return prefix, number
