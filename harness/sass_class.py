"""Classes of machine instructions, by opcode (NVIDIA's CUDA Binary Utilities, instruction set reference)."""

from __future__ import annotations

from enum import StrEnum


class SassClass(StrEnum):
    """What a machine instruction keeps busy."""

    INTEGER = "integer"
    FLOAT = "float"
    HALF = "half"
    DOUBLE = "double"
    CONVERT = "convert"
    SPECIAL_FUNCTION = "mufu"
    MOVE = "move"
    UNIFORM = "uniform"
    GLOBAL = "global"
    SHARED = "shared"
    LOCAL = "local"
    CONSTANT = "constant"
    ASYNC = "async"
    ATOMIC = "atomic"
    TENSOR = "tensor"
    WARP = "warp"
    BARRIER = "barrier"
    CONTROL = "control"
    OTHER = "other"


_WORDS = {
    SassClass.INTEGER: "IADD IADD3 IADD32I IMAD IMUL LEA LOP LOP3 LOP32I SHF SHL SHR ISETP SEL PRMT IMNMX VIADD "
    "VIMNMX VIADDMNMX VIMNMX3 IABS SGXT BMSK FLO POPC BREV IDP IDP4A ISCADD VABSDIFF VABSDIFF4 PLOP3 LEPC",
    SassClass.FLOAT: "FADD FMUL FFMA FMNMX FMNMX3 FSEL FSETP FSET FCHK FSWZADD FADD32I FMUL32I FFMA32I FADD2 FMUL2 "
    "FFMA2",
    SassClass.HALF: "HADD2 HMUL2 HFMA2 HMNMX2 HSET2 HSETP2 HADD2_32I HMUL2_32I HFMA2_MMA",
    SassClass.DOUBLE: "DADD DMUL DFMA DSETP DMNMX",
    SassClass.CONVERT: "F2F F2I I2F F2FP I2FP I2I I2IP FRND F2IP",
    SassClass.SPECIAL_FUNCTION: "MUFU",
    SassClass.MOVE: "MOV MOV32I S2R CS2R P2R R2P MOVM S2UR R2UR UMOV",
    SassClass.GLOBAL: "LDG STG LD ST CCTL CCTLL CCTLT LDGMC",
    SassClass.SHARED: "LDS STS LDSM STSM",
    SassClass.LOCAL: "LDL STL",
    SassClass.CONSTANT: "LDC LDCU ULDC",
    SassClass.ASYNC: "LDGSTS LDGDEPBAR UBLKCP UBLKPF UBLKRED UTMALDG UTMASTG UTMACMDFLUSH UTMAPF SYNCS ARRIVES DEPBAR",
    SassClass.ATOMIC: "ATOM ATOMG ATOMS RED REDG REDAS",
    SassClass.TENSOR: "HMMA IMMA DMMA BMMA QMMA OMMA HGMMA IGMMA QGMMA BGMMA UTCHMMA UTCQMMA WARPGROUP WARPGROUPSET",
    SassClass.WARP: "SHFL VOTE VOTEU MATCH REDUX ELECT CREDUX",
    SassClass.BARRIER: "BAR WARPSYNC MEMBAR ERRBAR FENCE UCGABAR_ARV UCGABAR_WAIT B2R R2B",
    SassClass.CONTROL: "BRA BRX BRXU EXIT BSSY BSYNC BREAK BREAKDEPENDENCY CALL RET JMP JMX NOP NANOSLEEP YIELD BPT "
    "KILL BMOV RPCMOV ACQBULK ENDCOLLECTIVE USETMAXREG PREEXIT",
}  # fmt: skip
_CLASS_OF = {word: cls for cls, words in _WORDS.items() for word in words.split()}


def class_of(name: str) -> SassClass:
    """The class of an opcode without modifiers."""
    if name in _CLASS_OF:
        return _CLASS_OF[name]
    return SassClass.UNIFORM if name.startswith("U") else SassClass.OTHER
