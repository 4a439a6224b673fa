"""Barriers as data: an edge is a ring of slots between a TMA producer and consumer warps.

Each slot has a full and an empty mbarrier; in shared memory an edge's full ones come first.
"""

import dataclasses
import enum

import cutlass
import cutlass.cute as cute
from cutlass import pipeline

from . import ptx

__all__ = ["Edge", "NamedBarrierId", "make_pipelines", "release"]


class NamedBarrierId(enum.IntEnum):
    """First of the hardware barriers that a use takes, one a warpgroup; 0 is the CTA's own."""

    TURN = 1
    STORE = 4
    CLEAR = 7
    ORDER = 8
    DQ_FULL = 8
    DQ_EMPTY = 10
    WEIGHTS = 11


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edge:
    """One thread fills a slot by TMA (arrival count 1 + bytes); one thread of each consumer warp empties it."""

    name: str
    stages: int
    tx_bytes: int  # that complete a slot
    consumer_warps: int  # of one CTA
    ctas: int = 1  # of the cluster, whose producers fill parts of each other's slots: all empty a slot for each other


def make_pipelines(edges: tuple[Edge, ...]) -> dict[str, tuple[pipeline.PipelineProducer, pipeline.PipelineConsumer]]:
    """Initialises all barriers and returns each edge's two ends by name. Every thread of the CTA calls it.

    With an edge between CTAs it returns once all of them have come here.
    """
    smem = cutlass.memory.SmemAllocator()
    ends = {}
    for edge in edges:
        storage = smem.allocate_array(cutlass.Int64, 2 * edge.stages)
        ring = pipeline.PipelineTmaAsync.create(
            num_stages=edge.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, edge.ctas * edge.consumer_warps),
            tx_count=edge.tx_bytes,
            barrier_storage=storage,
            defer_sync=True,
        )
        ends[edge.name] = ring.make_participants()
    cute.arch.mbarrier_init_fence()
    if any(edge.ctas > 1 for edge in edges):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
    return ends


@cute.jit
def release(consumer: pipeline.PipelineConsumer, ctas: cutlass.Constexpr) -> None:
    """The calling warp has read the slot: says so to the producer of every CTA of a cluster of `ctas`."""
    lane = cute.arch.lane_idx()
    if lane < ctas:
        ptx.arrive_at(consumer.current_handle().barrier, lane)
