"""Special registers as C++ expressions."""

from __future__ import annotations

_SHARED_BYTES = "(machine.kernel->static_shared_bytes + machine.dynamic_shared_bytes)"
_LINEAR_CTA = (
    "(self()->cta->index[0] + machine.grid[0] * "
    "(self()->cta->index[1] + machine.grid[1] * self()->cta->index[2]))"
)
_CLUSTER_CTAS = "(machine.cluster_shape[0] * machine.cluster_shape[1] * machine.cluster_shape[2])"

SPECIALS = {
    "WARP_SZ": "32u",
    "%laneid": "self()->lane",
    "%warpid": "self()->warp->id",
    "%nwarpid": "64u",
    "%smid": f"({_LINEAR_CTA} % 132)",
    "%nsmid": "132u",
    "%gridid": "0ull",
    "%envreg0": "0u",
    "%clock": "(uint32_t)machine.round",
    "%clock_hi": "(uint32_t)(machine.round >> 32)",
    "%clock64": "machine.round",
    "%globaltimer": "(machine.round * 1000)",
    "%globaltimer_lo": "(uint32_t)(machine.round * 1000)",
    "%globaltimer_hi": "(uint32_t)(machine.round * 1000 >> 32)",
    "%dynamic_smem_size": "machine.dynamic_shared_bytes",
    # Allocated in units of 128 bytes; the system keeps 1024 bytes of each CTA for itself.
    "%total_smem_size": f"({_SHARED_BYTES} + 127 & ~127u)",
    "%aggr_smem_size": f"(({_SHARED_BYTES} + 127 & ~127u) + 1024)",
    "%is_explicit_cluster": f"({_CLUSTER_CTAS} > 1)",
    "%cluster_ctarank": "self()->cta->rank",
    "%cluster_nctarank": "(uint32_t)self()->cta->cluster->ctas.size()",
    "%lanemask_eq": "(1u << self()->lane)",
    "%lanemask_lt": "((1u << self()->lane) - 1u)",
    "%lanemask_le": "(~0u >> (31 - self()->lane))",
    "%lanemask_gt": "~(~0u >> (31 - self()->lane))",
    "%lanemask_ge": "~((1u << self()->lane) - 1u)",
}
for _axis, _name in enumerate("xyz"):
    SPECIALS |= {
        f"%tid.{_name}": f"self()->tid[{_axis}]",
        f"%ntid.{_name}": f"machine.block[{_axis}]",
        f"%ctaid.{_name}": f"self()->cta->index[{_axis}]",
        f"%nctaid.{_name}": f"machine.grid[{_axis}]",
        f"%cluster_ctaid.{_name}": f"(self()->cta->index[{_axis}] % machine.cluster_shape[{_axis}])",
        f"%cluster_nctaid.{_name}": f"machine.cluster_shape[{_axis}]",
        f"%clusterid.{_name}": f"self()->cta->cluster->index[{_axis}]",
        f"%nclusterid.{_name}": f"(machine.grid[{_axis}] / machine.cluster_shape[{_axis}])",
    }
