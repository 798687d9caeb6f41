"""A decode step with the short convolution before it and the gated RMSNorm behind it: one launch, or one for each."""

from __future__ import annotations

from benchmarks.harness.registry import Op, Setting
from benchmarks.ops import in_place
from benchmarks.ops.delta import fused_problem as fused
from benchmarks.ops.delta import problem as delta
from benchmarks.ops.delta.fused_problem import setting
from benchmarks.ops.delta.fused_providers import PROVIDERS, check
from benchmarks.ops.delta.problem import GATES

BATCHES = (1, 4, 8, 16)
FEW_BATCHES = (1, 4, 16)


def settings(quick: bool) -> list[Setting]:
    """One token with both, four tokens, the norm alone, other states and the other layout."""
    main = [setting(gate, batch) for gate in GATES for batch in BATCHES]
    if quick:
        return [s for s in main if s.params["B"] == 8]
    return [
        *main,
        *[setting("gdn", batch, 4) for batch in FEW_BATCHES],
        *[setting("gdn", batch, conv=False) for batch in FEW_BATCHES],
        *[setting("gdn", batch, state="bf16") for batch in BATCHES],
        *[setting("gdn", batch, layout="kv") for batch in BATCHES],
    ]


NOTES = (
    "gdn: one gate per head, 16 q and k heads, a norm with silu; kda: a gate per channel of K, 32 q and k heads, a "
    "norm with the sigmoid. conv-norm: a convolution of width 4 with SiLU over q, k and v before the step, and an "
    "RMSNorm over V behind it; norm: the norm alone.",
    "cula is one launch of delta_rule_decode. cula_chain is three: the convolution-update kernel of fla, "
    "delta_rule_decode without options, and the gated-norm kernel of fla (two without the convolution).",
    "fla_chain is the convolution, the step and the norm of fla. Its step copies views that are not dense, so several "
    "rows have a convolution each for q, k and v, as in its layers. For GDN it returns new states, always fp32, "
    "without slots; for KDA it is the function below the public one, which takes slots. Its update of the convolution "
    "takes one token, so there is no chain for four. Windows of the convolution are dense, in the order of the rows.",
    "vllm_after_conv is fused_gdn_decode_post_conv_mtp of vLLM: the step and the norm, without the convolution, so it "
    "does less in the settings that have one. Of four tokens it is asked to store the last state only. vllm is its "
    "fused_kda_decode, sglang is kda_fused_decode of SGLang, both with convolution and norm. The kernels are those of "
    "a module vllm_decode, which has them unchanged; that of vllm for 32 heads is an instance that the engine does "
    "not build. Where one fails or is wrong it is skipped, with the reason.",
    "Outputs, states and kept inputs of the convolution are compared with the reference in fp64, which rounds what "
    "the convolution returns to bf16 for cula and both chains, as they do.",
    in_place.NOTE,
    "cold: buffer sets rotate over more than 3x the L2.",
)

OP = Op(
    name="delta_decode_fused",
    title="GDN and KDA decode with convolution and norm, HV=32, K=V=128, bf16 activations",
    settings=settings,
    providers=PROVIDERS,
    make_inputs=fused.make_inputs,
    set_bytes=delta.set_bytes,
    check=check,
    notes=NOTES,
)
