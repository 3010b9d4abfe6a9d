"""The body of one PTX function: blocks, declarations, labels and instructions."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .ptx_declare import parse_int, parse_variable
from .ptx_module import (
    TYPE_BYTES,
    Address,
    Function,
    Group,
    Imm,
    Instruction,
    Label,
    Not,
    Operand,
    Pair,
    Reg,
    Scope,
    Sink,
    Special,
    Symbol,
    Vector,
)
from .ptx_tokens import Cursor, PtxError

_SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]"
    r"|%(laneid|warpid|nwarpid|smid|nsmid|gridid|lanemask_(eq|le|lt|ge|gt)|clock|clock_hi|clock64|globaltimer"
    r"|globaltimer_lo|globaltimer_hi|dynamic_smem_size|total_smem_size|aggr_smem_size|is_explicit_cluster"
    r"|cluster_ctarank|cluster_nctarank)"
)
_NUMBERED = re.compile(r"(.*?)(0|[1-9]\d*)")
_DATA_SPACES = (".shared", ".local", ".global", ".const", ".param")


class BodyParser:
    """Fills `function` from the tokens of its braces."""

    def __init__(self, cursor: Cursor, function: Function, files: Mapping[int, str]) -> None:
        self._cursor = cursor
        self._function = function
        self._files = files
        self._scope = 0
        self._source = ""

    def parse(self) -> None:
        """Parses `{ ... }`."""
        start = self._cursor.expect("{")
        depth = 1
        while depth:
            token = self._cursor.current
            if token.kind == "end":
                raise PtxError(start.line, f"the body of {self._function.name} is never closed")
            if token.text == "{":
                self._cursor.take()
                self._function.scopes.append(Scope(self._scope))
                self._scope = len(self._function.scopes) - 1
                depth += 1
            elif token.text == "}":
                self._cursor.take()
                self._scope = self._function.scopes[self._scope].parent or 0
                depth -= 1
            elif token.kind == "directive":
                self._directive()
            elif self._cursor.peek().text == ":" and token.kind == "word":
                self._label()
            elif not self._cursor.accept(";"):
                self._function.body.append(self._instruction())

    @property
    def _names(self) -> Scope:
        return self._function.scopes[self._scope]

    def _label(self) -> None:
        name = self._cursor.take()
        self._cursor.expect(":")
        if name.text in self._names.labels:
            raise PtxError(name.line, f"label {name.text} occurs twice")
        unique = f"{name.text}@{self._scope}"
        self._names.labels[name.text] = unique
        self._function.body.append(Label(unique))

    def _directive(self) -> None:
        cursor = self._cursor
        token = cursor.current
        if token.text == ".loc":
            self._loc()
        elif token.text == ".reg":
            self._registers()
        elif token.text in _DATA_SPACES:
            variable = parse_variable(cursor)
            self._names.variables[variable.name] = variable
        elif token.text == ".branchtargets":
            self._branch_table()
        elif token.text in (".pragma", ".callprototype", ".calltargets"):
            while not cursor.accept(";"):
                if cursor.take().kind == "end":
                    raise PtxError(token.line, f"{token.text} is never ended")
        else:
            raise PtxError(token.line, f"unknown directive {token.text!r}")

    def _branch_table(self) -> None:
        cursor = self._cursor
        line = cursor.take().line
        last = self._function.body[-1] if self._function.body else None
        if not isinstance(last, Label):
            raise PtxError(line, ".branchtargets without a label before it")
        targets = [cursor.expect_kind("word", "a label").text]
        while cursor.accept(","):
            targets.append(cursor.expect_kind("word", "a label").text)
        cursor.expect(";")
        self._names.tables[last.name.partition("@")[0]] = tuple(targets)

    def _loc(self) -> None:
        cursor = self._cursor
        line = cursor.take().line
        index, row = int(cursor.take().text), int(cursor.take().text)
        self._source = f"{self._files.get(index, index)}:{row}" if row else ""
        if cursor.line == line:
            cursor.skip_line()

    def _registers(self) -> None:
        cursor = self._cursor
        start = cursor.take()
        kind = cursor.expect_kind("directive", "a register type").text[1:]
        if kind not in TYPE_BYTES:
            raise PtxError(start.line, f"unknown register type .{kind}")
        while True:
            name = cursor.expect_kind("word", "a register name").text
            if cursor.accept("<"):
                count = int(cursor.expect_kind("number", "a register count").text)
                cursor.expect(">")
                self._names.ranges[name] = (count, kind)
            else:
                self._names.registers[name] = Reg(f"{name}@{self._scope}", kind)
            if not cursor.accept(","):
                break
        cursor.expect(";")

    def _instruction(self) -> Instruction:
        cursor = self._cursor
        line, guard, negated = cursor.line, None, False
        if cursor.accept("@"):
            negated = cursor.accept("!")
            name = cursor.expect_kind("word", "a predicate")
            guard = self._find_register(name.text)
            if guard is None or guard.type != "pred":
                raise PtxError(name.line, f"guard {name.text!r} is not a predicate register")
        opcode = cursor.expect_kind("word", "an instruction").text
        operands: list[Operand] = []
        while not cursor.at(";"):
            operands.append(self._operand())
            if not cursor.at(";"):
                cursor.expect(",")
        cursor.expect(";")
        return Instruction(opcode, tuple(operands), line, guard, negated, self._source)

    def _operand(self) -> Operand:
        cursor = self._cursor
        if cursor.at("{"):
            return Vector(self._list("{", "}"))
        if cursor.at("("):
            return Group(self._list("(", ")"))
        if cursor.accept("["):
            return self._address()
        if cursor.accept("!"):
            token = cursor.expect_kind("word", "a predicate")
            register = self._find_register(token.text)
            if register is None:
                raise PtxError(token.line, f"unknown register {token.text!r}")
            return Not(register)
        first = self._simple()
        if cursor.accept("|"):
            return Pair(first, self._simple())
        return first

    def _list(self, opening: str, closing: str) -> tuple[Operand, ...]:
        cursor = self._cursor
        cursor.expect(opening)
        items: list[Operand] = []
        while not cursor.accept(closing):
            items.append(self._operand())
            if not cursor.at(closing):
                cursor.expect(",")
        return tuple(items)

    def _address(self) -> Address:
        cursor = self._cursor
        base = self._simple()
        if not isinstance(base, Reg | Symbol | Imm):
            raise PtxError(cursor.line, "an address must be a register, a variable or a number")
        offset = 0
        while cursor.at("+", "-"):
            sign = -1 if cursor.take().text == "-" else 1
            if cursor.accept("-"):
                sign = -sign
            offset += sign * parse_int(cursor.expect_kind("number", "an offset").text)
        cursor.expect("]")
        return Address(base, offset)

    def _simple(self) -> Operand:
        cursor = self._cursor
        sign = -1 if cursor.accept("-") else 1
        token = cursor.take()
        if token.kind == "number":
            return _immediate(token.text, sign)
        if token.kind != "word" or sign < 0:
            raise PtxError(token.line, f"unexpected {token.text!r} where an operand should be")
        if token.text == "_":
            return Sink()
        if token.text == "WARP_SZ":
            return Imm(32)
        register = self._find_register(token.text)
        if register is not None:
            return register
        if _SPECIAL.fullmatch(token.text):
            return Special(token.text)
        if token.text.startswith("%"):
            raise PtxError(token.line, f"unknown register {token.text!r}")
        return Symbol(token.text, self._scope)

    def _find_register(self, name: str) -> Reg | None:
        scope: int | None = self._scope
        numbered = _NUMBERED.fullmatch(name)
        while scope is not None:
            names = self._function.scopes[scope]
            if name in names.registers:
                return names.registers[name]
            if numbered and numbered[1] in names.ranges:
                count, kind = names.ranges[numbered[1]]
                if int(numbered[2]) < count:
                    register = Reg(f"{name}@{scope}", kind)
                    names.registers[name] = register
                    return register
            scope = names.parent
        return None


def _immediate(text: str, sign: int) -> Imm:
    prefix = text[:2].lower()
    if prefix == "0f" and len(text) == 10:
        return Imm(int(text[2:], 16) ^ (1 << 31 if sign < 0 else 0), 32)
    if prefix == "0d" and len(text) == 18:
        return Imm(int(text[2:], 16) ^ (1 << 63 if sign < 0 else 0), 64)
    if prefix != "0x" and re.search(r"[.eE]", text):
        return Imm(sign * float(text))
    return Imm(sign * parse_int(text))
