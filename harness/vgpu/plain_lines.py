"""Lines of PTX in the form that compilers write: one instruction, label or `.loc` a line.

Nearly all lines of a function are like this, so they are read without making tokens, and the text of an operand is
looked up where the function used it before. Whatever does not look exactly like this is left to the parser by tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .ptx_declare import immediate, parse_int
from .ptx_module import Address, Operand, Reg, Symbol, Vector
from .ptx_names import Names
from .ptx_tokens import PtxError

# Guard, opcode and operands of an instruction.
INSTRUCTION = re.compile(
    r"\s*+(?:@(!?%[\w$]++)\s++)?([A-Za-z_$%][\w$]*+(?:(?:\.|::)[\w$]++)*+)(?:\s++([^;\"/:@<>=*]*+))?;\s*+(?://.*)?"
)
# A label; or file and row of a `.loc`; or nothing.
OTHER = re.compile(r"\s*(?:([A-Za-z_$%][\w$]*):|\.loc\s+(\d+)\s+(\d+)\s+\d+(?=[\s/]|$))?\s*(?://.*)?")
_WORD = re.compile(r"[A-Za-z_$%][\w$]*(?:(?:\.|::)[\w$]+)*")
_NUMBER = re.compile(r"(-?)(0[xX][0-9a-fA-F]+|0[fF][0-9a-fA-F]{8}|\d+)")
_ADDRESS = re.compile(r"\[\s*([A-Za-z_$%][\w$]*)\s*(?:\+\s*(-?)(\d+)\s*)?\]")
_ITEM = re.compile(r"\{[^{}]*\}|[^,{}]+")


class NotPlainError(Exception):
    """A line that must be read by token."""


class PlainOperands(dict[str, Operand]):
    """Operands of one scope by their text.

    Args:
        names: what names mean in the scope, as long as it declares no more registers.
        read: an operand by token.
    """

    def __init__(self, names: Names, read: Callable[[str], Operand]) -> None:
        super().__init__()
        self._names = names
        self._read = read
        self._guards: dict[str, tuple[Reg, bool]] = {}

    def guard(self, text: str) -> tuple[Reg, bool]:
        """Register of a guard, and whether it is negated.

        Raises:
            NotPlainError: it is no predicate.
        """
        if text not in self._guards:
            register = self._names.find_register(text.removeprefix("!"))
            if register is None or register.type != "pred":
                raise NotPlainError
            self._guards[text] = (register, text[0] == "!")
        return self._guards[text]

    def split(self, text: str) -> tuple[Operand, ...]:
        """The operands of an instruction.

        Raises:
            NotPlainError: some must be read by token.
        """
        text = text.replace(", ", ",")
        if "{" not in text:
            return tuple([self[item] for item in text.split(",")])
        items: list[str] = _ITEM.findall(text)
        if ",".join(items) != text:
            raise NotPlainError
        return tuple([self[item] for item in items])

    def __missing__(self, text: str) -> Operand:
        operand = self._names.find_register(text) or self._word(text) or self._number(text)
        operand = operand or self._vector(text) or self._address(text) or self._read(text)
        self[text] = operand
        return operand

    def _word(self, text: str) -> Operand | None:
        if not _WORD.fullmatch(text):
            return None
        try:
            return self._names.operand(text, 0)
        except PtxError as error:
            raise NotPlainError from error

    def _number(self, text: str) -> Operand | None:
        found = _NUMBER.fullmatch(text)
        return immediate(found[2], -1 if found[1] else 1) if found else None

    def _vector(self, text: str) -> Operand | None:
        if text[:1] != "{" or text[-1] != "}":
            return None
        return Vector(tuple([self[item] for item in text[1:-1].strip().split(",")]))

    def _address(self, text: str) -> Operand | None:
        found = _ADDRESS.fullmatch(text)
        base = self[found[1]] if found else None
        if found is None or not isinstance(base, Reg | Symbol):
            return None
        offset = parse_int(found[3]) if found[3] else 0
        return Address(base, -offset if found[2] else offset)
