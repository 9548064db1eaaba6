"""The rows of the registry: what each published schedule is, needs and costs, in words, and how it is built.

A new schedule is one pure function and one row here. The formulas are text for people; tests hold them against the
simulator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from chimera.ir.schedule import Schedule
from chimera.schedules.bitpipe import bitpipe
from chimera.schedules.chimera import chimera
from chimera.schedules.dualpipe import dualpipe, dualpipev
from chimera.schedules.gems import gems
from chimera.schedules.gpipe import gpipe
from chimera.schedules.hanayo import hanayo
from chimera.schedules.interleaved import interleaved
from chimera.schedules.looped_bfs import looped_bfs
from chimera.schedules.one_f_one_b import one_f_one_b
from chimera.schedules.pipedream import pipedream, pipedream_2bw
from chimera.schedules.search.chimera_zb import chimera_zb
from chimera.schedules.search.zero_bubble_auto import zb_1p, zb_2p
from chimera.schedules.v_shaped import v_half, v_min, zb_v
from chimera.schedules.zero_bubble import interleaved_zb, zb_h1, zb_h2

__all__ = ["FAMILIES", "ScheduleFamily"]


@dataclass(frozen=True, slots=True)
class ScheduleFamily:
    """One published schedule.

    ``options`` are the names that ``build`` takes besides ``ranks`` and ``microbatches``; with ``costs`` among them the
    order is made for given costs. In the texts p is ranks, m micro-batches, v chunks per rank, f pairs, w waves, k
    updates; activations are in units of 1/p of the model for one micro-batch. Building a ``searched`` one runs the list
    scheduler, which takes seconds for many ranks.
    """

    name: str
    summary: str
    source: str
    requires: str
    bubble: str
    memory: str
    options: tuple[str, ...]
    build: Callable[..., Schedule]
    searched: bool = False

    @property
    def takes_costs(self) -> bool:
        """Whether the order is made for given costs."""
        return "costs" in self.options


FAMILIES: Final = (
    ScheduleFamily(
        name="gpipe",
        summary="all forwards, then all backwards",
        source="Huang et al., GPipe, NeurIPS 2019 (arXiv 1811.06965), §2.3",
        requires="any p, any m",
        bubble="(p−1)/(m+p−1) of total, (p−1)/m of ideal",
        memory="weights 1, activations m",
        options=(),
        build=gpipe,
    ),
    ScheduleFamily(
        name="1f1b",
        summary="one forward, one backward in turn, with a flush at the end of the step (DAPPLE, PipeDream-Flush)",
        source="Narayanan et al., SC 2021 (arXiv 2104.04473), §2.2.1",
        requires="any p, any m",
        bubble="(p−1)/(m+p−1) of total, (p−1)/m of ideal",
        memory="weights 1, activations min(m, p−rank)",
        options=(),
        build=one_f_one_b,
    ),
    ScheduleFamily(
        name="interleaved",
        summary="1F1B over v model chunks per rank, so that filling and draining take 1/v of the time",
        source="Narayanan et al., SC 2021 (arXiv 2104.04473), §2.2.2",
        requires="any p, m and v ≥ 1 (v is 2 when not given); v = 1 is 1f1b",
        bubble="(p−1)/(v·m+p−1) of total, (p−1)/(v·m) of ideal, for m ≥ p with m mod p ≤ p/2",
        memory="weights 1, activations at most p + (p−1)/v for m a multiple of p",
        options=("chunks",),
        build=interleaved,
    ),
    ScheduleFamily(
        name="chimera",
        summary="f pairs of pipelines in opposite directions over the same ranks",
        source="Li and Hoefler, SC 2021 (arXiv 2107.06925), §3",
        requires="p even, f divides p/2, any m; unit concatenate, double or halve",
        bubble="(p−2f)/(2fm+p−2f) of total for F = B; (p−2)/(3m/2+p−2) of total for B = 2F, f = 1, m = p",
        memory="weights 2f, activations p−p/(2f)+1 … p for m = p; up to 2p with unit double",
        options=("pairs", "unit"),
        build=chimera,
    ),
    ScheduleFamily(
        name="chimera-zb",
        summary="Chimera's pipelines with split backward, in the order that the list scheduler finds",
        source="placement Li and Hoefler, SC 2021 (arXiv 2107.06925), §3; the order is ours (docs/search.md)",
        requires="p even, f divides p/2, any m",
        bubble="(p−2f)/(6fm+p−2f) of total for F = I = W and m a multiple of p",
        memory="weights 2f, activations at most p",
        options=("pairs",),
        build=chimera_zb,
        searched=True,
    ),
    ScheduleFamily(
        name="looped-bfs",
        summary="GPipe over v model chunks per rank, each chunk finished before the next (breadth-first)",
        source="Lamy-Poirier, MLSys 2023 (arXiv 2211.05953), §4",
        requires="any p, m and v ≥ 1 (v is 2 when not given); v = 1 is gpipe",
        bubble="(p−1)/(v·m+p−1) of total, (p−1)/(v·m) of ideal, for m ≥ p",
        memory="weights 1, activations m",
        options=("chunks",),
        build=looped_bfs,
    ),
    ScheduleFamily(
        name="hanayo",
        summary="one pipeline whose stages go down the ranks and up again in w waves",
        source="Liu et al., Hanayo, SC 2023 (arXiv 2308.15762), §3",
        requires="any p, m and w ≥ 1 (w is 1 when not given)",
        bubble="(p−1)/(2wm+p−1) of total for F = B and m a multiple of p",
        memory="weights 1, activations at most min(m, p)",
        options=("waves",),
        build=hanayo,
    ),
    ScheduleFamily(
        name="bitpipe",
        summary="two pipelines in opposite directions, each in waves as hanayo's",
        source="Wu et al., BitPipe, 2024 (arXiv 2410.19367), §3",
        requires="p even, any m and w ≥ 1 (w is 1 when not given)",
        bubble="(p−2)/(4wm+p−2) of total for F = B and m a multiple of p",
        memory="weights 2, activations at most min(m, p)",
        options=("waves",),
        build=bitpipe,
    ),
    ScheduleFamily(
        name="gems",
        summary="two pipelines in opposite directions that take turns, one micro-batch each in flight",
        source="Jain et al., GEMS, SC 2020; Li and Hoefler, SC 2021 (arXiv 2107.06925), §2",
        requires="any p, any m",
        bubble="1 − m(F+B)/(m·p·B+p·F+(m−1)·F) of total for F ≤ B",
        memory="weights 2, activations 1",
        options=(),
        build=gems,
    ),
    ScheduleFamily(
        name="zb-h1",
        summary="1F1B with the backward split into I and W, rank r holding back r of the W",
        source="Qi et al., Zero Bubble, ICLR 2024 (arXiv 2401.10241), §2",
        requires="any p, any m",
        bubble="time (p−1)(F+I−W) on the span's clock, for m ≥ p, W ≤ F and W ≤ I",
        memory="weights 1, activations min(m, p)",
        options=(),
        build=zb_h1,
    ),
    ScheduleFamily(
        name="zb-h2",
        summary="zb-h1 with twice the forwards ahead, for steps that may start before the last one has ended",
        source="Qi et al., Zero Bubble, ICLR 2024 (arXiv 2401.10241), §2",
        requires="any p, any m",
        bubble="time (p−1)(F+I−2W) on the span's clock, for m ≥ 2p−1 and 2W ≤ F+I",
        memory="weights 1, activations min(m, 2p−1)",
        options=(),
        build=zb_h2,
    ),
    ScheduleFamily(
        name="zb-1p",
        summary="split backward in the order of least span for given costs, within 1f1b's memory",
        source="Qi et al., Zero Bubble, ICLR 2024 (arXiv 2401.10241), §3; the order is ours (docs/search.md)",
        requires="any p, any m; costs (F = I = W when not given), a memory limit (p when not given)",
        bubble="at most zb-h1's on the span's clock, for any costs",
        memory="weights 1, activations at most p",
        options=("costs", "memory_limit"),
        build=zb_1p,
        searched=True,
    ),
    ScheduleFamily(
        name="zb-2p",
        summary="split backward in the order of least span for given costs, within twice 1f1b's memory",
        source="Qi et al., Zero Bubble, ICLR 2024 (arXiv 2401.10241), §3; the order is ours (docs/search.md)",
        requires="any p, any m; costs (F = I = W when not given), a memory limit (2p when not given)",
        bubble="at most zb-h2's on the span's clock, for any costs; near none for m well above 2p",
        memory="weights 1, activations at most 2p",
        options=("costs", "memory_limit"),
        build=zb_2p,
        searched=True,
    ),
    ScheduleFamily(
        name="interleaved-zb",
        summary="interleaved with the backward split into I and W, rank r holding back r of the W",
        source="Qi et al., Zero Bubble, ICLR 2024 (arXiv 2401.10241), §2",
        requires="any p, m and v ≥ 1 (v is 2 when not given); v = 1 is zb-h1",
        bubble="time (p−1)(F+I−W)/v on the span's clock, for m a multiple of p, W ≤ F and W ≤ I",
        memory="weights 1, activations p for m a multiple of p",
        options=("chunks",),
        build=interleaved_zb,
    ),
    ScheduleFamily(
        name="zb-v",
        summary="split backward on a V of two stages per rank, without a bubble at F = I = W",
        source="Qi et al., Zero Bubble, ICLR 2024 (arXiv 2401.10241), §6",
        requires="any p, any m",
        bubble="none on the span's clock for F = I = W and m ≥ 2p−1; the makespan is (p−1)F/2 longer",
        memory="weights 1, activations at most min(m, p)",
        options=(),
        build=zb_v,
    ),
    ScheduleFamily(
        name="v-half",
        summary="split backward on a V, half of 1f1b's activations at half of its bubble",
        source="Qi et al., Controllable Memory, NeurIPS 2024 (arXiv 2405.15362), §4",
        requires="any p, any m",
        bubble="time 3(p−1)F/2 for F = I = W and m ≥ p; F/2 less for an odd p above 1",
        memory="weights 1, activations at most ⌊(p+2)/2⌋",
        options=(),
        build=v_half,
    ),
    ScheduleFamily(
        name="v-min",
        summary="split backward on a V, a third of 1f1b's activations at two thirds of its bubble",
        source="Qi et al., Controllable Memory, NeurIPS 2024 (arXiv 2405.15362), §4",
        requires="any p, any m",
        bubble="time 2(p−1)F − F/2 for F = I = W, m ≥ p and p > 1; F more where 3 divides p",
        memory="weights 1, activations at most ⌊(p+4)/3⌋",
        options=(),
        build=v_min,
    ),
    ScheduleFamily(
        name="dualpipe",
        summary="two pipelines in opposite directions, the forwards of one paired with the backwards of the other",
        source="DeepSeek-AI, DeepSeek-V3, 2024 (arXiv 2412.19437), §3.2.1",
        requires="p even, m even and at least 2p",
        bubble="time (p/2−1)(F&B+B−3W) for F = I, with F&B the time of a pair",
        memory="weights 2, activations p+1",
        options=(),
        build=dualpipe,
    ),
    ScheduleFamily(
        name="dualpipev",
        summary="dualpipe folded into a V of two stages per rank, with one copy of the weights",
        source="the published DualPipe code, after DeepSeek-AI, DeepSeek-V3, 2024 (arXiv 2412.19437)",
        requires="any p, m at least 2p",
        bubble="time (p−1)/2·(F&B+B−3W) for F = I, with F&B the time of a pair",
        memory="weights 1, activations p+½",
        options=(),
        build=dualpipev,
    ),
    ScheduleFamily(
        name="pipedream",
        summary="asynchronous: 1f1b with an update after every backward, on as many versions of the weights",
        source="Narayanan et al., PipeDream, SOSP 2019 (arXiv 1806.03377), §3",
        requires="any p, any m; m updates",
        bubble="(p−1)/(m+p−1) of total, over all updates",
        memory="weights p−rank at most, activations min(m, p−rank)",
        options=(),
        build=pipedream,
    ),
    ScheduleFamily(
        name="pipedream-2bw",
        summary="asynchronous: 1f1b with an update after every m/k micro-batches, on two versions of the weights",
        source="Narayanan et al., PipeDream-2BW, ICML 2021 (arXiv 2006.09503), §3",
        requires="any p, any m; k updates, k divides m and m/k ≥ p (the largest when not given), or k = 1",
        bubble="(p−1)/(m+p−1) of total, over all updates",
        memory="weights 2 (1 if k = 1), activations min(m, p−rank)",
        options=("updates",),
        build=pipedream_2bw,
    ),
)
