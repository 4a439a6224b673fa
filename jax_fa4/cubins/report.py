"""What a cubin is made of: registers, spills, shared memory and counts of instructions, from NVIDIA's disassembler."""

from __future__ import annotations

import bisect
import dataclasses
import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from jax_fa4.configs import Config
from jax_fa4.configs.blackwell import ROLES, TMEM_COLUMNS, ForwardSm100Config
from jax_fa4.cubins.cubin import Cubin

__all__ = ["Resources", "anatomy", "full_table", "resources_of", "table"]

TOOL = "cuobjdump"
TOOL_PACKAGES = ("nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")  # the first calls the second's program
_INSTRUCTION = re.compile(
    r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:\{\s+)?(?P<predicate>@!?\w+\s+)?(?P<opcode>[A-Z]\w*)(?P<rest>[^;\n]*)",
    re.MULTILINE,
)
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
WORK = ("HGMMA", "UTCHMMA", "MUFU", "LDTM", "STTM")  # products, exponentials, accesses to tensor memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """Costs and instruction counts of one kernel; counts are static, a loop's body counts once."""

    registers: int  # of a thread at launch
    stack_bytes: int  # of a thread
    local_bytes: int  # of a thread
    spill_loads: int  # instructions that read local memory
    spill_stores: int
    static_smem_bytes: int
    dynamic_smem_bytes: int
    instructions: int
    opcodes: Counter[str]  # without modifiers
    role_registers: tuple[int, ...] = ()  # of a thread, as roles ask for them, in the order of the code
    loops: tuple[Counter[str], ...] = ()  # the same of each innermost loop that has one of WORK, in order

    @property
    def spills(self) -> bool:
        """Whether threads keep anything in local memory."""
        return bool(self.stack_bytes or self.local_bytes or self.spill_loads or self.spill_stores)

    def count(self, *opcodes: str) -> int:
        """Instructions of these opcodes."""
        return sum(self.opcodes[opcode] for opcode in opcodes)


COLUMNS = {
    "regs": lambda r: r.registers,
    "stack": lambda r: r.stack_bytes,
    "local": lambda r: r.local_bytes,
    "LDL": lambda r: r.spill_loads,
    "STL": lambda r: r.spill_stores,
    "smem static": lambda r: r.static_smem_bytes,
    "smem dynamic": lambda r: r.dynamic_smem_bytes,
    "instr": lambda r: r.instructions,
    "HGMMA": lambda r: r.count("HGMMA"),
    "UTCHMMA": lambda r: r.count("UTCHMMA"),
    "MUFU": lambda r: r.count("MUFU"),
    "FFMA": lambda r: r.count("FFMA", "FFMA2"),
}


LOOP_COLUMNS = {  # a number for each loop
    "loop instr": lambda loop: loop.total(),
    "loop MMA": lambda loop: loop["HGMMA"] + loop["UTCHMMA"],
    "loop MUFU": lambda loop: loop["MUFU"],
    "loop FFMA": lambda loop: loop["FFMA"] + loop["FFMA2"],
}


def resources_of(cubin: Cubin) -> Resources:
    """Disassembles a cubin. Raises RuntimeError if the disassembler is missing or refuses the file."""
    tool = _find_tool()
    with tempfile.TemporaryDirectory() as folder:
        image = pathlib.Path(folder, "kernel.cubin")
        image.write_bytes(cubin.image)
        usage = _run(tool, "--dump-resource-usage", image)
        listing = _run(tool, "--dump-sass", image)
    instructions = list(_INSTRUCTION.finditer(listing))
    opcodes = _opcodes(instructions)
    return Resources(
        registers=_usage(usage, cubin.entry, "REG"),
        stack_bytes=_usage(usage, cubin.entry, "STACK"),
        local_bytes=_usage(usage, cubin.entry, "LOCAL"),
        spill_loads=opcodes["LDL"],
        spill_stores=opcodes["STL"],
        static_smem_bytes=_usage(usage, cubin.entry, "SHARED"),
        dynamic_smem_bytes=cubin.smem_bytes,
        instructions=opcodes.total(),
        opcodes=opcodes,
        role_registers=tuple(int(i["rest"].split()[-1], 16) for i in instructions if i["opcode"] == "USETMAXREG"),
        loops=tuple(_loops(instructions)),
    )


def _opcodes(instructions: Iterable[re.Match[str]]) -> Counter[str]:
    return Counter(instruction["opcode"] for instruction in instructions)


def _loops(instructions: Sequence[re.Match[str]]) -> Iterator[Counter[str]]:
    """A loop ends with a conditional branch to its start; waits, which lie behind the code, return unconditionally."""
    addresses = [int(instruction["address"], 16) for instruction in instructions]
    end_of_last = -1
    for end, instruction in enumerate(instructions):
        target = _TARGET.search(instruction["rest"])
        is_conditional = instruction["predicate"] or re.search(r"\bUP\d", instruction["rest"])
        if instruction["opcode"] != "BRA" or not is_conditional or target is None:
            continue
        start = bisect.bisect_left(addresses, int(target[1], 16))
        opcodes = _opcodes(instructions[start : end + 1])
        if start > end_of_last and any(opcodes[opcode] for opcode in WORK):
            yield opcodes
            end_of_last = end


def table(cubins: Sequence[Cubin], resources: Sequence[Resources] | None = None) -> str:
    """A text table, a row per cubin in the order of (architecture, config); the same cubins give the same bytes.

    Disassembles cubins whose resources are not given.
    """
    resources = [resources_of(cubin) for cubin in cubins] if resources is None else resources
    columns = {name: [str(of(found)) for found in resources] for name, of in COLUMNS.items()}
    return _table(cubins, columns)


def full_table(cubins: Sequence[Cubin], resources: Sequence[Resources]) -> str:
    """The same with registers of each role and counts of each loop, in the order of the code, slashes between them."""
    columns = {name: [str(of(found)) for found in resources] for name, of in COLUMNS.items()}
    columns["role regs"] = ["/".join(map(str, found.role_registers)) or "-" for found in resources]
    for name, of in LOOP_COLUMNS.items():
        columns[name] = ["/".join(str(of(loop)) for loop in found.loops) or "-" for found in resources]
    return _table(cubins, columns)


def _table(cubins: Sequence[Cubin], columns: dict[str, list[str]]) -> str:
    order = sorted(range(len(cubins)), key=lambda n: (cubins[n].arch, cubins[n].config))
    rows = [["arch", *columns, "config"]]
    rows += [[cubins[n].arch, *(column[n] for column in columns.values()), cubins[n].config] for n in order]
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]) - 1)]
    lines = (
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )
    return "\n".join(lines) + "\n"


def anatomy(configs: Sequence[Config], resources: Sequence[Resources]) -> str:
    """What Blackwell's kernels are made of, a section for all that have the same: roles, memory, barriers, a block."""
    sections: dict[str, list[str]] = {}
    for config, found in zip(configs, resources, strict=True):
        if isinstance(config, ForwardSm100Config):
            sections.setdefault(_anatomy(config, found), []).append(_title(config))
    return "".join("\n" + "\n".join([*titles, body]) + "\n" for body, titles in sections.items())


def _anatomy(config: ForwardSm100Config, resources: Resources) -> str:
    registers = {"softmax0": config.softmax_registers, "softmax1": config.second_softmax_registers}
    registers["correction"] = config.correction_registers
    roles = [["role", "warps", "registers a thread"]]
    for name, first, number in ROLES:
        warps = str(first) if number == 1 else f"{first}-{first + number - 1}"
        roles.append([name, warps, str(registers.get(name, config.other_registers))])
    tmem = config.tmem
    columns = [[f"tensor memory, {TMEM_COLUMNS} columns", "first", "second"]]
    for name, starts, width in (
        ("S", tmem.scores, config.tile_n),
        ("P", tmem.weights, config.tile_n // 2),
        ("O", tmem.out, config.v_columns),
    ):
        places = [f"{start}-{start + width - 1}" for start in starts]
        columns.append([name, places[0], places[1] if len(places) > 1 else "-"])
    smem = [
        ["shared memory", "bytes"],
        ["Q, later O" if config.smem.out_over_q else "Q, O", str(config.smem.q_room)],
        [f"K and V, {config.kv_stages} slots", str(config.smem.kv_bytes)],
        ["statistics, barriers", str(config.smem.other_bytes)],
        ["all", str(config.smem_bytes)],
    ]
    barriers = [["barrier", "number", "arrivals", "arrives", "waits", "true once complete"]]
    barriers += [[str(field) for field in barrier] for barrier in config.barriers]
    block = [["of a tile of 128 queries and 128 keys", ""]]
    block += [[name, count] for name, count in _counts_a_block(config, resources).items()]
    tables = (roles, columns, smem, barriers, block)
    return "\n".join(line for rows in tables for line in _aligned(rows))


def _title(config: ForwardSm100Config) -> str:
    tile = f"{config.q_tiles} query tile{'s' if config.q_tiles > 1 else ''} a CTA"
    pair = ", pairs of CTAs" if config.cta_group == 2 else ""
    return f"{config.name}: {tile}{pair}{f', {config.schedule}' if config.is_persistent else ''}"


def _counts_a_block(config: ForwardSm100Config, resources: Resources) -> dict[str, str]:
    """Instructions for one block of keys, from the shortest loop of softmax: the one without masks, if it has one."""
    products = (config.columns + config.tile_n) // config.mma_depth
    softmax = min((loop for loop in resources.loops if loop["MUFU"] and loop["LDTM"]), key=Counter.total)
    fused = softmax["FFMA"] + 2 * softmax["FFMA2"]
    return {
        "UTCHMMA": str(products) + (", for both CTAs" if config.cta_group == 2 else ""),
        "MUFU": f"{softmax['MUFU']} a row",
        "fused multiply-adds": f"{fused} a row",
    }


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [f"  {line}".rstrip() for line in lines]


def _find_tool() -> str:
    """Path of cuobjdump: from its pip package, else from PATH."""
    try:
        files = importlib.metadata.files(TOOL_PACKAGES[0]) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    packaged = [str(file.locate()) for file in files if file.stem == TOOL]
    found = next(iter(packaged), None) or shutil.which(TOOL)
    if found is None:
        raise RuntimeError(
            f"a report needs {TOOL}: pip install {' '.join(TOOL_PACKAGES)}, or put a CUDA toolkit on PATH"
        )
    return found


def _run(tool: str, *arguments: str | pathlib.Path) -> str:
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _usage(text: str, entry: str, what: str) -> int:
    found = re.search(rf"Function {re.escape(entry)}:\s*\n[^\n]*\b{what}:(\d+)", text)
    if found is None:
        raise RuntimeError(f"{TOOL} says nothing of {what} of kernel {entry}")
    return int(found[1])
