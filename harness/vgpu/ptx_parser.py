"""PTX text -> `Module`."""

from __future__ import annotations

from .ptx_body import BodyParser
from .ptx_declare import parse_int, parse_variable
from .ptx_module import Function, Module, Scope, Variable
from .ptx_tokens import Cursor, PtxError

SPACES = (".shared", ".local", ".global", ".const", ".param")
_LINKAGE = (".visible", ".extern", ".weak", ".common")
_FUNCTION_DIRECTIVES = (
    ".reqntid", ".maxntid", ".minnctapersm", ".maxnreg", ".maxnctapersm", ".noreturn", ".explicitcluster",
    ".reqnctapercluster", ".maxclusterrank", ".blocksareclusters", ".pragma", ".abi_preserve",
)  # fmt: skip


def parse(text: str, by_token: bool = False) -> Module:
    """The module that `text` holds.

    Args:
        text: PTX.
        by_token: read every line token by token, the plain ones too: slow, and the same.

    Raises:
        PtxError: it does not parse; the message names the line.
    """
    cursor = Cursor(text)
    try:
        return _ModuleParser(cursor, by_token).parse()
    except PtxError:
        cursor.check_characters()  # an unknown character anywhere comes first: this may be no PTX at all
        raise


class _ModuleParser:
    def __init__(self, cursor: Cursor, by_token: bool) -> None:
        self._cursor = cursor
        self._by_token = by_token
        self._files: dict[int, str] = {}
        self._version = self._target = ""
        self._functions: dict[str, Function] = {}
        self._variables: dict[str, Variable] = {}

    def parse(self) -> Module:
        while self._cursor.current.kind != "end":
            self._statement()
        if not self._version or not self._target:
            raise PtxError(1, "no .version and .target: this is not PTX")
        return Module(self._version, self._target, self._functions, self._variables)

    def _statement(self) -> None:
        cursor = self._cursor
        while cursor.at(*_LINKAGE):
            cursor.take()
        token = cursor.current
        if token.text == ".version":
            cursor.take()
            self._version = cursor.take().text
        elif token.text == ".target":
            cursor.take()
            self._target = cursor.take().text
            if cursor.line == token.line:
                cursor.skip_line()
        elif token.text == ".address_size":
            cursor.take()
            if cursor.take().text != "64":
                raise PtxError(token.line, "only 64-bit addresses are supported")
        elif token.text == ".file":
            self._file()
        elif token.text == ".section":
            cursor.take()
            cursor.take()
            cursor.skip_braces()
        elif token.text in (".entry", ".func"):
            self._function()
        elif token.text in SPACES:
            variable = parse_variable(cursor)
            self._variables[variable.name] = variable
        elif token.text in (".alias", ".pragma"):
            cursor.skip_line()
        else:
            raise PtxError(token.line, f"unexpected {token.text!r} at module scope")

    def _file(self) -> None:
        cursor = self._cursor
        line = cursor.take().line
        index = int(cursor.expect_kind("number", "a file number").text)
        self._files[index] = cursor.expect_kind("string", "a file name").text.strip('"').rpartition("/")[2]
        if cursor.line == line:
            cursor.skip_line()

    def _function(self) -> None:
        cursor = self._cursor
        start = cursor.take()
        results = self._params() if cursor.at("(") else ()
        name = cursor.expect_kind("word", "a function name").text
        params = self._params() if cursor.at("(") else ()
        function = Function(name, start.text == ".entry", params, results, line=start.line)
        while cursor.at(*_FUNCTION_DIRECTIVES):
            directive = cursor.take().text[1:]
            numbers: list[int] = []
            while cursor.current.kind in ("number", "string") or cursor.at(","):
                token = cursor.take()
                if token.kind == "number":
                    numbers.append(parse_int(token.text))
            function.directives[directive] = tuple(numbers)
        if cursor.accept(";"):
            self._functions.setdefault(name, function)
            return
        function.scopes.append(Scope(None))
        BodyParser(cursor, function, self._files, self._by_token).parse()
        self._functions[name] = function

    def _params(self) -> tuple[Variable, ...]:
        cursor = self._cursor
        cursor.expect("(")
        params: list[Variable] = []
        while not cursor.accept(")"):
            params.append(parse_variable(cursor, end=False))
            if not cursor.at(")"):
                cursor.expect(",")
        return tuple(params)
