"""The torch operator of KDA prefill and its public functions. Kernels are imported when a CUDA tensor comes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..arguments import requires_grad
from ..dtypes import dtype_name
from ..operators import register_fake
from ..reference import kda as reference
from ..shortcuts import shortcut
from ..tensors import (
    DENSE,
    aligned,
    as_stored,
    is_aligned,
    is_plain_cuda_call,
    move_states,
    new_states,
    put_back,
    stored_alike,
)
from .backward.ops import KEPT
from .before_chunks import chunk_rows
from .call import SCHEMA, Call, Slice
from .config import CHUNK, INTRACARD_CP, MAX_GRID_Z, chunk_slots, workspace_bytes
from .contract import SAFE_LOWER_BOUND, check_prefill, check_sizes, check_trained
from .target import Target

if TYPE_CHECKING:
    from .fold import Chain
    from .slices import Begun

Trained = Callable[[Callable[..., tuple], dict[str, Any]], tuple]
# Options of `chunk_kda` that say how its numbers are meant, as `rules` takes them.
RULES = (
    "scale", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval",
    "safe_gate", "lower_bound", "operand_dtype",
)  # fmt: skip
# Options of a call that is trained which are checked one by one, where others are flags. Its tensors are KEPT.
_CHECKED = (
    "scale", "lower_bound", "cp_context", "use_intracard_cp", "segment_tokens", "operand_dtype", "workspace",
)  # fmt: skip


class Prefill:
    """The operator `<package>::prefill` of a target, and the functions that its package shows."""

    def __init__(self, target: Target, trained: Trained | None = None) -> None:
        """trained: makes a call that autograd follows, of `chunk_kda` and its arguments by name; used where the target
        has a backward."""
        self._target = target
        self._trained = trained
        name = f"{target.package}::prefill"
        torch.library.define(name, SCHEMA)
        torch.library.impl(name, "CPU", lambda *values: _run_on_cpu(Call(*values)))
        torch.library.impl(name, "CUDA", lambda *values: self._run_on_gpu(Call(*values)))
        register_fake(name)
        self._operator = getattr(torch.ops, target.package).prefill.default

    @shortcut
    def chunk_kda(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        disable_recompute: bool = False,
        return_intermediate_states: bool = False,
        state_v_first: bool = False,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        cp_context: object | None = None,
        *,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        use_intracard_cp: bool | str = "auto",
        out: Tensor | None = None,
        segment_tokens: int | None = None,
        state_pool: Tensor | None = None,
        initial_state_indices: Tensor | None = None,
        output_state_indices: Tensor | None = None,
        update_state_pool: bool = True,
        null_slot: int | None = None,
        has_initial_state: Tensor | None = None,
        state_checkpoints: Tensor | None = None,
        checkpoint_every_n_tokens: int | None = None,
        checkpoint_rows: Tensor | None = None,
        checkpoint_offsets: Tensor | None = None,
        operand_dtype: torch.dtype | None = None,
        workspace: Tensor | None = None,
        return_intra: bool = False,
    ) -> tuple[Any, ...]:
        """Kimi Delta Attention (Kimi Linear, arXiv 2510.26692) over whole sequences.

        Per sequence and value head, with the state S `[K, V]`, the log decay d_t `[K]` and the write strength b_t:

            S'_t = diag(exp(d_t)) S_(t-1)
            S_t  = S'_t + b_t k_t (v_t - S'_t^T k_t)^T          o_t = scale * S_t^T q_t

        q, k, v are bfloat16 or float16, of one dtype, and K = V = 128; on the CPU any dimensions, and float32 and
        float64 too. HV is a multiple of H; value head h reads query and key head h // (HV // H). T, B and the lengths
        of packed sequences may be 0. Views are read without a copy if their last dimension is contiguous; on the GPU a
        q, k, v, g or out whose address or other strides are no multiples of 16 bytes goes through a copy.

        Args:
            q, k: `[B, T, H, K]`.
            v: `[B, T, HV, V]`.
            g: `[B, T, HV, K]` of any floating dtype: the natural-log decay, <= 0, which is checked on the CPU only;
                or the raw gate with `use_gate_in_kernel`. float64 is converted on the GPU.
            beta: `[B, T, HV]` of any floating dtype and strides: the write strength; or its logits with
                `use_beta_sigmoid_in_kernel`.
            scale: factor of the outputs; None: K ** -0.5.
            initial_state: `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`; float32, bfloat16 or float16
                (float64 is taken with float64 activations), which the final states have as well; dense matrices, whose
                address and other strides are multiples of 16 bytes on the GPU. A `[.., K, V]` view of `[.., V, K]`
                storage, or the other way round, is read without a copy. It is not changed. None: zero.
            output_final_state: whether to return the states after the last token of every sequence.
            use_qk_l2norm_in_kernel: q and k become x / sqrt(sum(x^2) + 1e-6), per token and head.
            use_gate_in_kernel: the decay is -exp(A_log) * softplus(g + dt_bias) without `lower_bound`, and
                lower_bound * sigmoid(exp(A_log) * (g + dt_bias)) with it.
            use_beta_sigmoid_in_kernel: the strength is sigmoid(beta).
            allow_neg_eigval: the strength is 2 * sigmoid(beta); needs `use_beta_sigmoid_in_kernel`.
            safe_gate: promises log decays in [-5, 0) per token. A faster kernel serves then, and where the gate is
                computed inside with a lower_bound of at least -5; any other decay is served right, but slower. A gate
                computed inside needs `lower_bound` beside this.
            lower_bound: bound of the gate, below 0, and at least -5 with `safe_gate`.
            disable_recompute: with `return_intra`, keep more for another backward pass. Where gradients are wanted on a
                GPU, keep the blocks of all chunks for that of the package (60,928 bytes per chunk of 64 tokens and
                value head), which then computes less again. Without it, only the inputs are kept.
            return_intermediate_states: also return the state before each chunk of 64 tokens. Not with a state_pool or
                state_checkpoints, which keep states in memory of the caller, and not with `return_intra` or
                `disable_recompute`.
            state_v_first: layout of all states.
            cu_seqlens: `[N + 1]` int32 or int64 on the device of q packs N sequences into B = 1: sequence n holds the
                tokens cu_seqlens[n] .. cu_seqlens[n + 1] - 1; from 0 to T, rising; empty sequences keep their state.
                Checked on the CPU only, a device is never read back. None: a dense batch, N = B.
            cu_seqlens_cpu: a copy of cu_seqlens on the CPU, which tells how long the longest sequence is. A captured
                CUDA graph keeps the plan that was made from it.
            cp_context: None.
            A_log: `[HV]` of any floating dtype, used in float32. May be None with `lower_bound`, the factor is then 1.
            dt_bias: `[HV * K]` or `[HV, K]` of any floating dtype, used in float32. None: 0.
            use_intracard_cp: whether long sequences are cut into segments that run side by side: "auto" decides from
                shapes and the GPU; True refuses what cannot be cut into two segments of 1024 tokens, or does not fit
                the workspace in one piece; False never cuts. No effect on the CPU.
            segment_tokens: cuts every sequence after each so many tokens, a multiple of 64 and at least 1024, whatever
                the batch and the GPU, so that a sequence has the same bits in every call. Needs a workspace for one
                piece. None: as use_intracard_cp says. No effect on the CPU.
            out: `[B, T, HV, V]` in the dtype of v, written and returned; shares no memory with q, k, g and beta, which
                are read meanwhile. None: allocated.
            state_pool: `[rows, HV, K, V]`, or V, K, in place of an initial_state and like it, updated in place.
            initial_state_indices: `[N]` int32, any stride, the row of state_pool of every sequence. Negative, or
                `null_slot`: padding, no row is read or written and the outputs are zero. No row of a pool that is
                updated may occur twice, which is checked on the CPU only. None: row n. Needs a state_pool.
            output_state_indices: `[N]` int32, any stride: the row for each final state; negative, or `null_slot`: it is
                not stored. No other sequence may begin there. None: where the sequence began.
            update_state_pool: False only reads the pool, and `output_final_state` decides what is returned.
            null_slot: a row of the pool that means padding, as negative ones do.
            has_initial_state: `[N]` bool: False: the sequence begins from zero, whatever its state holds.
            state_checkpoints: contiguous memory for states on the way, in the dtype and layout of the states; padding
                and rows that no state belongs to keep their contents. Where states are kept, one of:
            checkpoint_every_n_tokens: a multiple of 64, n: after every n tokens of each sequence, in
                `[B, T // n, HV, K, V]` (or V, K): dense sequences from row [b, 0] on, a packed one at tokens [a, b)
                from row a // n on. With checkpoint_rows in `[rows, HV, K, V]`, from row checkpoint_rows[n] on.
            checkpoint_offsets: `[N]` int32 or int64: once per sequence, after so many tokens; a multiple of 64, or
                none is kept. In `[rows, HV, K, V]`, which may be the state_pool, row n or checkpoint_rows[n].
            checkpoint_rows: `[N]` int32 or int64; negative: none of the sequence's states is kept.
            operand_dtype: of what the kernels hand to the tensor cores: torch.float16 is more precise, for values up to
                1e4 and queries and keys of norm about 1; torch.bfloat16 takes any. None: float16 with
                `use_qk_l2norm_in_kernel`, else bfloat16. No effect on the CPU.
            workspace: `[bytes]` uint8 on the device of q, contiguous, at an address that is a multiple of 128: memory
                between the kernels, with nothing of worth before and after. `kda_workspace_bytes` says how much a call
                in one piece needs; with less, but at least a chunk of 64 tokens of every value head (59,904 HV
                bytes), it is made in pieces. None: allocated.
            return_intra: also return what a backward pass reads of the chunks of 64 tokens: Aqk and (I + Akk)^-1, both
                `[B, T, HV, 64]`, and with `disable_recompute` w, u, qg, kg `[B, T, HV, 128]`, all in the dtype of q, as
                `cula_core.reference.kda.Intermediates` defines them.

        Returns:
            `(o, final_state)`: o `[B, T, HV, V]` in the dtype of v; the final states `[N, HV, ..]` (zero for padding),
            or None. With a state_pool that is updated `(o, state_pool)`. With `return_intra` two or six more. With
            `return_intermediate_states` one more, `[B, NT, HV, K, V]` (or V, K) in the dtype of the states; NT is the
            number of chunks of all sequences if `cu_seqlens_cpu` tells it, else T // 64 + N for packed sequences, with
            zero behind the last chunk.

        Raises:
            TypeError, ValueError: an argument does not fit, or requires a gradient that the package has not; nothing
                was changed.
            NotImplementedError: `cp_context` is given.
            RuntimeError: the GPU is not one that this package has kernels for.

        Example:
            With `chunk_kda` of a package, such as `from cula_cp_sm90 import chunk_kda`:

            >>> import torch
            >>> q = k = torch.eye(128)[[3, 7, 3]].view(1, 3, 1, 128)  # [B, T, H, K]: first and last key are the same
            >>> v = torch.tensor([1.0, 2.0, 5.0]).view(1, 3, 1, 1).repeat(1, 1, 1, 128)  # [B, T, HV, V]
            >>> g, beta = torch.zeros(1, 3, 1, 128), torch.ones(1, 3, 1)  # nothing decays, and writes replace
            >>> o, state = chunk_kda(q, k, v, g, beta, scale=1.0, output_final_state=True)
            >>> o.shape, state.shape
            (torch.Size([1, 3, 1, 128]), torch.Size([1, 1, 128, 128]))
            >>> o[0, :, 0, 0].tolist(), state[0, 0, [3, 7], 0].tolist()  # the last value is in the place of the first
            ([1.0, 2.0, 5.0], [5.0, 2.0])
        """
        if self._target.backward and self._trained is not None and requires_grad(
            q, k, v, g, beta, A_log, dt_bias, initial_state, state_pool, out, state_checkpoints
        ):  # fmt: skip
            check_trained(
                beta, use_beta_sigmoid_in_kernel, out=out, state_pool=state_pool,
                initial_state_indices=initial_state_indices, output_state_indices=output_state_indices,
                null_slot=null_slot, has_initial_state=has_initial_state, state_checkpoints=state_checkpoints,
                checkpoint_every_n_tokens=checkpoint_every_n_tokens, checkpoint_rows=checkpoint_rows,
                checkpoint_offsets=checkpoint_offsets, return_intra=return_intra,
                return_intermediate_states=return_intermediate_states,
            )  # fmt: skip
            return self._trained(
                self._keeping if disable_recompute and is_plain_cuda_call(q) else self.chunk_kda,
                {
                    "q": q, "k": k, "v": v, "g": g, "beta": beta, "scale": scale, "initial_state": initial_state,
                    "output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
                    "use_gate_in_kernel": use_gate_in_kernel, "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
                    "allow_neg_eigval": allow_neg_eigval, "safe_gate": safe_gate, "lower_bound": lower_bound,
                    "disable_recompute": disable_recompute, "state_v_first": state_v_first, "cu_seqlens": cu_seqlens,
                    "cu_seqlens_cpu": cu_seqlens_cpu, "cp_context": cp_context, "A_log": A_log, "dt_bias": dt_bias,
                    "use_intracard_cp": use_intracard_cp, "segment_tokens": segment_tokens,
                    "update_state_pool": update_state_pool, "operand_dtype": operand_dtype, "workspace": workspace,
                },
            )  # fmt: skip
        plain = is_plain_cuda_call(q)
        if plain:
            self._require_target(q.device)
        check_prefill(
            q, k, v, g, beta, scale=scale, initial_state=initial_state, state_pool=state_pool,
            indices=initial_state_indices, lower_bound=lower_bound, cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu, cp_context=cp_context, A_log=A_log, dt_bias=dt_bias,
            use_intracard_cp=use_intracard_cp, segment_tokens=segment_tokens, out=out,
            operand_dtype=operand_dtype, workspace=workspace,
            output_indices=output_state_indices, null_slot=null_slot, has_initial_state=has_initial_state,
            checkpoints=state_checkpoints, checkpoint_every=checkpoint_every_n_tokens, checkpoint_rows=checkpoint_rows,
            checkpoint_offsets=checkpoint_offsets,
            flags={
                "output_final_state": output_final_state,
                "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
                "use_gate_in_kernel": use_gate_in_kernel,
                "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
                "allow_neg_eigval": allow_neg_eigval,
                "safe_gate": safe_gate,
                "disable_recompute": disable_recompute,
                "return_intermediate_states": return_intermediate_states,
                "state_v_first": state_v_first,
                "update_state_pool": update_state_pool,
                "return_intra": return_intra,
            },
        )  # fmt: skip
        initial, turned = as_stored(initial_state if state_pool is None else state_pool)
        v_first = state_v_first != turned
        pool: Tensor | None = None
        final: Tensor | None = None
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if state_pool is not None and initial_state_indices is None:
            if null_slot is not None or output_state_indices is not None:
                initial_state_indices = torch.arange(sequences, dtype=torch.int32, device=q.device)
        if state_checkpoints is state_pool:
            state_checkpoints = None
        # All states of a call lie alike. A copy starts from the caller's, because not every row is written.
        saved = stored_alike(state_checkpoints, turned)
        before = None
        if return_intermediate_states:
            before = chunk_rows(q, cu_seqlens, cu_seqlens_cpu)
            saved = new_states(before.total + 1, q, v, v_first, initial)
            checkpoint_rows, checkpoint_every_n_tokens = before.behind, CHUNK
        if state_pool is not None and update_state_pool:
            pool, initial = initial, None
        elif output_final_state:
            final = new_states(sequences, q, v, v_first, initial)
        if out is None:
            out = torch.empty_like(v, memory_format=DENSE)
        Aqk, Akk, w, u, qg, kg = _new_intra(q, v, return_intra, disable_recompute)
        call = Call(
            q, k, v, g, beta, A_log, dt_bias, initial, pool, initial_state_indices, final, cu_seqlens, cu_seqlens_cpu,
            out, workspace, Aqk, Akk, w, u, qg, kg,
            **rules(
                q, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                safe_gate, lower_bound, operand_dtype,
            ),
            state_v_first=v_first,
            intracard_cp=INTRACARD_CP[use_intracard_cp],
            output_state_indices=output_state_indices,
            has_initial_state=has_initial_state,
            null_slot=null_slot,
            checkpoints=saved,
            checkpoint_rows=checkpoint_rows,
            checkpoint_offsets=checkpoint_offsets,
            checkpoint_every=checkpoint_every_n_tokens or 0,
            segment_tokens=segment_tokens or 0,
        )  # fmt: skip
        if plain:
            self._run_on_gpu(call)
        else:
            self._operator(*call)
        states = final.transpose(2, 3) if turned and final is not None else final
        if before is not None:
            assert saved is not None
            before.begin(saved, initial, has_initial_state)
            each = before.total // max(1, q.shape[0])
            begun = saved[: before.total].unflatten(0, (q.shape[0], each))
            return out, states, begun.transpose(3, 4) if turned else begun
        put_back(saved, state_checkpoints, turned)
        return out, states if pool is None else state_pool, *call.intra

    def _keeping(self, **options: Any) -> tuple[Any, ...]:
        """Calls `chunk_kda` on a GPU with arguments that are fit for training, and returns besides what a backward pass
        would compute again: blocks of chunks, and factors of tokens. Of a call without a token, or with more chunks
        than one launch takes, it returns nothing more."""
        given = {name: options.pop(name) for name in KEPT}
        q, v, cu_seqlens = given["q"], given["v"], given["cu_seqlens"]
        self._require_target(q.device)
        check_prefill(
            **given, **{name: options[name] for name in _CHECKED}, state_pool=None, indices=None, out=None,
            output_indices=None, null_slot=None, has_initial_state=None, checkpoints=None, checkpoint_every=None,
            checkpoint_rows=None, checkpoint_offsets=None,
            flags={name: x for name, x in options.items() if name not in _CHECKED}
            | {"return_intermediate_states": False, "return_intra": False},
        )  # fmt: skip
        packed = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
        slots = chunk_slots(v.shape[0], v.shape[1], packed)
        if slots > MAX_GRID_Z or v.numel() == 0:
            return self.chunk_kda(**given, **options)
        initial, turned = as_stored(given["initial_state"])
        v_first, final = options["state_v_first"] != turned, None
        if options["output_final_state"]:
            final = new_states(q.shape[0] if packed is None else packed, q, v, v_first, initial)
        call = Call(
            **given | {"initial_state": initial},
            final_state=final,
            out=torch.empty_like(v, memory_format=DENSE),
            state_pool=None, state_indices=None, workspace=None, Aqk=None, Akk=None, w=None, u=None, qg=None, kg=None,
            **rules(q, *(options[name] for name in RULES)),
            state_v_first=v_first,
            intracard_cp=INTRACARD_CP[options["use_intracard_cp"]],
            segment_tokens=options["segment_tokens"] or 0,
        )  # fmt: skip
        from .launch import run

        factors = v.new_empty((slots, v.shape[2], 4, CHUNK), dtype=torch.float32)
        blocks = run(self._target, prepared(call), factors=factors)
        states = final.transpose(2, 3) if turned and final is not None else final
        return call.out, states, blocks, factors

    def begin_chunk_kda(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        slices: Sequence[Slice],
        cu_seqlens: Tensor,
        initial_state: Tensor,
        *,
        scale: float | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        use_intracard_cp: bool | str = "auto",
        segment_tokens: int | None = None,
        operand_dtype: torch.dtype | None = None,
    ) -> Begun:
        """Begins a call of `chunk_kda` over packed slices of sequences, before the states in front of them are known.

        It is for a dispatcher that spreads sequences over several GPUs and has checked the arguments as `chunk_kda`
        does, beside which:

        Args:
            slices: at least one, the packed sequences, of at least one token together.
            cu_seqlens: where they begin and end, as in `chunk_kda`.
            initial_state: float32 `[N, HV, K, V]`; not read for slices that continue a sequence.

        Returns:
            a `Begun`, whose `maps` say what slices do to a state, and whose `finish` takes all states in front.

        Raises:
            ValueError: more tokens than one launch takes.
            RuntimeError: the GPU is not one that this package has kernels for.
        """
        self._require_target(q.device)
        call = Call(
            q, k, v, g, beta, A_log, dt_bias, initial_state, None, None, None, cu_seqlens, None,
            torch.empty_like(v, memory_format=DENSE), None, None, None, None, None, None, None,
            **rules(
                q, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                safe_gate, lower_bound, operand_dtype,
            ),
            state_v_first=False,
            intracard_cp=INTRACARD_CP[use_intracard_cp],
            segment_tokens=segment_tokens or 0,
        )  # fmt: skip
        from .slices import begin

        return begin(self._target, prepared(call), slices)

    def fold_slices(
        self, added: Tensor, maps: Tensor, chains: Sequence[Chain], back: bool
    ) -> list[Tensor]:
        """What `cula_core.delta_rule.fold.fold` returns, by a kernel for the GPU of these tensors."""
        from .fold import fold
        from .launch import kernels_of

        return fold(kernels_of(self._target, added.device), added, maps, chains, back)

    def kda_workspace_bytes(
        self, batch: int, tokens: int, value_heads: int, sequences: int | None = None
    ) -> int:
        """Returns the bytes of a workspace that lets `chunk_kda` go in one piece.

        sequences: of packed input, where batch is 1; None for a dense batch.

        Example:
            With `kda_workspace_bytes` of a package, such as `from cula_cp_sm90 import kda_workspace_bytes`:

            >>> chunk = kda_workspace_bytes(batch=1, tokens=64, value_heads=1)  # of one head
            >>> chunk
            59904
            >>> kda_workspace_bytes(batch=2, tokens=4096, value_heads=32) == 2 * 64 * 32 * chunk
            True
            >>> packed = kda_workspace_bytes(batch=1, tokens=8192, value_heads=32, sequences=16)
            >>> packed == (128 + 16) * 32 * chunk  # every sequence may end in a partial chunk
            True
        """
        check_sizes(batch, tokens, value_heads, sequences)
        # No workspace is smaller than a chunk.
        needed = workspace_bytes(batch, tokens, value_heads, sequences)
        return max(needed, workspace_bytes(1, 1, value_heads))

    def _run_on_gpu(self, call: Call) -> None:
        self._require_target(call.q.device)
        if call.out.numel() == 0 or (call.initial is not None and call.initial.shape[0] == 0):
            # No token at all, or nothing but padding.
            for written in (call.out, *call.intra):
                written.zero_()
            move_states(
                call.initial, call.state_pool, call.final_state, call.state_indices, call.output_state_indices,
                call.null_slot, call.has_initial_state, call.sequences,
            )  # fmt: skip
            return
        self._launch(prepared(call))

    def _require_target(self, device: torch.device) -> None:
        found = _capability(device)
        if found not in self._target.compiles_for:
            known = " or ".join(f"{major}.{minor}" for major, minor in self._target.compiles_for)
            name = self._target.distribution
            raise RuntimeError(
                f"{name} needs compute capability {known}, {device} has {found[0]}.{found[1]}"
            )

    def _launch(self, call: Call) -> None:
        from .launch import run

        target = call.out
        if not is_aligned(target):
            call = call._replace(out=torch.empty_like(target, memory_format=DENSE))
        run(self._target, call)
        if target is not call.out:
            target.copy_(call.out)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _run_on_cpu(call: Call) -> None:
    reference.prefill(
        call.q, call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias, call.initial, call.state_indices,
        call.final, call.cu_seqlens, call.out, output_state_indices=call.output_state_indices,
        has_initial_state=call.has_initial_state, null_slot=call.null_slot, checkpoints=call.kept_in,
        checkpoint_rows=call.checkpoint_rows, checkpoint_offsets=call.checkpoint_offsets,
        checkpoint_every=call.checkpoint_every, scale=call.scale, gate=call.gate, lower_bound=call.lower_bound,
        l2norm=call.l2norm, beta_sigmoid=call.beta_sigmoid, neg_eigval=call.neg_eigval,
        state_v_first=call.state_v_first, intra=call.intra or None,
    )  # fmt: skip


def rules(
    q: Tensor,
    scale: float | None,
    l2norm: bool,
    use_gate: bool,
    beta_sigmoid: bool,
    neg_eigval: bool,
    safe_gate: bool,
    lower_bound: float | None,
    operand_dtype: torch.dtype | None,
) -> dict[str, Any]:
    """Returns fields of a call: how its numbers are meant."""
    gate = "log" if not use_gate else "softplus" if lower_bound is None else "safe"
    bound = float(lower_bound) if gate == "safe" and lower_bound is not None else 0.0
    if operand_dtype is None:
        operand_dtype = torch.float16 if l2norm else torch.bfloat16
    return {
        "scale": float(q.shape[3] ** -0.5 if scale is None else scale),
        "gate": gate,
        "lower_bound": bound,
        "bounded": safe_gate or (gate == "safe" and bound >= SAFE_LOWER_BOUND),
        "l2norm": l2norm,
        "beta_sigmoid": beta_sigmoid,
        "neg_eigval": neg_eigval,
        "operand": dtype_name(operand_dtype),
    }


def _new_intra(
    q: Tensor, v: Tensor, return_intra: bool, disable_recompute: bool
) -> list[Tensor | None]:
    """Returns memory for Aqk, Akk and, with `disable_recompute`, w, u, qg, kg; None for those that are not returned."""
    intra: list[Tensor | None] = [None] * 6
    if return_intra:
        widths = [CHUNK, CHUNK]
        if disable_recompute:
            widths += [q.shape[3], v.shape[3], q.shape[3], q.shape[3]]
        intra[: len(widths)] = (q.new_empty(*v.shape[:3], width) for width in widths)
    return intra


def as_kernels_read(
    g: Tensor, beta: Tensor, rate: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns g, beta, A_log and dt_bias in dtypes and at addresses that the kernels read, dt_bias as a vector."""
    g, beta = (x.float() if x.dtype == torch.float64 else x for x in (g, beta))
    if bias is not None:
        bias = aligned(bias.float().contiguous())
        bias = bias if bias.dim() == 1 else bias.view(-1)
    return aligned(g), beta, None if rate is None else rate.float(), bias


def prepared(call: Call) -> Call:
    """Returns the call with tensors as the kernels read them."""
    g, beta, rate, bias = as_kernels_read(call.g, call.beta, call.A_log, call.dt_bias)
    indices: dict[str, Any] = {
        name: None if x is None else x.to(torch.int32)
        for name in (
            "state_indices",
            "output_state_indices",
            "checkpoint_rows",
            "checkpoint_offsets",
        )
        for x in (getattr(call, name),)
    }
    saved = call.kept_in
    if saved is not None and saved.dim() == 5:
        saved = saved.flatten(0, 1)
    if saved is not None and saved.shape[0] == 0:
        saved = None
    return call._replace(
        q=aligned(call.q),
        k=aligned(call.k),
        v=aligned(call.v),
        g=g,
        beta=beta,
        A_log=rate,
        dt_bias=bias,
        checkpoints=saved,
        **indices,
    )
