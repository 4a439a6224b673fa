"""Ways to break a working kernel's PTX, each at every line where it applies."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple

__all__ = ["BLACKWELL_KINDS", "KINDS", "TCGEN05_KINDS", "Kind", "Mutant", "mutants"]

Edit = str | Callable[[re.Match[str]], str]


class Kind(NamedTuple):
    """One way to break an instruction: what `pattern` matches in its line becomes `edit`."""

    name: str
    pattern: str
    edit: Edit


class Mutant(NamedTuple):
    """A broken kernel."""

    kind: str
    line: int  # counted from 1
    text: str  # of the broken line
    ptx: str


def _added(group: int, amount: int) -> Callable[[re.Match[str]], str]:
    """Add to the number in a group."""

    def edit(match: re.Match[str]) -> str:
        start, end = match.start(group) - match.start(), match.end(group) - match.start()
        return match[0][:start] + str(int(match[group]) + amount) + match[0][end:]

    return edit


def _shifted(amount: int) -> Callable[[re.Match[str]], str]:
    """Add to an address operand: group 1 is the base, group 2 the offset, if there is one."""

    def edit(match: re.Match[str]) -> str:
        return f"{match[1]}+{int(match[2] or 0) + amount}"

    return edit


def _flipped(match: re.Match[str]) -> str:
    return match[1] + ("0" if match[2] == "1" else "1")


FIRST_ADDRESS = r"(\[%\w+)(?:\+(\d+))?(?=\])"
TMA_LOAD = r"cp\.async\.bulk\.tensor\.\S*shared::c\w+\.global\S* "
TMA_STORE = r"cp\.async\.bulk\.tensor\.\S*global\.shared::cta\S* "
DROPPED = ""

KINDS = (
    Kind("drop fence.mbarrier_init", r"fence\.mbarrier_init\S*;", DROPPED),
    Kind("drop fence.proxy.async", r"fence\.proxy\.async\S*;", DROPPED),
    Kind(
        "fence in one lane only",
        r"(fence\.proxy\.async\S*;)",
        r"{ .reg .pred one; elect.sync _|one, -1; @one \1 }",
    ),
    Kind("drop bar.sync", r"bar\.sync[^;]*;", DROPPED),
    Kind("drop bar.arrive", r"bar\.arrive[^;]*;", DROPPED),
    Kind("bar.sync becomes bar.arrive", r"bar\.sync(\s+%\w+, \d+)", r"bar.arrive\1"),
    Kind("halve a barrier's thread count", r"(bar\.\w+\s+%\w+, )256", r"\g<1>128"),
    Kind("double a barrier's thread count", r"(bar\.sync\s+%\w+, )128", r"\g<1>256"),
    Kind("drop wgmma.fence", r"wgmma\.fence\S*;", DROPPED),
    Kind("drop wgmma.commit_group", r"wgmma\.commit_group\S*;", DROPPED),
    Kind("drop wgmma.wait_group", r"wgmma\.wait_group[^;]*;", DROPPED),
    Kind("shorten wgmma.wait_group", r"(wgmma\.wait_group\S*\s+)(\d+)", _added(2, 1)),
    Kind(
        "drop a wait for an mbarrier", r"mbarrier\.try_wait\S* (\w+), (?![^;]*\], 1,)[^;]*;", r"setp.eq.u32 \1, 0, 0;"
    ),
    Kind("swap a waited phase", r"(mbarrier\.try_wait\S* \w+, \[[^\]]*\], )([01])(?=,)", _flipped),
    Kind(
        "swap a waited phase kept in a register",
        r"(mbarrier\.try_wait\S* \w+, \[[^\]]*\], )(%\w+),([^;]*);",
        r"{ .reg .b32 other; xor.b32 other, \2, 1; \1other,\3; }",
    ),
    Kind(
        "wait at another mbarrier",
        r"(?<=mbarrier\.try_wait\.parity\.shared\.b64 P1, )" + FIRST_ADDRESS + r"(?!\], 1,)",
        _shifted(8),
    ),
    Kind("drop an arrival", r"mbarrier\.arrive\.shared[^;]*;", DROPPED),
    Kind("arrive twice", r"mbarrier\.arrive\.shared[^;]*;", r"\g<0> \g<0>"),
    Kind(
        "arrive at another mbarrier",
        r"(?<=mbarrier\.arrive\.shared\.b64 )(%\w+, \[%\w+)(?:\+(\d+))?(?=\])",
        _shifted(8),
    ),
    Kind("expect no bytes", r"arrive\.expect_tx(\S* %\w+, \[[^\]]*\]), %\w+;", r"arrive\1;"),
    Kind(
        "expect 16 bytes more",
        r"mbarrier\.arrive\.expect_tx(\S* %\w+, \[[^\]]*\]), (%\w+);",
        r"{ .reg .b32 more; add.u32 more, \2, 16; mbarrier.arrive.expect_tx\1, more; }",
    ),
    Kind(
        "expect half the bytes",
        r"mbarrier\.arrive\.expect_tx(\S* %\w+, \[[^\]]*\]), (%\w+);",
        r"{ .reg .b32 less; shr.u32 less, \2, 1; mbarrier.arrive.expect_tx\1, less; }",
    ),
    Kind(
        "expect one arrival more",
        r"(mbarrier\.init\S*\s+\[[^\]]*\], )(%\w+);",
        r"{ .reg .b32 more; add.u32 more, \2, 1; \1more; }",
    ),
    Kind("initialise an mbarrier twice", r"mbarrier\.init[^;]*;", r"\g<0> \g<0>"),
    Kind("drop an mbarrier.init", r"mbarrier\.init[^;]*;", DROPPED),
    Kind("drop a tile load", TMA_LOAD + r"[^;]*;", DROPPED),
    Kind("load a tile twice", TMA_LOAD + r"[^;]*;", r"\g<0> \g<0>"),
    Kind(
        "load a tile to 16 bytes further", r"(?<=cache_hint )" + FIRST_ADDRESS + r"(?=\], \[%rd\d+, \{)", _shifted(16)
    ),
    Kind(
        "load a tile to 1024 bytes further",
        r"(?<=cache_hint )" + FIRST_ADDRESS + r"(?=\], \[%rd\d+, \{)",
        _shifted(1024),
    ),
    Kind(
        "load from other coordinates",
        r"(" + TMA_LOAD + r"\[[^\]]*\], \[%\w+, \{)(%\w+), (%\w+),([^;]*);",
        r"{ .reg .b32 row; add.u32 row, \3, 1; \1\2, row,\4; }",
    ),
    Kind("signal another mbarrier", r"(?<=\}\], )" + FIRST_ADDRESS + r"(?=\], %rd\d+;)", _shifted(8)),
    Kind("drop a tile store", TMA_STORE + r"[^;]*;", DROPPED),
    Kind("store a tile from 128 bytes further", r"(?<=\}\], )" + FIRST_ADDRESS + r"(?=\], %rd\d+;)", _shifted(128)),
    Kind("drop the commit of bulk stores", r"cp\.async\.bulk\.commit_group;", DROPPED),
    Kind("drop the wait for bulk stores", r"cp\.async\.bulk\.wait_group[^;]*;", DROPPED),
    Kind("drop stmatrix", r"stmatrix[^;]*;", DROPPED),
    Kind(
        "stmatrix to 16 bytes further",
        r"(?<=stmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16 )" + FIRST_ADDRESS,
        _shifted(16),
    ),
    Kind("transpose stmatrix", r"\.m8n8\.x4\.shared", ".m8n8.x4.trans.shared"),
    Kind("flip a wgmma's transposition", r"(wgmma\.mma_async.*,\s*\d,\s*\d,\s*\d,\s*)(\d)(?=;)", _flipped),
    Kind("negate a wgmma's operand", r"(wgmma\.mma_async.*\w, )1(?=,\s*1[,;])", r"\g<1>-1"),
    Kind("drop a wgmma", r"wgmma\.mma_async[^;]*;", DROPPED),
    Kind(
        "move a wgmma's descriptor by 16 bytes", r"(add\.s64\s+%rd\d+, %rd\d+, )(2|4|6|128|256|384)(?=;)", _added(2, 1)
    ),
    Kind(
        "move a wgmma's descriptor by 1024 bytes",
        r"(add\.s64\s+%rd\d+, %rd\d+, )(2|4|6|128|256|384)(?=;)",
        _added(2, 64),
    ),
    Kind("change a descriptor's swizzle", r"(or\.b64\s+%rd\d+, %rd\d+, )(4611\d{15})", _added(2, 1 << 62)),
    Kind("change a descriptor's stride", r"(or\.b64\s+%rd\d+, %rd\d+, )(4611\d{15})", _added(2, 1 << 33)),
    Kind("take more registers", r"(setmaxnreg\.inc\S*\s+)(\d+)", _added(2, 8)),
    Kind("give no registers away", r"setmaxnreg\.dec[^;]*;", DROPPED),
    Kind("maximum becomes minimum", r"max\.f32", "min.f32"),
    Kind("shuffle with another lane", r"(shfl\.sync\.bfly\.b32\s+%\w+, %\w+, )(\d)", _added(2, 4)),
    Kind("drop a shuffle", r"shfl\.sync\.bfly\.b32(\s+%\w+, %\w+)[^;]*;", r"mov.b32\1;"),
    Kind("invert a guard", r"@(%p\d+) bra", r"@!\1 bra"),
    Kind("all lanes instead of one", r"elect\.sync\s+(%\w+|_)\|(%?\w+), [^;]*;", r"setp.eq.u32 \2, 0, 0;"),
    Kind("store 4 bytes further", r"(?<=st\.global\.b32 )" + r"\s*" + FIRST_ADDRESS, _shifted(4)),
    Kind("store misaligned", r"(?<=st\.global\.b32 )" + r"\s*" + FIRST_ADDRESS, _shifted(2)),
    Kind("read another parameter", r"(ld\.param\.b32\s+%\w+, )\[(\w+)_param_(?!10\])(\d+)\]", r"\1[\2_param_10]"),
)

TCGEN05_KINDS = (
    Kind("drop tcgen05.wait::st", r"tcgen05\.wait::st\S*;", DROPPED),
    Kind("drop tcgen05.wait::ld", r"tcgen05\.wait::ld\S*;", DROPPED),
    Kind("drop tcgen05.commit", r"tcgen05\.commit[^;]*;", DROPPED),
    Kind("commit to another mbarrier", r"(?<=\.b64 )" + FIRST_ADDRESS + r"(?=\];$)", _shifted(8)),
    Kind(
        "commit in another lane",
        r"(tcgen05\.commit[^;]*;)",
        r"{ .reg .pred l; .reg .b32 n; mov.u32 n, %laneid; "
        r"setp.eq.u32 l, n, 5; @l \1 }",
    ),
    Kind("drop an MMA", r"@\w+ tcgen05\.mma[^;]*;", DROPPED),
    Kind("do not accumulate", r"(tcgen05\.mma.*, )1;", r"\g<1>0;"),
    Kind("accumulate from the start", r"(tcgen05\.mma.*, )0;", r"\g<1>1;"),
    Kind("A from 8 columns further", r"\[tmem_a \+ 0x8\]", "[tmem_a + 0x10]"),
    Kind("another size in the instruction descriptor", r"(mov\.b32 \w*idesc\w*, )0x8(\w{6});", r"\g<1>0x4\2;"),
    Kind("another major in the instruction descriptor", r"(mov\.b32 \w*idesc\w*, 0x8)2(\w)(?=0490)", r"\g<1>3\2"),
    Kind("reserved bit in the instruction descriptor", r"(mov\.b32 \w*idesc\w*, 0x8\w{4})9(?=0;)", r"\g<1>d"),
    Kind("f16 instead of bf16", r"(mov\.b32 \w*idesc\w*, 0x8\w{3})4(?=90;)", r"\g<1>0"),
    Kind(
        "load other columns",
        r"(?<=tcgen05\.ld\.sync\.aligned\.32x32b\.)(\S+ \{[^}]*\}, )(\[%\w+)(?:\+(\d+))?(?=\])",
        r"\1\2+16",
    ),
    Kind("store to other columns", r"(tcgen05\.st\.sync\.aligned\.32x32b\.\S+ \[%\w+)(?=\])", r"\1+16"),
    Kind(
        "load from another warp's lanes",
        r"(tcgen05\.ld\.sync\.aligned\.32x32b\.\S+ \{[^}]*\}, \[%\w+)(?=\])",
        r"\1+2097152",
    ),
    Kind("drop tcgen05.st", r"tcgen05\.st\.[^;]*;", DROPPED),
    Kind("allocate half", r"(tcgen05\.alloc\S*\s+\[\S+\], )(\w+|%\w+);", r"\g<1>256;"),
    Kind("drop the deallocation", r"tcgen05\.dealloc[^;]*;", DROPPED),
    Kind("deallocate half", r"(tcgen05\.dealloc\S*\s+\S+, )(\w+|%\w+);", r"\g<1>256;"),
    Kind(
        "give the permit up first",
        r"(tcgen05\.alloc[^;]*;)",
        r"tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; \1",
    ),
)


def _flipped_bits(mask: int) -> Callable[[re.Match[str]], str]:
    """Flip bits of the number in group 2."""

    def edit(match: re.Match[str]) -> str:
        return match[1] + str(int(match[2]) ^ mask)

    return edit


INSTRUCTION = r"(mov\.b32\s+%r\d+, )(13\d{7})(?=;)"  # descriptors of M = 128 begin so
OURS = (  # what TCGEN05_KINDS look for, as our kernel writes it
    Kind("accumulate from the start", r"setp\.ne\.b32 sum, [^;]*;", "setp.ne.b32 sum, 1, 0;"),
    Kind("never accumulate", r"setp\.ne\.b32 sum, [^;]*;", "setp.ne.b32 sum, 0, 0;"),
    Kind("A from 8 columns further", r"\[(%r\d+) \+ 8\]", r"[\1 + 16]"),
    Kind("A from 16 bytes further", r"(add\.s64 a_desc, %rd\d+, )(2)(?=;)", _added(2, 1)),
    Kind("B from 16 bytes further", r"(add\.s64 b_desc, %rd\d+, )(\d+)(?=;)", _added(2, 1)),
    Kind("another size in the instruction descriptor", INSTRUCTION, _flipped_bits(0x0C000000)),
    Kind("another major in the instruction descriptor", INSTRUCTION, _flipped_bits(1 << 16)),
    Kind("reserved bit in the instruction descriptor", INSTRUCTION, _flipped_bits(1 << 6)),
    Kind("f16 instead of bf16", INSTRUCTION, _flipped_bits(1 << 7)),
    Kind("negate A", INSTRUCTION, _flipped_bits(1 << 13)),
    Kind("NaN-keeping maximum becomes minimum", r"max\.NaN\.f32", "min.NaN.f32"),
    Kind("drop an arrival at a pair's first CTA", r"mbarrier\.arrive\.release\.cluster[^;]*;", DROPPED),
    Kind(
        "arrive at the own CTA's barrier", r"mapa\.shared::cluster\.u32 there, ([^,]*), [^;]*;", r"mov.b32 there, \1;"
    ),
    Kind("drop a lane's copy", r"cp\.async\.cg[^;]*;", DROPPED),
    Kind("copy to 16 bytes further", r"(?<=cp\.async\.cg\.shared\.global )" + FIRST_ADDRESS, _shifted(16)),
    Kind("copy from 16 bytes further", r"(?<=\], )" + FIRST_ADDRESS + r"(?=\], 16, %r)", _shifted(16)),
    Kind("copy half", r"(cp\.async\.cg[^;]*), %r\d+;", r"\1, 8;"),
    Kind("drop the commit of copies", r"cp\.async\.commit_group[^;]*;", DROPPED),
    Kind("drop the wait for copies", r"cp\.async\.wait_(group|all)[^;]*;", DROPPED),
    Kind("no lane votes to rescale", r"(vote\.sync\.any\.pred\s+%p\d+), [^;]*;", r"\1, 0, -1;"),
)
_REPLACED = {kind.name for kind in OURS}
BLACKWELL_KINDS = (*KINDS, *(kind for kind in TCGEN05_KINDS if kind.name not in _REPLACED), *OURS)


def mutants(ptx: str, executed: Container[int], kinds: Sequence[Kind] = KINDS) -> Iterator[Mutant]:
    """All mutants of a kernel whose broken line is among `executed` (lines counted from 1)."""
    lines = ptx.split("\n")
    for kind in kinds:
        pattern = re.compile(kind.pattern)
        for index, line in enumerate(lines):
            if index + 1 in executed and pattern.search(line):
                broken = pattern.sub(kind.edit, line, count=1)
                text = "\n".join([*lines[:index], broken, *lines[index + 1 :]])
                yield Mutant(kind.name, index + 1, broken.strip(), text)
