"""Parameters read from PTX, and compared with configs and launch plans."""

import dataclasses

import pytest

from jax_fa4.cubins.cubin import Param
from jax_fa4.cubins.ptx_params import check_config, check_params, params_of, threads_of
from jax_fa4.plan.params import Pointer, Record, Scalar, TensorMap
from jax_fa4.plan.plan import Launch

PTX = """
.version 9.4
.target sm_90a
	// .globl	other
.visible .entry other(
	.param .u32 other_param_0
)
{
	ret;
}
.visible .entry fwd(
	.param .align 64 .b8 fwd_param_0[128],  // of q
	.param .u64 .ptr .global .align 16 fwd_param_1,
	.param .u64 .ptr fwd_param_2,
	.param .b64 fwd_param_3, /* a word */
	.param .f32 fwd_param_4,
	.param .align 8 .b8 fwd_param_5[24]
)
.reqntid 384, 1, 1
.minnctapersm 1
{
	.reg .b32 %r<2>;
	ret;
}
"""
PARAMS = (
    Param(name="param_0", size=128, align=64, kind="tensor_map"),
    Param(name="param_1", size=8, align=8, kind="pointer", pointee_align=16),
    Param(name="param_2", size=8, align=8, kind="pointer"),
    Param(name="param_3", size=8, align=8, kind="bytes"),
    Param(name="param_4", size=4, align=4, kind="bytes"),
    Param(name="param_5", size=24, align=8, kind="bytes"),
)


@pytest.fixture
def kernel(cubin):
    """A cubin with the parameters of the text above."""
    return dataclasses.replace(cubin, entry="fwd", params=PARAMS, threads=384, smem_bytes=1024)


@pytest.fixture
def launch(kernel):
    """A launch that fits it."""
    return Launch(
        cubin=kernel.key,
        entry="fwd",
        grid=(1, 1, 1),
        block=384,
        smem_bytes=1024,
        params=(
            TensorMap(buffer=0, dtype="bfloat16", dims=(64, 128), strides=(128,), box=(64, 64)),
            Pointer(buffer=1, align=16),
            Pointer(buffer=1),
            Pointer(buffer=2),
            Scalar(dtype="f32", value=1.0),
            Record(size=24, fields=((0, Scalar(dtype="i64", value=3)),)),
        ),
    )


def test_every_form_of_declaration_is_read():
    assert params_of(PTX, "fwd") == PARAMS


def test_the_entry_is_told_from_the_others():
    assert params_of(PTX, "other") == (Param(name="param_0", size=4, align=4, kind="bytes"),)


@pytest.mark.parametrize("header", [".entry none()\n{", ".entry none\n{", ".entry none ( ) {"])
def test_a_kernel_may_have_no_parameters(header):
    assert params_of(header, "none") == ()


def test_threads_are_read_where_the_kernel_demands_them():
    assert threads_of(PTX, "fwd") == 384
    assert threads_of(PTX, "other") is None


def test_an_absent_entry_is_named():
    with pytest.raises(ValueError, match="the PTX has no entry bwd"):
        params_of(PTX, "bwd")


def test_an_unknown_declaration_is_shown():
    with pytest.raises(ValueError, match=r"kernel k: parameter declaration not understood: \.param \.texref t"):
        params_of(".entry k(.param .texref t)\n{", "k")


def test_a_launch_that_fits_passes(kernel, launch):
    check_params(kernel, launch)


def test_a_plain_word_serves_as_a_pointer_but_not_the_reverse(kernel, launch):
    number = Scalar(dtype="i64", value=1)
    swapped = dataclasses.replace(launch, params=(*launch.params[:2], number, *launch.params[3:]))
    with pytest.raises(ValueError, match=r"parameter 2: PTX pointer\[8\] aligned to 1, expected i64\[8\]   <- differs"):
        check_params(kernel, swapped)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entry": "bwd"}, "entry: the kernel has fwd, the plan bwd"),
        ({"block": 256}, "threads: the kernel has 384, the plan 256"),
        ({"smem_bytes": 0}, "dynamic shared memory: the kernel has 1024, the plan 0"),
        ({"cubin": "1" * 64}, f"the plan {'1' * 64}"),
    ],
    ids=lambda v: "" if isinstance(v, str) else next(iter(v)),
)
def test_a_launch_of_another_kernel_is_refused(kernel, launch, change, message):
    with pytest.raises(ValueError, match=message):
        check_params(kernel, dataclasses.replace(launch, **change))


def test_both_lists_are_shown_in_full(kernel, launch):
    with pytest.raises(ValueError, match="parameter") as error:
        check_params(kernel, dataclasses.replace(launch, params=launch.params[:5]))
    assert str(error.value).splitlines() == [
        "the launch plan does not fit the kernel fwd:",
        "  parameter 0: PTX tensor_map[128], expected tensor_map[128]",
        "  parameter 1: PTX pointer[8] aligned to 16, expected pointer[8] aligned to 16",
        "  parameter 2: PTX pointer[8] aligned to 1, expected pointer[8] aligned to 1",
        "  parameter 3: PTX bytes[8], expected pointer[8] aligned to 1",
        "  parameter 4: PTX bytes[4], expected f32[4]",
        "  parameter 5: PTX bytes[24], expected nothing   <- differs",
    ]


def test_a_pointer_must_be_as_aligned_as_the_kernel_assumes(kernel, launch):
    loose = dataclasses.replace(launch, params=(launch.params[0], Pointer(buffer=1, align=8), *launch.params[2:]))
    with pytest.raises(
        ValueError, match=r"pointer\[8\] aligned to 16, expected pointer\[8\] aligned to 8   <- differs"
    ):
        check_params(kernel, loose)


def test_a_config_must_announce_what_the_ptx_has(config, cubin):
    check_config(cubin.params, config.params, "fwd")
    with pytest.raises(ValueError, match=r"parameter 10: PTX bytes\[4\], expected nothing   <- differs"):
        check_config(cubin.params, config.params[:-1], "fwd")
