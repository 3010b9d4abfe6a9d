"""Tokens of PTX text, with their lines."""

from __future__ import annotations

import re
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
    (?P<comment>//.*)
  | (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<number>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
       |\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)
  | (?P<word>[A-Za-z_$%][\w$]*(?:(?:\.|::)[\w$]+)*)
  | (?P<directive>\.[A-Za-z_]\w*(?:::\w+)*)
  | (?P<punct>[{}()\[\],;:@!+\-<>|=*])
  | (?P<other>\S)
    """,
    re.VERBOSE,
)
_BLOCK_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


class PtxError(ValueError):
    """PTX that cannot be run; the message names the line and what was found there."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"PTX line {line}: {message}")
        self.line = line


class Token(NamedTuple):
    """One token. `kind` is `word`, `directive`, `number`, `string`, `punct` or `end`."""

    kind: str
    text: str
    line: int


def tokenize_line(text: str, line: int) -> list[Token]:
    """The tokens of one line, which holds no block comment.

    Raises:
        PtxError: a character that no token starts with.
    """
    tokens: list[Token] = []
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or ""
        if kind == "other":
            raise PtxError(line, f"unexpected character {match[0]!r}")
        if kind != "comment":
            tokens.append(Token(kind, match[0], line))
    return tokens


class Cursor:
    """A position in a text. Lines become tokens when the position reaches them; `lines` are without block comments."""

    def __init__(self, text: str) -> None:
        if "/*" in text:
            text = _BLOCK_COMMENT.sub(lambda m: "\n" * m[0].count("\n"), text)
        self.lines = text.split("\n")
        self._next = 0  # line that becomes tokens next
        self._tokens: list[Token] = []
        self._at = 0

    def check_characters(self) -> None:
        """Reads every line, those after the position too.

        Raises:
            PtxError: a character that no token starts with.
        """
        for line, content in enumerate(self.lines, 1):
            tokenize_line(content, line)

    @property
    def whole_line(self) -> int | None:
        """Index of the line that the position is before, None where it is within a line."""
        return self._next if self._at == len(self._tokens) else None

    def go_to(self, line: int) -> None:
        """Moves from before one line to before another one further on, given by its index."""
        self._next = line

    def _fill(self, count: int) -> None:
        """Makes tokens until `count` follow the position, or the text ends."""
        tokens = self._tokens
        while len(tokens) < self._at + count and self._next <= len(self.lines):
            if self._next < len(self.lines):
                tokens += tokenize_line(self.lines[self._next], self._next + 1)
            else:
                tokens.append(Token("end", "end of file", self._next))
            self._next += 1

    @property
    def current(self) -> Token:
        """The token at the position."""
        if self._at == len(self._tokens):
            self._fill(1)
        return self._tokens[self._at]

    @property
    def line(self) -> int:
        """Its line."""
        return self.current.line

    def peek(self, ahead: int = 1) -> Token:
        """A token further on."""
        self._fill(ahead + 1)
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)]

    def take(self) -> Token:
        """The current token; the position moves on."""
        token = self.current
        if token.kind != "end":
            self._at += 1
        return token

    def at(self, *texts: str) -> bool:
        """Whether the current token is one of `texts`."""
        token = self.current
        return token.text in texts and token.kind != "string"

    def accept(self, text: str) -> bool:
        """Takes the current token if it is `text`."""
        token = self.current
        if token.text != text or token.kind in ("string", "end"):
            return False
        self._at += 1
        return True

    def expect(self, text: str) -> Token:
        """Takes the current token, which must be `text`.

        Raises:
            PtxError: it is another one.
        """
        if not self.at(text):
            raise PtxError(self.line, f"expected {text!r}, found {self.current.text!r}")
        return self.take()

    def expect_kind(self, kind: str, what: str) -> Token:
        """Takes the current token, which must be of `kind`; `what` names it in the error."""
        if self.current.kind != kind:
            raise PtxError(self.line, f"expected {what}, found {self.current.text!r}")
        return self.take()

    def skip_braces(self) -> None:
        """Skips a balanced `{ ... }`."""
        start = self.expect("{")
        depth = 1
        while depth:
            token = self.take()
            if token.kind == "end":
                raise PtxError(start.line, "this brace is never closed")
            depth += (token.text == "{") - (token.text == "}")

    def skip_line(self) -> None:
        """Skips the rest of the current token's line."""
        line = self.line
        while self.line == line and self.current.kind != "end":
            self.take()
