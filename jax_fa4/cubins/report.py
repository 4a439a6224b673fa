"""What a cubin is made of: registers, spills, shared memory and counts of instructions, from NVIDIA's disassembler."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence

from jax_fa4.cubins.cubin import Cubin

__all__ = ["Resources", "resources_of", "table"]

TOOL = "cuobjdump"
TOOL_PACKAGES = ("nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")  # the first calls the second's program
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s+)?(?:@!?\w+\s+)?([A-Z]\w*)([\w.]*)", re.MULTILINE)


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


def resources_of(cubin: Cubin) -> Resources:
    """Disassembles a cubin. Raises RuntimeError if the disassembler is missing or refuses the file."""
    tool = _find_tool()
    with tempfile.TemporaryDirectory() as folder:
        image = pathlib.Path(folder, "kernel.cubin")
        image.write_bytes(cubin.image)
        usage = _run(tool, "--dump-resource-usage", image)
        listing = _run(tool, "--dump-sass", image)
    opcodes = Counter(opcode for opcode, _ in _INSTRUCTION.findall(listing))
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
    )


def table(cubins: Sequence[Cubin], resources: Sequence[Resources] | None = None) -> str:
    """A text table, a row per cubin in the order of (architecture, config); the same cubins give the same bytes.

    Disassembles cubins whose resources are not given.
    """
    resources = [resources_of(cubin) for cubin in cubins] if resources is None else resources
    rows = [["arch", *COLUMNS, "config"]]
    for cubin, found in sorted(zip(cubins, resources, strict=True), key=lambda pair: (pair[0].arch, pair[0].config)):
        rows.append([cubin.arch, *(str(of(found)) for of in COLUMNS.values()), cubin.config])
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]) - 1)]
    lines = (
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )
    return "\n".join(lines) + "\n"


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
