"""Targets without a package: what the base distribution does for an architecture, tested without one."""

from cula_core.delta_rule.plan import BesideCosts, Costs
from cula_core.delta_rule.prefill import Prefill
from cula_core.delta_rule.target import Target

# Two tiles of v to a head, and what an H200 takes.
HOPPER = Target(
    package="cula_hopper_for_tests",
    compiles_for={(9, 0): "sm_90a"},
    archs=("sm90",),
    v_tile=64,
    stages=2,
    scan_stages=3,
    costs=Costs(
        start_us=6.0,
        chain_us={1: 0.95, 2: 1.6},
        block_us=0.0227,
        scan_chain_us=1.1,
        scan_block_us=0.0115,
        merge_us=2.7,
        merge_step_us=3.4,
        beside=BesideCosts(
            start_us={1: 30.0, 2: 36.0},
            prepare_us=3.75,
            alone_us=4.12,
            step_us={1: 1.22, 2: 1.65},
            chain_us=2.0,
            lead=10,
            multiprocessors=100,
        ),
    ),
    recurrence="no_such_module:KdaRecurrence",
)
# One tile, two architectures.
BLACKWELL = Target(
    package="cula_blackwell_for_tests",
    compiles_for={(10, 0): "sm_100a", (10, 3): "sm_103a"},
    archs=("sm100", "sm103"),
    v_tile=128,
    stages=2,
    scan_stages=3,
    costs=Costs(
        start_us=6.0,
        chain_us={1: 0.81},
        block_us=0.0128,
        scan_chain_us=0.81,
        scan_block_us=0.0065,
        merge_us=2.7,
        merge_step_us=3.4,
    ),
    recurrence="no_such_module:KdaRecurrence",
)
ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")

PREFILL = Prefill(HOPPER)
chunk_kda = PREFILL.chunk_kda
kda_workspace_bytes = PREFILL.kda_workspace_bytes
