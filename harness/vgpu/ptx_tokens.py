"""Tokens of PTX text, with their lines."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\f\v]+)
  | (?P<newline>\n)
  | (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<number>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
       |\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)
  | (?P<word>[A-Za-z_$%][\w$]*(?:(?:\.|::)[\w$]+)*)
  | (?P<directive>\.[A-Za-z_]\w*(?:::\w+)*)
  | (?P<punct>[{}()\[\],;:@!+\-<>|=*])
    """,
    re.VERBOSE | re.DOTALL,
)


class PtxError(ValueError):
    """PTX that cannot be run; the message names the line and what was found there."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"PTX line {line}: {message}")
        self.line = line


@dataclass(frozen=True, slots=True)
class Token:
    """One token. `kind` is `word`, `directive`, `number`, `string`, `punct` or `end`."""

    kind: str
    text: str
    line: int


def tokenize(text: str) -> list[Token]:
    """All tokens of `text`, ended by one of kind `end`.

    Raises:
        PtxError: a character that no token starts with.
    """
    tokens: list[Token] = []
    at, line, size = 0, 1, len(text)
    while at < size:
        match = _TOKEN.match(text, at)
        if match is None:
            raise PtxError(line, f"unexpected character {text[at]!r}")
        kind, found = match.lastgroup or "", match.group()
        at = match.end()
        if kind in ("newline", "comment"):
            line += found.count("\n")
        elif kind != "space":
            tokens.append(Token(kind, found, line))
    tokens.append(Token("end", "end of file", line))
    return tokens


class Cursor:
    """A position in a list of tokens."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0

    @property
    def current(self) -> Token:
        """The token at the position."""
        return self._tokens[self._at]

    @property
    def line(self) -> int:
        """Its line."""
        return self.current.line

    def peek(self, ahead: int = 1) -> Token:
        """A token further on."""
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)]

    def take(self) -> Token:
        """The current token; the position moves on."""
        token = self.current
        if token.kind != "end":
            self._at += 1
        return token

    def at(self, *texts: str) -> bool:
        """Whether the current token is one of `texts`."""
        return self.current.text in texts and self.current.kind != "string"

    def accept(self, text: str) -> bool:
        """Takes the current token if it is `text`."""
        if self.at(text):
            self.take()
            return True
        return False

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
