"""Compiles the feature kernels: `PYTHONPATH=. python build.py FOLDER` writes NAME.ptx and NAME.cubin of every case.

It also writes blackwell.npz, which holds `NAME:ptx`; its counterpart hopper.npz comes from `run_on_device.py`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import cutlass
import cutlass.cute as cute
import features
import features_sm100
import numpy as np
from cases import CASES, Case, Map

from jax_fa4.configs import forward_config
from jax_fa4.kernels.build import compile_kernel
from jax_fa4.spec import AttentionSpec, MaskSpec

MAP_BYTES = 128
KERNELS = features.KERNELS | features_sm100.KERNELS


def compile_case(case: Case) -> tuple[str, bytes]:
    """(PTX, cubin) of one case's kernel."""
    if case.kernel == "forward":
        return compile_forward(case)
    kernel = KERNELS[case.kernel](**case.options)
    type(kernel).kernel.set_name_prefix("feature", remove_cutlass_symbol=True, keep_mangled_name=False)
    pointers = [cute.runtime.nullptr(cutlass.Uint32, cute.AddressSpace.gmem, assumed_align=16) for _ in case.params]
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {case.arch} --keep-ptx --keep-cubin --dump-dir {folder}"
        artifacts = cute.compile(kernel.launch, *pointers, options=options).artifacts
        return artifacts.PTX, artifacts.CUBIN


def compile_forward(case: Case) -> tuple[str, bytes]:
    """(PTX, cubin) of our forward kernel; raises ValueError where the case isn't how it is launched now."""
    name, dim = {"bf16": "bfloat16", "f16": "float16"}[case.options["dtype"]], case.options["dim"]
    mask = MaskSpec(has_right=case.options["causal"])
    spec = AttentionSpec(dtype=name, head_dim=dim, head_dim_v=dim, group=1, mask=mask)
    config = forward_config(spec, case.arch)
    boxes = [param.box for param in case.params if isinstance(param, Map)]
    known = (case.threads, case.smem_bytes, boxes, len(case.params))
    needed = (config.threads, config.smem_bytes, [p.box for p in config.params if p.size == MAP_BYTES])
    if known != (*needed, len(config.params)):
        raise ValueError(f"{case.name} is launched with {known}, {config} needs {needed}")
    compiled = compile_kernel(config)
    return compiled.ptx, compiled.cubin


def main(folder: Path, names: list[str]) -> None:
    """Compile the cases named, or all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or CASES:
        ptx, cubin = compile_case(CASES[name])
        (folder / f"{name}.ptx").write_text(ptx)
        (folder / f"{name}.cubin").write_bytes(cubin)
    texts = {name: folder / f"{name}.ptx" for name, case in CASES.items() if case.arch == "sm_100a"}
    stored = {
        f"{name}:ptx": np.frombuffer(path.read_bytes(), np.uint8) for name, path in texts.items() if path.exists()
    }
    np.savez_compressed(folder / "blackwell.npz", **stored)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
