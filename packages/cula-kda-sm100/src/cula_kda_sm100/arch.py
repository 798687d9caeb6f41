"""What is Blackwell's own beside the recurrence."""

from __future__ import annotations

from cula_core.delta_rule.plan import Costs
from cula_core.delta_rule.target import Target

TARGET = Target(
    package="cula_kda_sm100",
    compiles_for={(10, 0): "sm_100a", (10, 3): "sm_103a"},
    archs=("sm100", "sm103"),
    v_tile=128,
    stages=2,
    scan_stages=3,
    # As docs/kda-sm100.md predicts them: not measured.
    costs=Costs(
        start_us=6.0,
        chain_us={1: 0.81},
        block_us=0.0128,
        scan_chain_us=0.81,
        scan_block_us=0.0065,
        merge_us=4.0,
        merge_step_us=2.1,
    ),
    recurrence="cula_kda_sm100.kernels.recurrence:KdaRecurrence",
)
