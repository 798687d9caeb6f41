"""Decode of the gated delta rule (Gated DeltaNet, arXiv 2412.06464) and KDA (Kimi Linear, arXiv 2510.26692).

For every row n, value head h and token t in turn, with S `[K, V]` the state of the row, one log decay d per head (gated
delta rule) or one per channel of K (KDA), and the write strength b:

    S' = diag(exp(d)) S        u = b (v - S'^T k)        S = S' + k u^T        out = scale * S^T q

The functions take gates as layers have them: q and k that are not normalised yet, a raw gate g with A_log and dt_bias,
and logits beta; a flag each says that they are final. All are for inference: an input that requires gradients is a
ValueError.

States are a pool `[pool, HV, V, K]`, or `[pool, HV, K, V]` with `state_v_first=False`, that is updated in place. A
slot whose state a call stores may be named once only, which is checked on the CPU and undefined elsewhere. A negative
slot, or `null_slot`, is padding: a row that begins there has output zero and changes nothing, and a state that goes
there is not stored.

`impl` is "auto" or the name of an implementation, which then serves or raises; see `cula.explain`. TypeError and
ValueError name the argument that does not fit and nothing was changed; RuntimeError says why the implementation asked
for cannot serve.
"""

from __future__ import annotations

from operator import index
from typing import Any

import torch
from torch import Tensor

from cula import _check
from cula._registry import resolve, to_be_checked
from cula_core import arguments
from cula_core.delta_decode import contract
from cula_core.delta_decode.rings import fill_convolution_ring, new_convolution_ring
from cula_core.reference.decode_fused import GatedNorm, ShortConvolution
from cula_core.reference.delta_decode import Replay, empty_replay

__all__ = [
    "GatedNorm",
    "ShortConvolution",
    "delta_rule_commit",
    "delta_rule_decode",
    "delta_rule_flush",
    "fill_convolution_ring",
    "new_convolution_ring",
    "new_replay",
]


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
    impl: str = "auto",
) -> Tensor:
    """The gated delta rule, or KDA, for 1 to 8 new tokens per row, on a pool of states that is updated in place.

    Args:
        q, k: `[B, T, H, K]`, T = 1..8; on a CUDA device bfloat16 or float16, elsewhere float32 and float64 too. Strides
            are free but for the last one, which is 1.
        v: `[B, T, HV, V]`; HV is a multiple of H, and value head h reads head `h // (HV // H)` of q and k.
        g: `[B, T, HV]` (gated delta rule), or `[B, T, HV, K]` or `[B, T, HV * K]` (KDA); float32, bfloat16 or float16
            (on the CPU also float64): the raw gate, or with `use_gate_in_kernel=False` the log decay itself (natural
            log, <= 0). None: no decay.
        beta: `[B, T, HV]`, the dtypes of g: logits of the write strength, or with
            `use_beta_sigmoid_in_kernel=False` the strength itself. None: 1.
        state: the pool; float32, bfloat16 or float16 (on the CPU also float64); arithmetic is fp32 or better.
        state_indices: `[B]` int32, any stride, the slot of every row; None: row n uses slot n. Or `[B, slots]` with
            `num_accepted`: a row begins at slot number `num_accepted[n] - 1` of its own.
        output_state_indices: `[B]` int32, any stride, where the states go, if not where they came from.
        scale: factor of the output, finite; None: `K ** -0.5`.
        A_log: `[HV]`, the logarithm of the gate's rate; None: 0.
        dt_bias: `[HV]`, or `[HV * K]` or `[HV, K]` for KDA; None: 0. Both may have more dimensions of size 1.
        lower_bound: None: the gate is `-exp(A_log) * softplus(g + dt_bias)`. Else, below 0:
            `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`.
        softplus_beta, softplus_threshold: as of `torch.nn.functional.softplus`.
        use_gate_in_kernel, use_beta_sigmoid_in_kernel: whether g and beta are raw, see there.
        allow_neg_eigval: twice the sigmoid of beta, with `use_beta_sigmoid_in_kernel`.
        use_qk_l2norm_in_kernel: q and k are divided by `sqrt(sum(x^2) + 1e-6)`.
        state_v_first: layout of the pool.
        commit: False stores no state at the end, for speculative verification; `delta_rule_commit` then advances every
            row by the tokens that were accepted.
        replay: what `new_replay` made. The call first applies those tokens of earlier calls that are certain by now,
            and records its own; a state is stored only when its ring is more than half full. Needs a slot per row, and
            stands beside no other way to store states.
        num_accepted: `[B]` int32, any stride: with `replay` how many tokens of the row's last call are certain (None:
            all), with `[B, slots]` state_indices which slot a row begins at.
        token_states: `[rows, HV, V, K]` in the dtype and layout of state, where the state after every token goes.
        token_state_indices: `[B, T]` int32, the slots there; without token_states, slots of state itself.
        cu_seqlens: `[N + 1]` int32: B is 1, and T holds N rows of 0 to 8 tokens; "B" of the vectors above is N then.
            Tokens of no row have output zero from the reference, and a kernel leaves them alone.
        max_tokens: with cu_seqlens, the most tokens of a row, 1..8; None: 8. A longer row is refused on
            the CPU and cut off elsewhere.
        null_slot: a slot that means padding, as negative ones do.
        convolution: q, k and v are the inputs of a short convolution, which is computed first, SiLU included; its
            result is rounded to the dtype of q. Its rings belong to the slots of state_indices, so it goes with
            `commit=True` and with `replay`, and not with states in other slots.
        norm: the output is divided by its root mean square over V, and multiplied by a weight and an activated gate,
            before it is rounded.
        out: `[B, T, HV, V]` in the dtype of v, written and returned.
        impl: "auto" or the name of an implementation.

    Returns:
        `[B, T, HV, V]` in the dtype of v: the output after each token, itself included.

    Raises:
        TypeError, ValueError, RuntimeError: see the module.

    Example:
        >>> import torch
        >>> from cula.delta import delta_rule_decode
        >>> q, k = torch.randn(2, 2, 1, 4, 16)  # each [B, T, H, K]
        >>> v, a, b = torch.randn(2, 1, 8, 16), torch.randn(2, 1, 8), torch.randn(2, 1, 8)
        >>> pool = torch.zeros(5, 8, 16, 16)  # [pool, HV, V, K]
        >>> slots = torch.tensor([3, -1], dtype=torch.int32)  # the second row is padding
        >>> out = delta_rule_decode(q, k, v, a, b, pool, state_indices=slots)
        >>> out.shape, out[1].any().item(), pool[3].any().item(), pool[0].any().item()
        (torch.Size([2, 1, 8, 16]), False, True, False)
    """
    if A_log is not None or dt_bias is not None:
        A_log, dt_bias = _check.without_ones(A_log), _check.without_ones(dt_bias)
    _check.decode_operands(k, v, state, q, matrix="V, K")
    run = resolve(
        "delta_rule_decode",
        impl,
        k.device,
        k.dtype,
        index(k.shape[3]),
        index(v.shape[3]),
        False,
        state.dtype,
        contract.row_tokens(k, cu_seqlens, max_tokens),
        cu_seqlens is not None,
        state_v_first,
        commit,
        replay is not None,
        convolution is not None,
        norm is not None,
    )
    # fmt: off
    options: dict[str, Any] = {
        "state_indices": state_indices, "output_state_indices": output_state_indices, "scale": scale, "A_log": A_log,
        "dt_bias": dt_bias, "lower_bound": lower_bound, "softplus_beta": softplus_beta,
        "softplus_threshold": softplus_threshold, "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel, "allow_neg_eigval": allow_neg_eigval,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "state_v_first": state_v_first, "commit": commit,
        "replay": replay, "num_accepted": num_accepted, "token_states": token_states,
        "token_state_indices": token_state_indices, "cu_seqlens": cu_seqlens, "max_tokens": max_tokens,
        "null_slot": null_slot, "convolution": convolution, "norm": norm, "out": out,
    }
    # fmt: on
    if to_be_checked(run):
        contract.check_decode(q, k, v, g, beta, state, **options)
    return run(q, k, v, g, beta, state, **options)


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
    impl: str = "auto",
) -> None:
    """Advances the state of row n by its first `num_accepted[n]` tokens, in place: the other half of `commit=False`.

    Args:
        k, v, g, beta, state: as in `delta_rule_decode`, and so are the other arguments.
        num_accepted: `[B]` int32, any stride; less than 0 counts as 0, more than T as T.
        state_indices: `[B]` int32, any stride, the slot of every row; None: row n uses slot n.
        A_log, dt_bias, lower_bound, softplus_beta, softplus_threshold: of the gate.
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, use_qk_l2norm_in_kernel: what is raw.
        state_v_first: layout of the pool.
        cu_seqlens, max_tokens: rows of different length in a batch of one.
        null_slot: a slot that means padding, as negative ones do.
        impl: "auto" or the name of an implementation.

    Raises:
        TypeError, ValueError, RuntimeError: see the module.

    Example:
        >>> import torch
        >>> from cula.delta import delta_rule_commit
        >>> k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 8, 16)  # two rows of three draft tokens
        >>> a, b = torch.randn(2, 2, 3, 8)
        >>> pool, accepted = torch.zeros(2, 8, 16, 16), torch.tensor([2, 0], dtype=torch.int32)
        >>> delta_rule_commit(k, v, a, b, pool, accepted)
        >>> pool[0].any().item(), pool[1].any().item()
        (True, False)
    """
    if A_log is not None or dt_bias is not None:
        A_log, dt_bias = _check.without_ones(A_log), _check.without_ones(dt_bias)
    _check.decode_operands(k, v, state, matrix="V, K")
    run = resolve(
        "delta_rule_commit",
        impl,
        k.device,
        k.dtype,
        index(k.shape[3]),
        index(v.shape[3]),
        False,
        state.dtype,
        contract.row_tokens(k, cu_seqlens, max_tokens),
        cu_seqlens is not None,
        state_v_first,
    )
    # fmt: off
    options: dict[str, Any] = {
        "state_indices": state_indices, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound,
        "softplus_beta": softplus_beta, "softplus_threshold": softplus_threshold,
        "use_gate_in_kernel": use_gate_in_kernel, "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "state_v_first": state_v_first, "cu_seqlens": cu_seqlens, "max_tokens": max_tokens, "null_slot": null_slot,
    }
    # fmt: on
    if to_be_checked(run):
        contract.check_commit(k, v, g, beta, state, num_accepted, **options)
    run(k, v, g, beta, state, num_accepted, **options)


def delta_rule_flush(
    state: Tensor,
    replay: Replay,
    num_accepted: Tensor | None = None,
    *,
    state_indices: Tensor | None = None,
    state_v_first: bool = True,
    null_slot: int | None = None,
    impl: str = "auto",
) -> None:
    """Applies the certain records of a replay to the states, in place, and forgets the others.

    Needed before somebody else reads the pool: a prefix cache, a prefill that continues, a call without `replay`.

    Args:
        state: the pool.
        replay: its records.
        num_accepted: `[B]` int32, any stride, how many tokens of the row's last call are certain; None: all.
        state_indices: `[B]` int32, any stride, the slots; None: the whole pool.
        state_v_first: layout of the pool.
        null_slot: a slot that means padding, as negative ones do.
        impl: "auto" or the name of an implementation.

    Raises:
        TypeError, ValueError, RuntimeError: see the module.

    Example:
        >>> import torch
        >>> from cula.delta import delta_rule_decode, delta_rule_flush, new_replay
        >>> pool = torch.zeros(2, 8, 16, 16)
        >>> replay = new_replay(pool, 4, dtype=torch.float32)
        >>> q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 4, 16), torch.randn(2, 1, 8, 16)
        >>> out = delta_rule_decode(q, k, v, None, None, pool, replay=replay)
        >>> before = pool.any().item()
        >>> delta_rule_flush(pool, replay)
        >>> before, pool.any().item()
        (False, True)
    """
    arguments.four_dims("state", state, "[pool, HV, V, K]")
    contract.check_rings(replay)
    run = resolve(
        "delta_rule_flush",
        impl,
        state.device,
        replay.k.dtype,
        index(replay.k.shape[3]),
        index(replay.u.shape[3]),
        False,
        state.dtype,
        state_v_first,
    )
    options: dict[str, Any] = {
        "state_indices": state_indices,
        "state_v_first": state_v_first,
        "null_slot": null_slot,
    }
    if to_be_checked(run):
        contract.check_flush(state, replay, num_accepted, **options)
    run(state, replay, num_accepted, **options)


def new_replay(
    state: Tensor,
    heads: int,
    *,
    max_tokens: int = 1,
    channels: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    records: int | None = None,
    state_v_first: bool = True,
) -> Replay:
    """Returns empty rings of records for a pool of states, for `delta_rule_decode(..., replay=)`.

    Args:
        state: the pool.
        heads: H, heads of q and k.
        max_tokens: the most tokens that a call will have, 1..8.
        channels: whether g has a gate per channel (KDA).
        dtype: that of q and k.
        records: how many a ring holds, a power of two from 2 * max_tokens to 64. None: the smallest. With
            more, states are stored less often.
        state_v_first: layout of the pool.

    Raises:
        TypeError, ValueError: see the module.

    Example:
        >>> import torch
        >>> from cula.delta import new_replay
        >>> replay = new_replay(torch.zeros(2, 8, 16, 16), 4, max_tokens=3)
        >>> replay.k.shape, replay.u.shape  # rings of 8 records for each of two slots
        (torch.Size([2, 8, 4, 16]), torch.Size([2, 8, 8, 16]))
    """
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "channels": channels,
        "dtype": dtype,
        "records": records,
    }
    contract.check_new_replay(state, heads, state_v_first=state_v_first, **options)
    return empty_replay(state, heads, state_v_first=state_v_first, **options)
