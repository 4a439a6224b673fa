"""A kernel that computes 2^x by polynomial, and its PTX as text that a GPU without the compiler runs.

python tests/kernels/exp2_kernel.py    writes the texts anew
"""

import pathlib
import re
import tempfile

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from jax_fa4.kernels.core import exp2

__all__ = ["THREADS", "Exp2Kernel", "compiled", "path", "portable"]

THREADS = 128
FOLDER = pathlib.Path(__file__).parents[1] / "gpu" / "data"


class Exp2Kernel:
    """out = 2^x, two elements a thread, packed or one by one."""

    def __init__(self, degree, packed):
        self.degree, self.packed = degree, packed

    @cute.jit
    def launch(self, x: cute.Pointer, out: cute.Pointer):
        self.kernel(x, out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

    @cute.kernel
    def kernel(self, x: cute.Pointer, out: cute.Pointer):
        place = 2 * (cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0])
        source = cute.make_tensor(x + place, cute.make_layout(2))
        target = cute.make_tensor(out + place, cute.make_layout(2))
        x = source[0], source[1]
        if cutlass.const_expr(self.packed):
            target[0], target[1] = exp2.exp2_pair(x, self.degree)
        else:
            target[0], target[1] = (exp2.exp2(value, self.degree) for value in x)


def compiled(degree, *, packed=False, arch="sm_90a"):
    """Its PTX."""
    pointers = [cute.runtime.nullptr(Float32, cute.AddressSpace.gmem, assumed_align=16) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {arch} --keep-ptx --dump-dir {folder}"
        return cute.compile(Exp2Kernel(degree, packed).launch, *pointers, options=options).artifacts.PTX


def portable(ptx):
    """The same instructions for any driver of the GPU: an older version, a short name, no comments."""
    entry = re.search(r"\.entry (\w+)\(", ptx)[1]
    ptx = re.sub(r"\s*//.*", "", ptx).replace(entry, "exp2")
    return re.sub(r"\.version \S+", ".version 8.0", ptx).strip() + "\n"


def path(degree):
    """Of the text of the kernel for Hopper, one by one."""
    return FOLDER / f"exp2_degree{degree}.ptx"


if __name__ == "__main__":
    for degree in exp2.POLYNOMIALS:
        path(degree).write_text(portable(compiled(degree)))
