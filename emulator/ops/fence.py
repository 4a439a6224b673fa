"""Memory fences, PTX ISA 9.7.13 (`fence`, `membar`, `fence.proxy`)."""

from __future__ import annotations

from jax_fa4.emulator.decode import Effect, Form, family
from jax_fa4.emulator.state import Lanes, Warp


def _fence_inits(warp: Warp) -> None:
    """Initialised mbarriers may now be used by copies and by other CTAs, once they have synchronised with this warp."""
    warp.clock.fence_inits()
    for cta in warp.cta.cluster.ctas:
        cta.mbarriers.fence_init(warp.clock)


@family("fence", "membar")
def fence(form: Form) -> Effect:
    """Makes relaxed synchronisation before and after it order; values are sequentially consistent without it."""
    form.take("acq_rel", "sc", "acquire", "release", default="sc")
    form.take("sync_restrict::shared::cta", "sync_restrict::shared::cluster", default="none")
    form.take("cta", "cluster", "gpu", "sys", "gl", default="none")
    form.end()
    return form.effect(lambda warp, lanes: warp.clock.fence())


@family("fence.mbarrier_init")
def fence_mbarrier_init(form: Form) -> Effect:
    form.take("release")
    form.take("cluster")
    form.end()
    return form.effect(lambda warp, lanes: _fence_inits(warp))


@family("fence.proxy.async")
def fence_proxy_async(form: Form) -> Effect:
    space = form.take("global", "shared::cta", "shared::cluster", default="all")
    form.end()

    def execute(warp: Warp, lanes: Lanes) -> None:
        if space != "global":
            covers_own = not warp.writing_lanes & ~lanes.bits
            warp.clock.fence_proxy(covers_own=covers_own)
            if covers_own:
                warp.writing_lanes = 0
            _fence_inits(warp)

    return form.effect(execute)
