"""Floor 2: one pure function per published schedule, and the registry that finds them by name."""

from chimera.schedules.bitpipe import bitpipe
from chimera.schedules.chimera import chimera
from chimera.schedules.dualpipe import dualpipe, dualpipev
from chimera.schedules.families import ScheduleFamily
from chimera.schedules.gems import gems
from chimera.schedules.gpipe import gpipe
from chimera.schedules.hanayo import hanayo
from chimera.schedules.interleaved import interleaved
from chimera.schedules.looped_bfs import looped_bfs
from chimera.schedules.one_f_one_b import one_f_one_b
from chimera.schedules.pipedream import pipedream, pipedream_2bw
from chimera.schedules.registry import SCHEDULES, build_schedule
from chimera.schedules.search.zero_bubble_auto import zb_1p, zb_2p
from chimera.schedules.v_shaped import v_half, v_min, zb_v
from chimera.schedules.zero_bubble import interleaved_zb, zb_h1, zb_h2

__all__ = [
    "SCHEDULES",
    "ScheduleFamily",
    "bitpipe",
    "build_schedule",
    "chimera",
    "dualpipe",
    "dualpipev",
    "gems",
    "gpipe",
    "hanayo",
    "interleaved",
    "interleaved_zb",
    "looped_bfs",
    "one_f_one_b",
    "pipedream",
    "pipedream_2bw",
    "v_half",
    "v_min",
    "zb_1p",
    "zb_2p",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
