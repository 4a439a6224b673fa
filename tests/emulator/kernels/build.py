"""Compiles the feature kernels: `python build.py FOLDER` writes NAME.ptx and NAME.cubin of every case."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
sys.path.insert(0, str(Path(__file__).parent))

import cutlass
import cutlass.cute as cute
from cases import CASES, Case
from features import KERNELS


def compile_case(case: Case) -> tuple[str, bytes]:
    """(PTX, cubin) of one case's kernel."""
    kernel = KERNELS[case.kernel](**case.options)
    type(kernel).kernel.set_name_prefix("feature", remove_cutlass_symbol=True, keep_mangled_name=False)
    pointers = [cute.runtime.nullptr(cutlass.Uint32, cute.AddressSpace.gmem, assumed_align=16) for _ in case.params]
    with tempfile.TemporaryDirectory() as folder:
        options = f"--keep-ptx --keep-cubin --dump-dir {folder}"
        artifacts = cute.compile(kernel.launch, *pointers, options=options).artifacts
        return artifacts.PTX, artifacts.CUBIN


def main(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or CASES:
        ptx, cubin = compile_case(CASES[name])
        (folder / f"{name}.ptx").write_text(ptx)
        (folder / f"{name}.cubin").write_bytes(cubin)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
