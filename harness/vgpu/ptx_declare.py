"""Declarations and literals of PTX."""

from __future__ import annotations

import re
import struct

from .ptx_module import TYPE_BYTES, Imm, Variable
from .ptx_tokens import Cursor, PtxError


def parse_int(text: str) -> int:
    """The value of an integer literal."""
    text = text.rstrip("U")
    if re.fullmatch(r"0[0-7]+", text):
        return int(text, 8)
    return int(text, 0)


def immediate(text: str, sign: int) -> Imm:
    """The operand that a number is, with a sign of 1 or -1 before it."""
    prefix = text[:2].lower()
    if prefix == "0f" and len(text) == 10:
        return Imm(int(text[2:], 16) ^ (1 << 31 if sign < 0 else 0), 32)
    if prefix == "0d" and len(text) == 18:
        return Imm(int(text[2:], 16) ^ (1 << 63 if sign < 0 else 0), 64)
    if prefix != "0x" and re.search(r"[.eE]", text):
        return Imm(sign * float(text))
    return Imm(sign * parse_int(text))


def parse_variable(cursor: Cursor, end: bool = True) -> Variable:
    """A variable declaration from its state space on; `end` takes the closing semicolon.

    Raises:
        PtxError: it is malformed or of an unknown type.
    """
    start = cursor.take()
    space, align, vector, kind = start.text[1:], 0, 1, ""
    if space == "reg":
        space = "param"  # functions of very old compilers pass registers
    while cursor.current.kind == "directive":
        word = cursor.take().text[1:]
        if word == "align":
            value = parse_int(cursor.expect_kind("number", "an alignment").text)
            align = align or value if kind else value  # after the type: of what a pointer points to
        elif word in ("v2", "v4"):
            vector = int(word[1])
        elif word in TYPE_BYTES:
            kind = word
        elif word not in ("ptr", "global", "shared", "const", "local", "managed", "attribute"):
            raise PtxError(start.line, f"unexpected .{word} in a declaration")
    if not kind:
        raise PtxError(start.line, "a declaration without a type")
    name = cursor.expect_kind("word", "a variable name").text
    count = _array_size(cursor)
    size = TYPE_BYTES[kind] * vector
    data = _initialiser(cursor, kind) if cursor.accept("=") else None
    if end:
        cursor.expect(";")
    if count == 0 and data is not None:
        count = len(data) // size
    natural = size if not (space == "param" and kind == "b8") else 1
    return Variable(name, space, kind, size * count, align if align > natural else natural, data)


def _array_size(cursor: Cursor) -> int:
    count = 1
    while cursor.accept("["):
        if cursor.accept("]"):
            count = 0
            continue
        count *= parse_int(cursor.expect_kind("number", "an array size").text)
        cursor.expect("]")
    return count


def _initialiser(cursor: Cursor, kind: str) -> bytes:
    """Bytes of an initialiser: numbers, in braces of any depth."""
    size = TYPE_BYTES[kind]
    if not cursor.at("{"):
        return _encode(cursor, kind, size)
    cursor.take()
    data = b""
    while not cursor.accept("}"):
        data += _initialiser(cursor, kind)
        cursor.accept(",")
    return data


def _encode(cursor: Cursor, kind: str, size: int) -> bytes:
    negative = cursor.accept("-")
    token = cursor.take()
    if token.kind != "number":
        raise PtxError(token.line, f"only numbers can initialise a variable, not {token.text!r}")
    text = token.text
    if text[:2].lower() in ("0f", "0d") and len(text) in (10, 18):
        return int(text[2:], 16).to_bytes(size, "little")
    if kind in ("f32", "f64"):
        value = float(text) * (-1 if negative else 1)
        return struct.pack("<f" if kind == "f32" else "<d", value)
    number = parse_int(text) * (-1 if negative else 1)
    return (number & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
