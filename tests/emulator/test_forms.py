"""Every instruction form that known kernels and DSL features compile to is decoded; what is not known raises."""

from __future__ import annotations

import pytest

from jax_fa4.emulator.errors import PtxSyntaxError, UnknownInstruction
from jax_fa4.emulator.run import load

from .snippet import module_text

FORMS = """
cvta.param.u64 %d1, %d2
cvta.shared.u64 %d1, %d2
cvta.to.shared::cluster.u64 %d1, %d2
cvta.to.global.u64 %d1, %d2
mapa.shared::cluster.u32 %r1, %r2, 1
getctarank.shared::cluster.u32 %r1, %r2
mov.b16 %h1, %h2
mov.b32 %r1, smem
mov.b64 {%r1, %r2}, %d1
mov.b64 %d1, {%r1, 0x40004040}
mov.b128 %q1, {%d1, %d2}
mov.pred %p1, -1
mov.u32 %r1, %tid.x
mov.u32 %r1, %cluster_ctarank
mov.u32 %r1, %clusterid.y
mov.u32 %r1, %nclusterid.x
mov.u32 %r1, %cluster_ctaid.x
mov.u32 %r1, %cluster_nctarank
mov.u32 %r1, %laneid
mov.u32 %r1, %warpid
mov.u32 %r1, %clock
mov.u64 %d1, %globaltimer
selp.b16 %h1, %h2, %h3, %p1
selp.b32 %r1, -1, 0, %p1
selp.f32 %r1, 0fFF800000, %r2, %p1
add.s16 %h1, %h2, 7
add.s32 %r1, %r2, -16777217
add.s64 %d1, %d2, 4611686293305360384
and.pred %p1, %p2, %p3
not.pred %p1, %p2
xor.pred %p1, %p2, %p3
mul.wide.s16 %r1, %h1, 128
mul.wide.u16 %r1, %h1, %h2
mul.wide.u32 %d1, %r1, 4
mul.hi.u32 %r1, %r2, %r3
mad.lo.s32 %r1, %r2, 4, %r3
neg.s16 %h1, %h2
shl.b16 %h1, %h2, 2
shr.u16 %h1, %h2, 9
shr.s16 %h1, %h2, 15
div.s32 %r1, %r2, %r3
rem.u32 %r1, %r2, %r3
popc.b32 %r1, %r2
clz.b32 %r1, %r2
lop3.b32 %r1, %r2, %r3, %r4, 0xEA
prmt.b32 %r1, %r2, %r3, 0x5410U
shf.l.wrap.b32 %r1, %r2, %r3, 5
bfe.u32 %r1, %r2, 3, 5
bfi.b32 %r1, %r2, %r3, 3, 5
add.f32 %r1, %r2, 0f3F800000
add.rm.f32x2 %d1, %d2, %d3
add.rn.ftz.f32x2 %d1, %d2, %d3
fma.rn.f32 %r1, %r2, %r3, %r4
fma.rm.f32 %r1, %r2, %r3, %r4
fma.rn.ftz.f32 %r1, %r2, %r3, %r4
fma.rn.f32.bf16 %r1, %h1, %h2, %r2
fma.rn.f32x2 %d1, %d2, %d3, %d4
fma.rn.bf16x2 %r1, %r2, %r3, %r4
max.f32 %r1, %r2, %r3
max.f32 %r1, %r2, %r3, %r4
max.NaN.f32 %r1, %r2, %r3
min.ftz.f32 %r1, %r2, %r3
mul.f32x2 %d1, %d2, %d3
sub.rn.f32x2 %d1, %d2, %d3
neg.f32 %r1, %r2
abs.f32 %r1, %r2
copysign.f32 %r1, %r2, %r3
ex2.approx.ftz.f32 %r1, %r2
ex2.approx.ftz.bf16x2 %r1, %r2
ex2.approx.f16x2 %r1, %r2
lg2.approx.ftz.f32 %r1, %r2
rcp.approx.ftz.f32 %r1, %r2
rsqrt.approx.ftz.f32 %r1, %r2
sqrt.rn.f32 %r1, %r2
tanh.approx.f32 %r1, %r2
div.rn.f32 %r1, %r2, %r3
div.full.f32 %r1, %r2, %r3
cvt.f32.bf16 %r1, %h1
cvt.f32.f16 %r1, %h1
cvt.rn.bf16.f32 %h1, %r1
cvt.rn.bf16x2.f32 %r1, %r2, %r3
cvt.rn.f16x2.f32 %r1, %r2, %r3
cvt.rn.relu.bf16x2.f32 %r1, %r2, %r3
cvt.rn.satfinite.e4m3x2.f32 %h1, %r2, %r3
cvt.rn.satfinite.e5m2x2.f32 %h1, %r2, %r3
cvt.rn.satfinite.e4m3x2.f16x2 %h1, %r2
cvt.rn.f16x2.e4m3x2 %r1, %h1
cvt.rn.f16x2.e5m2x2 %r1, %h1
cvt.rn.f32.s32 %r1, %r2
cvt.rn.f32.u32 %r1, %r2
cvt.rn.f32.s64 %r1, %d2
cvt.rzi.s32.f32 %r1, %r2
cvt.rzi.f32.f32 %r1, %r2
cvt.sat.f32.f32 %r1, %r2
cvt.s16.s8 %h1, %h2
cvt.s32.s8 %r1, %h2
cvt.u16.u32 %h1, %r2
cvt.u32.u64 %r1, %d2
cvt.u64.u32 %d1, %r2
setp.eq.b32 %p1, %r1, %r2
setp.ne.b64 %p1, %d1, 0
setp.lt.u32 %p1, %r1, %r2
setp.neu.f32 %p1, %r1, %r2
setp.num.f32 %p1, %r1, %r2
setp.ge.and.s32 %p1|%p2, %r1, %r2, !%p3
bar.warp.sync -1
elect.sync %r1|%p1, -1
elect.sync _|%p1, -1
shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1
shfl.sync.idx.b32 %r1|%p1, %r2, 0, 31, -1
shfl.sync.up.b32 %r1, %r2, 1, 0, -1
vote.sync.ballot.b32 %r1, %p1, -1
vote.sync.any.pred %p1, %p2, -1
redux.sync.max.u32 %r1, %r2, -1
redux.sync.add.s32 %r1, %r2, -1
redux.sync.max.f32 %r1, %r2, -1
match.any.sync.b32 %r1, %r2, -1
activemask.b32 %r1
griddepcontrol.launch_dependents
griddepcontrol.wait
setmaxnreg.dec.sync.aligned.u32 24
ld.global.b32 %r1, [%d1+16]
ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%r1, %r2, %r3, %r4}, [%d1]
ld.global.v2.b64 {%d1, %d2}, [%d3]
ld.global.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%d3]
ld.global.v4.b64 {%d1, %d2, %d4, %d5}, [%d3]
ld.acquire.gpu.global.b32 %r1, [%d1]
ld.param.v2.b8 {%h1, %h2}, [p0]
ld.param.b64 %d1, [p0]
ld.shared.v2.b64 {%d1, %d2}, [%r1 + 0x10]
ld.shared.b8 %h1, [%r1]
ld.s8 %h1, [%d1]
st.global.v4.b32 [%d1], {%r1, %r2, %r3, 0}
st.release.gpu.global.b32 [%d1], %r1
st.shared.b16 [%r1], %h1
st.shared::cluster.b32 [%r1], %r2
st.local.b32 [%d1], %r1
atom.global.add.f32 %r1, [%d1], %r2
atom.global.cas.b32 %r1, [%d1], %r2, %r3
atom.global.release.add.u32 %r1, [%d1], 1
atom.shared.exch.b32 %r1, [%r2], %r3
red.release.gpu.global.add.s32 [%d1], 1
red.global.add.v4.f32 [%d1], {%r1, %r2, %r3, %r4}
red.global.add.noftz.bf16x2 [%d1], %r2
stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r2, %r3, %r4, %r5}
stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%r1], {%r2, %r3, %r4, %r5}
stmatrix.sync.aligned.m16n8.x2.trans.shared.b8 [%r1], {%r2, %r3}
ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r2, %r3}, [%r1]
ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r2, %r3}, [%r1]
bar.sync 0
bar.sync %r1, 128
bar.arrive 2, 256
barrier.sync 1, 256
barrier.arrive 1, 256
bar.red.popc.u32 %r1, 0, %p1
barrier.cluster.arrive.relaxed
barrier.cluster.arrive.release.aligned
barrier.cluster.wait
barrier.cluster.wait.acquire.aligned
fence.mbarrier_init.release.cluster
fence.proxy.async
fence.proxy.async.shared::cta
fence.proxy.async.global
fence.acq_rel.gpu
fence.sc.cta
mbarrier.init.shared.b64 [%r1], 1
mbarrier.inval.shared.b64 [%r1]
mbarrier.arrive.expect_tx.shared.b64 %d1, [%r1], %r2
mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r1], %r2
mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%r1], %r2
mbarrier.arrive.shared.b64 %d1, [%r1], 2
mbarrier.arrive.shared::cluster.b64 _, [%r1]
mbarrier.arrive.noComplete.shared.b64 %d1, [%r1], 1
mbarrier.arrive_drop.shared.b64 %d1, [%r1]
mbarrier.expect_tx.relaxed.cta.shared.b64 [%r1], 64
mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p1, [%r1], %r2
mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 1, 10000000
mbarrier.try_wait.shared.b64 %p1, [%r1], %d1
mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 %p1, [%r1], %r2
mbarrier.pending_count.b64 %r1, %d1
cp.async.bulk.commit_group
cp.async.bulk.wait_group.read 0
cp.async.bulk.wait_group 1
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1], %r2, [%r3]
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%d1], 64, [%r3], %h1
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r1], [%r4], %r2, [%r3]
cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 128
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d1], [%r1], 128
cp.async.bulk.prefetch.L2.global [%d1], 128
cp.async.cg.shared.global [%r1], [%d1], 16
cp.async.ca.shared.global.L2::128B [%r1], [%d1], 4, %r2
cp.async.commit_group
cp.async.wait_group 1
cp.async.wait_all
cp.async.mbarrier.arrive.noinc.shared.b64 [%r1]
st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r2, [%r3]
prefetch.global.L2 [%d1]
prefetch.tensormap [%d1]
createpolicy.fractional.L2::evict_first.b64 %d1, 0f3F800000
nanosleep.u32 20
clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1], [%r2]
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %q1
clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r1, %q1
""".strip().splitlines()

UNKNOWN = [
    ("add.q32 %r1, %r2, %r3", "add.q32"),
    ("mul.lo.f32 %r1, %r2, %r3", "mul.lo.f32"),
    ("frobnicate.b32 %r1", "frobnicate.b32"),
    ("ld.global.b32.sideways %r1, [%d1]", "sideways"),
    ("bar.sync.slowly 0", "slowly"),
    ("ex2.approx.f64 %d1, %d2", "f64"),
    ("setmaxnreg.inc.sync.aligned.u32 100", "100"),
    ("setmaxnreg.inc.sync.aligned.u32 264", "264"),
    ("add.s32 %r1, %d2, %r3", "%d2"),
    ("cp.async.cg.shared.global [%r1], [%d1], 12", "12"),
    ("call somewhere", "call"),
]


def program(instruction: str):
    return load(module_text(f"{instruction};", (bytes(16),)))


@pytest.mark.parametrize("instruction", FORMS)
def test_form_is_decoded(instruction):
    assert program(instruction).steps


@pytest.mark.parametrize(("instruction", "named"), UNKNOWN)
def test_unknown_instructions_raise_when_the_module_is_loaded(instruction, named):
    with pytest.raises((UnknownInstruction, PtxSyntaxError), match=r"line \d+") as caught:
        program(instruction)
    assert named in str(caught.value)


def test_modifiers_may_come_in_any_order():
    operands = "[%r1], [%d1, {%r2, %r3}], [%r4], %d2"
    words = ["shared::cta", "global", "tile", "mbarrier::complete_tx::bytes", "L2::cache_hint", "cta_group::1"]
    for order in (words, words[::-1]):
        assert program(f"cp.async.bulk.tensor.2d.{'.'.join(order)} {operands}").steps
