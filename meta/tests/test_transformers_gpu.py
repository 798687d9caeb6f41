"""Models of transformers with random weights: the same logits and tokens with cula behind FLA, and in MiniMax."""

from __future__ import annotations

import warnings

import pytest
import torch

from cula.integrations import transformers as plugin

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("quick_fla")]

BOTH = {
    "hidden_size": 256, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "vocab_size": 512, "intermediate_size": 256, "moe_intermediate_size": 64, "num_experts": 4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SIZES = {
    "kimi_linear": {
        "num_attention_heads": 2, "num_key_value_heads": 2, "linear_num_heads": 2, "kv_lora_rank": 64,
        "mlp_layer_types": ["dense", "dense"],  # where experts are chosen, rounding decides between near ones
    },
    "qwen3_next": {
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64,
    },
    "minimax": {
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "num_local_experts": 1,
        "num_experts_per_tok": 1,
    },
}  # fmt: skip
KERNELS = {
    "kimi_linear": ("KdaPrepare", "DeltaDecode"),
    "qwen3_next": ("Recurrence", "DeltaDecode"),
    "minimax": ("LightningPrefill", "LightningDecode"),
}


@pytest.fixture
def device():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper has kernels for the prefill of both models")
    yield torch.device("cuda", torch.cuda.current_device())
    plugin.unregister()


def model_of(name, device):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, **BOTH, **SIZES[name])
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def kernels_of(function):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as told:
        function()
        torch.cuda.synchronize()
    return [event.key for event in told.key_averages()]


@torch.no_grad()
@pytest.mark.parametrize("name", SIZES)
def test_logits_and_tokens(device, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_of(name, device)
        tokens = torch.randint(3, 512, (2, 200), device=device)

        def made(count):
            return model.generate(
                tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False
            )

        expected, theirs = model(tokens).logits.float(), made(4)
        plugin.register()
        found, ours = model(tokens).logits.float(), made(4)
        kernels = kernels_of(lambda: made(2))
    for part in KERNELS[name]:
        assert any(part in kernel for kernel in kernels), (part, kernels)
    difference = (found - expected).norm() / expected.norm()
    assert difference <= 2e-2, f"relative RMSE {difference:.2e}"
    # The first token follows from the same prompt, the others from states that kernels of decode went on from.
    same = (ours == theirs).float().mean().item()
    assert torch.equal(ours[:, :200], tokens) and same > 0.98, same
