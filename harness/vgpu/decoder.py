"""`Module` -> `Program` of one entry: decodes every instruction, inlines calls, resolves branches."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from . import decode_arith as arith
from . import decode_memory as memory
from . import decode_warp as warp
from .assembly import assemble
from .emitter import Emitter, Frame
from .program import InstructionClass, Operation, Program
from .ptx_module import Function, Group, Imm, Instruction, Label, Module, Operand, Reg, Symbol
from .ptx_tokens import PtxError

MAX_CALL_DEPTH = 16

# Instructions of asynchronous hardware that this core does not model.
_UNSUPPORTED = (
    "mbarrier", "cp.async.bulk", "cp.async.mbarrier", "cp.reduce.async.bulk", "wgmma", "tcgen05", "multimem",
    "st.async", "red.async", "mapa", "getctarank", "barrier.cluster", "tensormap", "clusterlaunchcontrol",
    "fence.mbarrier_init", "st.bulk", "mma.sp", "wmma", "tex", "sust", "suld", "vprintf",
)  # fmt: skip

Rule = Callable[[Emitter, Instruction], None]
_RULES: dict[str, Rule] = {
    **dict.fromkeys(arith.SIGNATURES, arith.arithmetic),
    **dict.fromkeys(("selp", "slct"), arith.select),
    **dict.fromkeys(("setp", "set"), arith.compare),
    "testp": arith.test_property,
    **dict.fromkeys(("prmt", "lop3", "shf", "dp4a", "dp2a"), arith.bit_fields),
    "cvt": arith.convert,
    "mov": memory.move,
    **dict.fromkeys(("ld", "ldu", "st"), memory.load_store),
    **dict.fromkeys(("atom", "red"), memory.atomic),
    "cp": memory.async_copy,
    **dict.fromkeys(("fence", "membar"), memory.fence),
    "cvta": memory.convert_address,
    "isspacep": memory.test_space,
    **dict.fromkeys(("prefetch", "prefetchu", "discard", "applypriority", "createpolicy"), memory.cache_hint),
    "shfl": warp.shuffle,
    "vote": warp.vote,
    "match": warp.match,
    "redux": warp.reduce,
    "elect": warp.elect,
    "activemask": warp.active_mask,
    **dict.fromkeys(("ldmatrix", "stmatrix"), warp.matrix_memory),
    "movmatrix": warp.move_matrix,
    "mma": warp.matrix_multiply,
    **dict.fromkeys(("bar", "barrier"), warp.barrier),
}
_NO_EFFECT = ("griddepcontrol", "setmaxnreg", "pmevent", "nop")


def decode(module: Module, entry: str) -> Program:
    """The program of `entry`.

    Raises:
        ValueError: the module has no such entry.
        PtxError: an instruction is unknown, malformed or not supported; the message names it and its line.
    """
    function = module.functions.get(entry)
    if function is None or not function.is_entry:
        entries = sorted(n for n, f in module.functions.items() if f.is_entry)
        raise ValueError(f"the PTX has no entry {entry!r}; it has {', '.join(entries) or 'none'}")
    return _Decoder(module, function).run()


@lru_cache(maxsize=4096)
def _rule(opcode: str) -> tuple[str, str, Rule | None]:
    """The first word of an opcode; what it would need that is not modelled, or ""; and the rule that decodes it."""
    unsupported = next((u for u in _UNSUPPORTED if opcode == u or opcode.startswith((u + ".", u + "::"))), "")
    base = opcode.partition(".")[0]
    return base, unsupported, _RULES.get(base)


def decode_one(emitter: Emitter, instruction: Instruction) -> None:
    """Decodes one instruction of the emitter's entry.

    Raises:
        PtxError: it is unknown, malformed or not supported.
    """
    decoder = _Decoder(emitter.module, emitter.entry)
    decoder.emitter = emitter
    decoder.instruction(instruction)


class _Decoder:
    def __init__(self, module: Module, entry: Function) -> None:
        self.emitter = Emitter(module, entry)
        self._calls = 0
        self._stack: list[str] = []

    def run(self) -> Program:
        e = self.emitter
        e.lay_out_shared()
        self._function(e.frame)
        if not e.emitted or e.emitted[-1].operation.key != "exit" or e.emitted[-1].guard >= 0:
            e.start(Instruction("exit", (), e.entry.line))
            e.emit(Operation("exit", cls=InstructionClass.CONTROL))
        return assemble(e)

    def _function(self, frame: Frame) -> None:
        e = self.emitter
        outer, e.frame = e.frame, frame
        for item in frame.function.body:
            if isinstance(item, Label):
                e.place_label(frame.prefix + item.name)
            else:
                self.instruction(item)
        if frame.prefix:
            e.place_label(frame.prefix + "return")
        e.frame = outer

    def instruction(self, instruction: Instruction) -> None:
        """Decodes one instruction."""
        self.emitter.start(instruction)
        opcode = instruction.opcode
        base, unsupported, rule = _rule(opcode)
        if unsupported:
            raise PtxError(instruction.line, f"{opcode} is not supported: the virtual GPU has no {unsupported}")
        try:
            if rule is not None:
                rule(self.emitter, instruction)
            else:
                self._control(instruction, base)
        except (IndexError, KeyError, ValueError) as error:
            if isinstance(error, PtxError):
                raise
            raise PtxError(instruction.line, f"{opcode}: operands or modifiers are not understood ({error})") from error

    def _control(self, instruction: Instruction, base: str) -> None:
        e = self.emitter
        control = InstructionClass.CONTROL
        if base == "bra":
            e.emit(Operation("bra", cls=control, target=self._label(instruction.operands[0])))
        elif base == "brx":
            self._branch_table(instruction)
        elif base == "ret" and e.frame.prefix:
            e.emit(Operation("bra", cls=control, target=e.frame.prefix + "return"))
        elif base in ("ret", "exit"):
            e.emit(Operation("exit", cls=control))
        elif base in ("trap", "brkpt", "nanosleep"):
            e.emit(Operation(base, cls=control))
        elif instruction.opcode == "griddepcontrol.wait":
            e.emit(Operation("griddepcontrol.wait", cls=InstructionClass.BARRIER))
        elif base in _NO_EFFECT:
            e.emit(Operation("nop", cls=control))
        elif base == "call":
            self._call(instruction)
        else:
            raise PtxError(instruction.line, f"unknown instruction {instruction.opcode!r}")

    def _label(self, operand: Operand) -> str:
        if not isinstance(operand, Symbol):
            raise self.emitter.error("a label was expected")
        return self.emitter.find_label(operand)

    def _branch_table(self, instruction: Instruction) -> None:
        """brx.idx as a chain of compares."""
        e = self.emitter
        index, table = instruction.operands
        if not isinstance(table, Symbol):
            raise e.error("a table of labels was expected")
        scope: int | None = table.scope
        targets: tuple[str, ...] | None = None
        while scope is not None and targets is None:
            targets = e.frame.function.scopes[scope].tables.get(table.name)
            scope = e.frame.function.scopes[scope].parent
        if targets is None:
            raise e.error(f"unknown table {table.name!r}")
        row, hit = e.source(index, "u32"), e.temporary(0)
        for k, target in enumerate(targets):
            ops = (hit, 0, row, e.constant(k, 4), 0)
            e.emit(Operation("setp.eq.u32", ops, cls=InstructionClass.PREDICATE))
            label = e.find_label(Symbol(target, table.scope))
            e.emit(Operation("bra", cls=InstructionClass.CONTROL, target=label), guard=(hit, False))
        e.emit(Operation("trap", cls=InstructionClass.CONTROL))

    def _call(self, instruction: Instruction) -> None:
        e = self.emitter
        operands = list(instruction.operands)
        results: tuple[Operand, ...] = ()
        if isinstance(operands[0], Group):
            results = operands[0].items
            operands.pop(0)
        target = operands.pop(0)
        arguments = operands[0].items if operands and isinstance(operands[0], Group) else ()
        if not isinstance(target, Symbol):
            raise e.error("calls through a register are not supported")
        function = e.module.functions.get(target.name)
        if target.name in ("__assertfail", "__assert_fail"):
            e.emit(Operation("trap", cls=InstructionClass.CONTROL))
            return
        if function is None or not function.body:
            raise e.error(f"function {target.name!r} has no body here: it is not supported")
        if target.name in self._stack or len(self._stack) >= MAX_CALL_DEPTH:
            raise e.error(f"recursive call of {target.name}")
        self._inline(function, results, arguments)

    def _inline(self, function: Function, results: tuple[Operand, ...], arguments: tuple[Operand, ...]) -> None:
        e = self.emitter
        if len(results) != len(function.results) or len(arguments) != len(function.params):
            raise e.error(f"{function.name} takes {len(function.params)} arguments")
        self._calls += 1
        frame = Frame(function, f"{e.frame.prefix}{function.name}#{self._calls}/")
        formal = (*function.results, *function.params)
        for variable, actual in zip(formal, (*results, *arguments), strict=True):
            frame.params[variable.name] = self._parameter(actual, variable.num_bytes, variable.align)
        call = e.instruction
        skip = f"{frame.prefix}skip"
        if call.guard is not None:
            row, negated = e.guard()
            e.emit(Operation("bra", cls=InstructionClass.CONTROL, target=skip), guard=(row, not negated))
        self._stack.append(function.name)
        self._function(frame)
        self._stack.pop()
        e.place_label(skip)

    def _parameter(self, actual: Operand, num_bytes: int, align: int) -> int:
        """Local address of an actual parameter."""
        e = self.emitter
        if isinstance(actual, Symbol):
            return e.symbol_address(actual)
        if not isinstance(actual, Reg | Imm):
            raise e.error("unexpected call argument")
        at = e.allocate_local(num_bytes, align)
        row, width = e.source(actual, f"b{8 * num_bytes}"), num_bytes
        p = (3, 8, width, 1, max(width, 2), 0, 0)
        e.emit(Operation("st", (e.constant(at, 8), row), p, 0, InstructionClass.LOCAL))
        return at
