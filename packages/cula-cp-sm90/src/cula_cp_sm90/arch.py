"""What is Hopper's own beside the recurrence."""

from __future__ import annotations

from cula_core.delta_rule.plan import BesideCosts, Costs
from cula_core.delta_rule.target import Target

TARGET = Target(
    package="cula_cp_sm90",
    compiles_for={(9, 0): "sm_90a"},
    archs=("sm90",),
    v_tile=64,
    stages=2,
    scan_stages=3,
    # Fitted on an H200 (docs/kda-prefill.md).
    costs=Costs(
        start_us=6.0,
        chain_us={1: 0.95, 2: 1.6},
        block_us=0.0227,
        scan_chain_us=1.1,
        scan_block_us=0.0115,
        merge_us=4.0,
        merge_step_us=2.1,
        beside=BesideCosts(
            start_us={1: 30.0, 2: 36.0},
            prepare_us=3.72,
            alone_us=3.75,
            step_us={1: 1.03, 2: 1.6},
            chain_us=2.5,
            lead=10,
            multiprocessors=100,
        ),
    ),
    recurrence="cula_cp_sm90.kernels.recurrence:KdaRecurrence",
    backward=True,
)
