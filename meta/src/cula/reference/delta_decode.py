"""Decode of the gated delta rule and KDA under the public signatures; the mathematics is in `cula_core.reference`."""

from __future__ import annotations

from torch import Tensor

from cula_core.reference import delta_decode as oracle
from cula_core.reference.decode_fused import GatedNorm, ShortConvolution, fused_decode
from cula_core.reference.delta_decode import Replay


def delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    *,
    state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    scale: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    state_v_first: bool = True,
    commit: bool = True,
    replay: Replay | None = None,
    num_accepted: Tensor | None = None,
    token_states: Tensor | None = None,
    token_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_tokens: int | None = None,
    null_slot: int | None = None,
    convolution: ShortConvolution | None = None,
    norm: GatedNorm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The gated delta rule, or KDA, for 1 to 8 tokens per row, one after another, on a pool of states.

    The arguments are those of `cula.delta.delta_rule_decode`.

    Example:
        >>> import torch
        >>> from cula.reference import delta_rule_decode
        >>> q, k, v = torch.randn(3, 2, 1, 4, 16)  # each [B, T, H, D]
        >>> pool = torch.zeros(2, 4, 16, 16)
        >>> delta_rule_decode(q, k, v, None, None, pool).shape, pool.any().item()
        (torch.Size([2, 1, 4, 16]), True)
    """
    return fused_decode(
        q,
        k,
        v,
        g,
        beta,
        state,
        commit=commit,
        state_indices=state_indices,
        output_state_indices=output_state_indices,
        scale=scale,
        A_log=A_log,
        dt_bias=dt_bias,
        **oracle.options(
            lower_bound,
            softplus_beta,
            softplus_threshold,
            use_gate_in_kernel,
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            use_qk_l2norm_in_kernel,
            state_v_first,
        ),
        replay=replay,
        num_accepted=num_accepted,
        token_states=token_states,
        token_state_indices=token_state_indices,
        cu_seqlens=cu_seqlens,
        max_tokens=max_tokens,
        null_slot=null_slot,
        convolution=convolution,
        norm=norm,
        out=out,
    )


def delta_rule_commit(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    num_accepted: Tensor,
    *,
    state_indices: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    state_v_first: bool = True,
    cu_seqlens: Tensor | None = None,
    max_tokens: int | None = None,
    null_slot: int | None = None,
) -> None:
    """Advances the state of row n by its first `num_accepted[n]` tokens, in place.

    The arguments are those of `cula.delta.delta_rule_commit`.

    Example:
        >>> import torch
        >>> from cula.reference import delta_rule_commit
        >>> k, v = torch.randn(2, 2, 3, 4, 16)  # two rows of three tokens
        >>> pool, accepted = torch.zeros(2, 4, 16, 16), torch.tensor([2, 0], dtype=torch.int32)
        >>> delta_rule_commit(k, v, None, None, pool, accepted)
        >>> pool[0].any().item(), pool[1].any().item()
        (True, False)
    """
    oracle.delta_rule_commit(
        k,
        v,
        g,
        beta,
        state,
        num_accepted,
        state_indices=state_indices,
        A_log=A_log,
        dt_bias=dt_bias,
        **oracle.options(
            lower_bound,
            softplus_beta,
            softplus_threshold,
            use_gate_in_kernel,
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            use_qk_l2norm_in_kernel,
            state_v_first,
        ),
        cu_seqlens=cu_seqlens,
        max_tokens=max_tokens,
        null_slot=null_slot,
    )


def delta_rule_flush(
    state: Tensor,
    replay: Replay,
    num_accepted: Tensor | None = None,
    *,
    state_indices: Tensor | None = None,
    state_v_first: bool = True,
    null_slot: int | None = None,
) -> None:
    """Applies the certain records of a replay to the states, in place, and forgets the others.

    The arguments are those of `cula.delta.delta_rule_flush`.

    Example:
        >>> import torch
        >>> from cula.delta import new_replay
        >>> from cula.reference import delta_rule_decode, delta_rule_flush
        >>> pool = torch.zeros(2, 4, 16, 16)
        >>> replay = new_replay(pool, 4, dtype=torch.float32)
        >>> q, k, v = torch.randn(3, 2, 1, 4, 16)
        >>> out = delta_rule_decode(q, k, v, None, None, pool, replay=replay)
        >>> delta_rule_flush(pool, replay)
        >>> pool.any().item()
        True
    """
    oracle.delta_rule_flush(
        state,
        replay,
        num_accepted,
        state_indices=state_indices,
        null_slot=null_slot,
        state_v_first=state_v_first,
    )
