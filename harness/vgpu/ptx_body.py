"""The body of one PTX function: blocks, declarations, labels and instructions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from .plain_lines import INSTRUCTION, OTHER, NotPlainError, PlainOperands
from .ptx_declare import immediate, parse_int, parse_variable
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
    Symbol,
    Vector,
)
from .ptx_names import Names
from .ptx_tokens import Cursor, PtxError

_DATA_SPACES = (".shared", ".local", ".global", ".const", ".param")


class BodyParser:
    """Fills `function` from the tokens of its braces."""

    def __init__(self, cursor: Cursor, function: Function, files: Mapping[int, str], by_token: bool = False) -> None:
        self._cursor = cursor
        self._function = function
        self._files = files
        self._by_token = by_token
        self._names = Names(function)
        self._source = ""
        self._known: dict[int, PlainOperands] = {}  # by scope

    def parse(self) -> None:
        """Parses `{ ... }`."""
        start = self._cursor.expect("{")
        depth = 1
        while depth:
            if not self._by_token:
                self._plain_lines()
            token = self._cursor.current
            if token.kind == "end":
                raise PtxError(start.line, f"the body of {self._function.name} is never closed")
            if token.text == "{":
                self._cursor.take()
                self._names.enter()
                depth += 1
            elif token.text == "}":
                self._cursor.take()
                self._names.leave()
                depth -= 1
            elif token.kind == "directive":
                self._directive()
            elif self._cursor.peek().text == ":" and token.kind == "word":
                self._label()
            elif not self._cursor.accept(";"):
                self._function.body.append(self._instruction())

    def _plain_lines(self) -> None:
        """Takes lines of one plain instruction, label or `.loc` each, up to one that must be read by token."""
        cursor, append = self._cursor, self._function.body.append
        at = cursor.whole_line
        if at is None:
            return
        scope = self._names.scope
        known = self._known.get(scope)
        if known is None:
            known = self._known[scope] = PlainOperands(self._names, self._read_operand)
        plain, guard_of, split = INSTRUCTION.fullmatch, known.guard, known.split
        try:
            for text in itertools.islice(cursor.lines, at, None):
                found = plain(text)
                at += 1
                if found is None:
                    self._plain_line(text, at)
                    continue
                guard, opcode, operands = found.groups()
                register, negated = guard_of(guard) if guard else (None, False)
                items = split(operands) if operands else ()
                append(Instruction(opcode, items, at, register, negated, self._source))
        except NotPlainError:
            at -= 1
        cursor.go_to(at)

    def _plain_line(self, text: str, line: int) -> None:
        found = OTHER.fullmatch(text)
        if found is None:
            raise NotPlainError
        label, file, row = found.groups()
        if label:
            if label in self._names.current.labels:
                raise NotPlainError
            self._place_label(label, line)
        elif file:
            self._set_source(int(file), int(row))

    def _read_operand(self, text: str) -> Operand:
        """An operand by token, out of its line."""
        outer, self._cursor = self._cursor, Cursor(text)
        try:
            operand = self._operand()
            if self._cursor.current.kind != "end":
                raise NotPlainError
        except PtxError as error:
            raise NotPlainError from error
        finally:
            self._cursor = outer
        return operand

    def _label(self) -> None:
        name = self._cursor.take()
        self._cursor.expect(":")
        self._place_label(name.text, name.line)

    def _place_label(self, name: str, line: int) -> None:
        if name in self._names.current.labels:
            raise PtxError(line, f"label {name} occurs twice")
        unique = f"{name}@{self._names.scope}"
        self._names.current.labels[name] = unique
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
            self._names.current.variables[variable.name] = variable
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
        self._names.current.tables[last.name.partition("@")[0]] = tuple(targets)

    def _loc(self) -> None:
        cursor = self._cursor
        line = cursor.take().line
        self._set_source(int(cursor.take().text), int(cursor.take().text))
        if cursor.line == line:
            cursor.skip_line()

    def _set_source(self, file: int, row: int) -> None:
        self._source = f"{self._files.get(file, file)}:{row}" if row else ""

    def _registers(self) -> None:
        cursor = self._cursor
        start = cursor.take()
        self._known.pop(self._names.scope, None)  # a name may mean another thing from here on
        kind = cursor.expect_kind("directive", "a register type").text[1:]
        if kind not in TYPE_BYTES:
            raise PtxError(start.line, f"unknown register type .{kind}")
        while True:
            name = cursor.expect_kind("word", "a register name").text
            if cursor.accept("<"):
                count = int(cursor.expect_kind("number", "a register count").text)
                cursor.expect(">")
                self._names.current.ranges[name] = (count, kind)
            else:
                self._names.current.registers[name] = Reg(f"{name}@{self._names.scope}", kind)
            if not cursor.accept(","):
                break
        cursor.expect(";")

    def _instruction(self) -> Instruction:
        cursor = self._cursor
        line, guard, negated = cursor.line, None, False
        if cursor.accept("@"):
            negated = cursor.accept("!")
            name = cursor.expect_kind("word", "a predicate")
            guard = self._names.find_register(name.text)
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
            register = self._names.find_register(token.text)
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
            return immediate(token.text, sign)
        if token.kind != "word" or sign < 0:
            raise PtxError(token.line, f"unexpected {token.text!r} where an operand should be")
        return self._names.operand(token.text, token.line)
