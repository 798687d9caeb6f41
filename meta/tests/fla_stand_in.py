"""What stands in for flash-linear-attention 0.6 in tests: its signatures, with the oracles' numbers.

It takes no `**kwargs`, which the real functions swallow: an argument that FLA does not know must not be sent.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cula import _discovery, _registry, reference
from cula.integrations import fla
from cula_core.reference.gates import log_decay

H, HV, K, V = 2, 4, 8, 6
CU = torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32)
T = 9
SEEN: list[str] = []


def _no_groups(q: Tensor, k: Tensor, v: Tensor) -> None:
    assert q.shape[2] == k.shape[2] == v.shape[2], "FLA's simple GLA has no grouped heads"


def chunk_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None,
):  # fmt: skip
    SEEN.append("chunk_simple_gla")
    assert initial_state is None or initial_state.dtype == torch.float32
    _no_groups(q, k, v)
    return reference.recurrent_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens
    )


def fused_recurrent_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
    state_v_first=False, cu_seqlens=None,
):  # fmt: skip
    SEEN.append("fused_recurrent_simple_gla")
    assert not reverse and cu_seqlens is None
    assert initial_state.dtype in (torch.float32, torch.float64)
    _no_groups(q, k, v)
    return reference.recurrent_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first
    )


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, *, use_gate_in_kernel=False, A_log=None, dt_bias=None,
):  # fmt: skip
    SEEN.append("chunk_gated_delta_rule")
    assert initial_state is None or initial_state.dtype == torch.float32
    return reference.chunk_gated_delta_rule(**locals())


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, use_graph=False, max_num_seqs=None, *, A_log=None,
    dt_bias=None,
):  # fmt: skip
    arguments = dict(locals())
    SEEN.append("chunk_kda")
    assert initial_state is None or initial_state.dtype == torch.float32
    assert dt_bias is None or dt_bias.dim() == 1, "the gradient that FLA gives has this shape"
    assert not arguments.pop("use_graph") and arguments.pop("max_num_seqs") is None
    return reference.chunk_kda(**arguments)


def fused_recurrent_kda(
    q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False, lower_bound=None, state_v_first=False, cu_seqlens=None,
):  # fmt: skip
    arguments = dict(locals())
    SEEN.append("fused_recurrent_kda")
    with torch.no_grad():
        o, final = reference.recurrent_kda(**arguments)
    return o, None if final is None else final.float()


def fused_recurrent_gated_delta_rule(
    q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
):  # fmt: skip
    arguments = dict(locals())
    SEEN.append("fused_recurrent_gated_delta_rule")
    assert beta.shape == v.shape[:3], "without beta FLA makes one of the heads of q"
    with torch.no_grad():
        o, final = reference.fused_recurrent_gated_delta_rule(**arguments)
    return o, None if final is None else final.float()


RCP_LN2 = 1.4426950216


def prepare_chunk_indices(cu_seqlens, chunk_size, cu_seqlens_cpu=None):
    bounds = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
    counts = [-(-(b - a) // chunk_size) for a, b in zip(bounds, bounds[1:])]
    return torch.tensor([(n, i) for n, count in enumerate(counts) for i in range(count)])


def _chunks(tokens, chunk_size, cu_seqlens, chunk_indices):
    if cu_seqlens is None:
        return [slice(a, min(a + chunk_size, tokens)) for a in range(0, tokens, chunk_size)]
    starts = [(int(n), int(cu_seqlens[n]) + int(i) * chunk_size) for n, i in chunk_indices]
    return [slice(a, min(a + chunk_size, int(cu_seqlens[n + 1]))) for n, a in starts]


def chunk_local_cumsum(
    g, chunk_size, reverse=False, scale=None, cu_seqlens=None, output_dtype=torch.float, chunk_indices=None,
):  # fmt: skip
    assert g.is_contiguous() and (cu_seqlens is None) == (chunk_indices is None)
    o = torch.full_like(g, float("nan"), dtype=output_dtype)
    for part in _chunks(g.shape[1], chunk_size, cu_seqlens, chunk_indices):
        rows = g[:, part].float()
        o[:, part] = rows.flip(1).cumsum(1).flip(1) if reverse else rows.cumsum(1)
    return o if scale is None else o * scale


def chunk_simple_gla_bwd(
    q, k, v, g, g_gamma, initial_state, do, dht, scale, state_v_first=False, cu_seqlens=None, chunk_size=64,
    chunk_indices=None,
):  # fmt: skip
    """g and its derivative are those of sums over a chunk, g in powers of two and the derivative in natural ones."""
    SEEN.append("chunk_simple_gla_bwd")
    _no_groups(q, k, v)
    assert all(x is None or x.is_contiguous() for x in (q, k, v, g, initial_state, do, dht))
    assert not torch.is_grad_enabled() and (g is None or g_gamma is None)
    sums = None if g is None else g / RCP_LN2
    leaves = [
        None if x is None else x.detach().requires_grad_() for x in (q, k, v, sums, initial_state)
    ]
    q, k, v, sums, h0 = leaves
    with torch.enable_grad():
        if sums is not None:
            parts = _chunks(q.shape[1], chunk_size, cu_seqlens, chunk_indices)
            zero = torch.zeros_like(sums[:, :1])
            g = torch.cat([sums[:, part].diff(dim=1, prepend=zero) for part in parts], 1)
        gamma = None if g_gamma is None else g_gamma / RCP_LN2
        o, ht = reference.recurrent_simple_gla(
            q, k, v, g, gamma, scale, h0, True, state_v_first, cu_seqlens
        )
        outputs, given = ((o, ht), (do, dht)) if dht is not None else ((o,), (do,))
        wanted = [x for x in leaves if x is not None]
        found = iter(torch.autograd.grad(outputs, wanted, given, allow_unused=True))
    return tuple(None if x is None else next(found).contiguous() for x in leaves)


def l2norm_fwd(x):
    assert x.is_contiguous()
    rstd = (x.float().square().sum(-1) + 1e-6).rsqrt()
    return (x.float() * rstd[..., None]).to(x.dtype), rstd


def l2norm_bwd(y, rstd, dy):
    assert y.shape == dy.shape and dy.is_contiguous()
    y, dy = y.float(), dy.float()
    return (rstd[..., None] * (dy - y * (y * dy).sum(-1, keepdim=True))).bfloat16()


def fused_beta_sigmoid_fwd(x, scale=1.0):
    assert x.is_contiguous()
    return scale * x.float().sigmoid()


def fused_beta_sigmoid_bwd(x, dy, scale=1.0):
    y = x.float().sigmoid()
    return (dy.float() * scale * y * (1 - y)).to(x.dtype)


def kda_gate_chunk_cumsum(
    g, A_log, chunk_size, scale=None, dt_bias=None, cu_seqlens=None, output_dtype=torch.float,
    chunk_indices=None, lower_bound=None,
):  # fmt: skip
    decay = log_decay(g.float(), A_log, dt_bias, lower_bound=lower_bound)
    return chunk_local_cumsum(
        decay, chunk_size, False, scale, cu_seqlens, output_dtype, chunk_indices
    )


def chunk_gated_delta_rule_fwd_h(
    k, w, u, g=None, gk=None, initial_state=None, output_final_state=False, chunk_size=64, save_new_value=True,
    state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, chunk_offsets=None,
):  # fmt: skip
    """Not the states, but whether what they are made of has arrived; the backward below looks for these results."""
    assert [int(x.flatten()[0]) for x in (w, u, k)] == [MARKS[name] for name in ("w", "u", "kg")]
    assert gk.dtype == torch.float32 and g is None and not output_final_state
    shape = (V, K) if state_v_first else (K, V)
    return marked("h", 1, *shape), marked("v_new", *u.shape), None


def chunk_kda_bwd(
    q, k, v, beta, Aqk, Akk, scale, initial_state, do, dht, g=None, g_org=None, state_v_first=False,
    cu_seqlens=None, chunk_indices=None, chunk_size=64, safe_gate=False, lower_bound=None,
    use_gate_in_kernel=False, A_log=None, dt_bias=None, disable_recompute=False, **kept,
):  # fmt: skip
    """g: sums over a chunk in powers of two, made here of a gate inside if nothing was kept; dg: of each decay."""
    SEEN.append("chunk_kda_bwd")
    tensors = (q, k, v, beta, initial_state, do, dht, g, g_org)
    assert all(x is None or x.is_contiguous() for x in tensors) and not torch.is_grad_enabled()
    assert dt_bias is None or dt_bias.dim() == 1
    names = ("w", "u", "qg", "kg", "v_new", "h")
    assert disable_recompute == (set(kept) == set(names)) == bool(kept)
    for name, x in {"Aqk": Aqk, "Akk": Akk, **kept}.items():
        assert (x == MARKS[name]).all()
    assert (g_org is not None) == use_gate_in_kernel
    assert (g is None) == (use_gate_in_kernel and not kept)
    parts = _chunks(q.shape[1], chunk_size, cu_seqlens, chunk_indices)
    if g is not None:
        zero = torch.zeros_like(g[:, :1])
        decay = torch.cat([g[:, part].diff(dim=1, prepend=zero) for part in parts], 1) / RCP_LN2
        if use_gate_in_kernel:
            wanted = log_decay(g_org.float(), A_log, dt_bias, lower_bound=lower_bound)
            torch.testing.assert_close(decay, wanted, rtol=1e-3, atol=1e-4)
    leaves = [
        None if x is None else x.detach().float().requires_grad_()
        for x in (q, k, v, beta, g_org if use_gate_in_kernel else decay, initial_state, A_log, dt_bias)
    ]  # fmt: skip
    q, k, v, beta, g, h0, A_log, dt_bias = leaves
    with torch.enable_grad():
        o, ht = reference.recurrent_kda(
            q, k, v, g, beta, scale=scale, initial_state=h0, output_final_state=True, lower_bound=lower_bound,
            use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias, state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        outputs, given = (o, ht), (do.float(), torch.zeros_like(ht) if dht is None else dht)
        wanted = [x for x in leaves if x is not None]
        found = iter(torch.autograd.grad(outputs, wanted, given, allow_unused=True))
    dq, dk, dv, db, dg, dh0, dA, dbias = (None if x is None else next(found) for x in leaves)
    return dq, dk, dv, db, dg, dh0, dA, dbias


# What tensors that a kernel keeps for the backward are filled with here.
MARKS = {name: mark for mark, name in enumerate(("Aqk", "Akk", "w", "u", "qg", "kg", "v_new", "h"))}


def marked(name: str, *shape: int) -> Tensor:
    return torch.full(shape, MARKS[name], dtype=torch.bfloat16)


def put_modules(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    """Makes modules importable by name, with these contents."""
    for name, contents in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)


def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FLA is importable, and this machine claims a Hopper GPU."""
    modules: dict[str, dict[str, Any]] = {
        "fla": {},
        "fla.ops": {},
        "fla.ops.kda": {"chunk_kda": chunk_kda, "fused_recurrent_kda": fused_recurrent_kda},
        "fla.ops.gated_delta_rule": {
            "chunk_gated_delta_rule": chunk_gated_delta_rule,
            "fused_recurrent_gated_delta_rule": fused_recurrent_gated_delta_rule,
        },
        "fla.ops.simple_gla": {
            "chunk_simple_gla": chunk_simple_gla,
            "fused_recurrent_simple_gla": fused_recurrent_simple_gla,
        },
        "fla.ops.simple_gla.chunk": {"chunk_simple_gla_bwd": chunk_simple_gla_bwd},
        "fla.ops.utils": {
            "chunk_local_cumsum": chunk_local_cumsum,
            "prepare_chunk_indices": prepare_chunk_indices,
        },
        "fla.ops.utils.constant": {"RCP_LN2": RCP_LN2},
        "fla.ops.kda.chunk_bwd": {"chunk_kda_bwd": chunk_kda_bwd},
        "fla.ops.kda.gate": {"kda_gate_chunk_cumsum": kda_gate_chunk_cumsum},
        "fla.ops.common": {},
        "fla.ops.common.chunk_delta_h": {
            "chunk_gated_delta_rule_fwd_h": chunk_gated_delta_rule_fwd_h
        },
        "fla.ops.common.gate": {
            "fused_beta_sigmoid_fwd": fused_beta_sigmoid_fwd,
            "fused_beta_sigmoid_bwd": fused_beta_sigmoid_bwd,
        },
        "fla.modules": {},
        "fla.modules.norm": {},
        "fla.modules.norm.l2norm": {"l2norm_fwd": l2norm_fwd, "l2norm_bwd": l2norm_bwd},
    }
    put_modules(monkeypatch, modules)
    monkeypatch.setattr(fla, "importable", lambda package: True)
    monkeypatch.setattr(fla, "_version", lambda: (0, 6))
    monkeypatch.setattr(fla, "_triton", lambda: (3, 7, 1))
    monkeypatch.setattr(_discovery, "FIRST_PARTY", ())
    monkeypatch.setattr(_registry, "_arch_of", lambda device: "sm90")
    _registry.refresh()
    SEEN.clear()
    yield
    _registry.refresh()


def inputs(batch: int = 1, tokens: int = T) -> dict[str, Tensor]:
    """bfloat16, which is what FLA takes."""
    x = {
        "q": torch.randn(batch, tokens, H, K),
        "k": torch.nn.functional.normalize(torch.randn(batch, tokens, H, K), dim=-1),
        "v": torch.randn(batch, tokens, HV, V),
        "g": -torch.rand(batch, tokens, HV, K),
        "beta": torch.rand(batch, tokens, HV),
    }
    return {name: value.bfloat16() for name, value in x.items()}
