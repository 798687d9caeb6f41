"""The argument contract of KDA: TypeError or ValueError that names the argument, what was expected and what came."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import arguments
from ..delta_decode import slots
from ..delta_decode.slots import Sizes, check_dtype, check_slot_values
from ..dtypes import dtype_name
from ..tensors import longest_sequence
from .config import (
    BLOCK_BYTES,
    CHUNK,
    HEAD_DIM,
    MAX_GRID_Z,
    MIN_SEGMENT_CHUNKS,
    OPERAND_DTYPES,
    chunk_slots,
    workspace_bytes,
)

# A gate computed with a lower bound from here on, or a promise of `safe_gate`, bounds log decays.
SAFE_LOWER_BOUND = -5.0

_WORKSPACE_ALIGNMENT = 128
_NO_BACKWARD = "no backward; cula.kda.chunk_kda has one with flash-linear-attention"


def check_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    state_pool: Tensor | None,
    indices: Tensor | None,
    lower_bound: float | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    cp_context: object,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    use_intracard_cp: bool | str,
    segment_tokens: int | None,
    out: Tensor | None,
    operand_dtype: torch.dtype | None,
    workspace: Tensor | None,
    output_indices: Tensor | None,
    null_slot: int | None,
    has_initial_state: Tensor | None,
    checkpoints: Tensor | None,
    checkpoint_every: int | None,
    checkpoint_rows: Tensor | None,
    checkpoint_offsets: Tensor | None,
    flags: dict[str, bool],
) -> None:
    """Raises unless the arguments of a prefill fit together. flags: the booleans by name."""
    arguments.attention(q, k, v, out, (HEAD_DIM,))
    batch, tokens, _, dim_k = q.shape
    heads_v = v.shape[2]
    sequences = None
    if cu_seqlens is not None:
        sequences = arguments.offsets("cu_seqlens", cu_seqlens, q)
    if cu_seqlens_cpu is not None:
        arguments.offsets_copy(cu_seqlens, cu_seqlens_cpu, tokens)
    for name, tensor, shape, letters in (
        ("g", g, (*v.shape[:3], dim_k), "[B, T, HV, K]"),
        ("beta", beta, tuple(v.shape[:3]), "[B, T, HV]"),
    ):
        arguments.floating(name, tensor)
        if tensor.shape != shape:
            arguments.value_error(name, f"{letters} = {list(shape)}", list(tensor.shape))
        arguments.device(name, tensor, q)
    arguments.last_dim("g", g)
    arguments.number("scale", scale)

    arguments.booleans(**flags)
    if flags["allow_neg_eigval"] and not flags["use_beta_sigmoid_in_kernel"]:
        other = "use_beta_sigmoid_in_kernel"
        arguments.value_error("allow_neg_eigval", f"{other}=True with it", f"{other}=False")
    _check_gate(q, g, heads_v, lower_bound, A_log, dt_bias, flags)
    if flags["return_intermediate_states"]:
        others = {"state_pool": state_pool, "state_checkpoints": checkpoints}
        given = [name for name, x in others.items() if x is not None]
        given += [name for name in ("return_intra", "disable_recompute") if flags[name]]
        if given:
            arguments.value_error("return_intermediate_states", f"False with {given[0]}", True)
    check_cp_context(cp_context)
    v_first, updated = flags["state_v_first"], flags["update_state_pool"]
    count = batch if sequences is None else sequences
    check_null_slot(null_slot, state_pool)
    arguments.state_or_pool(
        initial_state, state_pool, indices, q, v, count, v_first, updated and output_indices is None,
        null_slot=null_slot,
    )  # fmt: skip
    check_targets(state_pool, indices, output_indices, null_slot, updated, q, v, count)
    states = initial_state if state_pool is None else state_pool
    if has_initial_state is not None:
        check_has_initial_state(has_initial_state, states, count, q)
    check_checkpoints(
        checkpoints, checkpoint_every, checkpoint_rows, checkpoint_offsets, q, v, count, v_first, states,
        state_pool if updated else None, cu_seqlens,
    )  # fmt: skip
    check_operand_dtype(operand_dtype)
    check_segments(use_intracard_cp, segment_tokens, tokens, cu_seqlens, cu_seqlens_cpu)
    chunks = chunk_slots(batch, tokens, sequences)
    if segment_tokens is not None and chunks > MAX_GRID_Z:
        what = f"None for a call of more than {MAX_GRID_Z} chunks of {CHUNK} tokens, which is made in pieces"
        arguments.value_error("segment_tokens", what, f"{segment_tokens} with {chunks}")
    if workspace is not None:
        whole = workspace_bytes(batch, tokens, heads_v, sequences)
        why = None
        if segment_tokens is not None:
            why = "segment_tokens"
        elif use_intracard_cp is True:
            why = "use_intracard_cp=True"
        _check_workspace(workspace, heads_v, whole, why, q)
    arguments.no_gradients(
        _NO_BACKWARD,
        **{"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias},
        **{"initial_state": initial_state, "state_pool": state_pool, "out": out},
        state_checkpoints=checkpoints,
    )


def check_trained(beta: Tensor | None, logits: bool, **inference: object) -> None:
    """Refuses what has no backward. inference: arguments that inference alone has, None or False where it is not used.

    logits: whether the strength is computed inside. One that is given must not be negative, checked on the CPU only.
    """
    for name, x in inference.items():
        if x is not None and x is not False:
            unused = False if x is True else None
            got = "a tensor" if isinstance(x, Tensor) else x
            arguments.value_error(name, f"{unused} when gradients are required", got)
    if isinstance(beta, Tensor) and not logits:
        arguments.sign("beta", beta, 1)


def check_null_slot(null_slot: int | None, pool: Tensor | None) -> None:
    """Refuses a row that means padding where it is no 32-bit integer, or there is no pool."""
    slots.check_null_slot(null_slot)
    if null_slot is not None and pool is None:
        arguments.value_error("null_slot", "None without a state_pool", type(null_slot).__name__)


def check_has_initial_state(
    x: Tensor, states: Tensor | None, sequences: int, lead: Tensor, lead_name: str = "q"
) -> None:
    """Checks has_initial_state, which says of every sequence whether it begins with a state of `states`."""
    name = "has_initial_state"
    arguments.tensor(name, x)
    if states is None:
        arguments.value_error(name, "None without an initial_state or a state_pool", "a tensor")
    check_dtype(name, x, (torch.bool,))
    if x.shape != (sequences,):
        arguments.value_error(name, f"[N] = [{sequences}]", list(x.shape))
    arguments.device(name, x, lead, lead_name)


def check_targets(
    pool: Tensor | None,
    indices: Tensor | None,
    targets: Tensor | None,
    null_slot: int | None,
    updated: bool,
    q: Tensor,
    v: Tensor,
    sequences: int,
) -> None:
    """Checks the rows of final states, of a pool whose states and rows of initial ones are known to be right."""
    name = "output_state_indices"
    if targets is not None and pool is None:
        arguments.value_error(name, "None without a state_pool", type(targets).__name__)
    if targets is None or pool is None:
        return
    arguments.int32_vector(name, targets, "N", sequences, q)
    if not updated:
        arguments.value_error(name, "None unless update_state_pool is True", "a tensor")
    heads, dim_k = q.shape[2:]
    sizes = Sizes(q.device.type, sequences, 0, heads, v.shape[2], dim_k, v.shape[3], None, q, "q")
    check_slot_values(
        pool, indices, targets, None, None, None, sizes, updated, null_slot, "state_pool"
    )


def check_checkpoints(
    buffer: Tensor | None,
    every: int | None,
    rows: Tensor | None,
    offsets: Tensor | None,
    q: Tensor,
    v: Tensor,
    sequences: int,
    v_first: bool,
    states: Tensor | None,
    pool: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    heads: tuple[str, int] | None = None,
    aligned: bool = True,
) -> None:
    """Checks where states on the way go, and when. pool: one that is updated. heads, aligned: see `states`."""
    dtype = arguments.exact_dtypes(q)[-1] if states is None else states.dtype
    heads = ("HV", v.shape[2]) if heads is None else heads
    if offsets is None and rows is None:
        arguments.checkpoints(
            buffer, every, q, v.shape[3], v_first, dtype, heads, aligned=aligned
        )  # fmt: skip
        return
    if offsets is None and every is None:
        other = "None without checkpoint_every_n_tokens or checkpoint_offsets"
        arguments.value_error("checkpoint_rows", other, type(rows).__name__)
    if offsets is not None and every is not None:
        other = "None beside checkpoint_every_n_tokens"
        arguments.value_error("checkpoint_offsets", other, type(offsets).__name__)
    for name, x in (("checkpoint_rows", rows), ("checkpoint_offsets", offsets)):
        if x is not None:
            arguments.tensor(name, x)
            check_dtype(name, x, arguments.OFFSETS)
            if x.shape != (sequences,):
                arguments.value_error(name, f"[N] = [{sequences}]", list(x.shape))
            arguments.device(name, x, q)
    if every is not None:
        arguments.checkpoint_interval(every)
    name = "state_checkpoints"
    if buffer is None:
        if rows is None or pool is None or every is not None:
            arguments.value_error(name, "a tensor, or an updated state_pool with rows", None)
        buffer = pool
    elif buffer is states and pool is None:
        arguments.value_error(name, "other memory than that of states that are only read", name)
    arguments.states(
        name, buffer, v, q.shape[3], v_first, dtypes=(dtype,), aligned=aligned, heads=heads
    )
    if rows is None:
        if buffer.shape[0] < sequences:
            expected = f"a row for each of {sequences} sequences without checkpoint_rows"
            arguments.value_error(name, expected, buffer.shape[0])
    elif arguments.is_readable(rows):
        _check_last_rows(rows, offsets, every, buffer.shape[0], q.shape[1], cu_seqlens)


def _check_last_rows(
    rows: Tensor,
    offsets: Tensor | None,
    every: int | None,
    count: int,
    tokens: int,
    cu_seqlens: Tensor | None,
) -> None:
    """Refuses rows of states on the way that are beyond the buffer, which has `count`."""
    last = rows.long()
    kept = last >= 0
    if every is not None:
        lengths = torch.full_like(last, tokens) if cu_seqlens is None else cu_seqlens.long().diff()
        last = last + lengths // every - 1
        kept = kept & (lengths >= every)
    elif offsets is not None:
        kept = kept & (offsets > 0)
    if kept.any() and last[kept].max() >= count:
        expected = f"rows of states below the {count} of state_checkpoints"
        arguments.value_error("checkpoint_rows", expected, last[kept].max().item())


def check_sizes(batch: int, tokens: int, value_heads: int, sequences: int | None) -> None:
    """Raises unless the arguments of `kda_workspace_bytes` fit together."""
    for name, size, least in (
        ("batch", batch, 0),
        ("tokens", tokens, 0),
        ("value_heads", value_heads, 1),
        ("sequences", sequences, 0),
    ):
        if size is None and name == "sequences":
            continue
        if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
            kind = "an int or None" if name == "sequences" else "an int"
            arguments.type_error(name, kind, type(size).__name__)
        if size < least:
            arguments.value_error(name, f"at least {least}", size)
    if sequences is not None and batch != 1:
        got = f"{sequences} with batch = {batch}"
        arguments.value_error("sequences", "None unless batch = 1", got)


def _check_gate(
    q: Tensor,
    g: Tensor,
    heads_v: int,
    lower_bound: float | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    flags: dict[str, bool],
) -> None:
    """Checks A_log [HV], dt_bias [HV * K] or [HV, K] and lower_bound, which belong to a gate that is computed here."""
    inside, safe = flags["use_gate_in_kernel"], flags["safe_gate"]
    arguments.number("lower_bound", lower_bound)
    if lower_bound is None:
        if inside and safe:
            what = "a float with use_gate_in_kernel and safe_gate"
            arguments.value_error("lower_bound", what, None)
    else:
        if not (inside or safe):
            what = "None unless use_gate_in_kernel or safe_gate is True"
            arguments.value_error("lower_bound", what, lower_bound)
        if not lower_bound < 0:
            arguments.value_error("lower_bound", "a number below 0", lower_bound)
        if safe and lower_bound < SAFE_LOWER_BOUND:
            what = f"a number in [{SAFE_LOWER_BOUND:g}, 0) with safe_gate"
            arguments.value_error("lower_bound", what, lower_bound)
    for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias)):
        if tensor is None:
            continue
        arguments.floating(name, tensor)
        if not inside:
            what = "None unless use_gate_in_kernel is True"
            arguments.value_error(name, what, type(tensor).__name__)
        arguments.device(name, tensor, q)
    if not inside:
        arguments.sign("g", g, -1)
    if A_log is not None:
        arguments.vector("A_log", A_log, "HV", heads_v)
    elif inside and lower_bound is None:
        what = "a tensor with use_gate_in_kernel and no lower_bound"
        arguments.value_error("A_log", what, None)
    if dt_bias is not None:
        dim_k = q.shape[3]
        if dt_bias.shape != (heads_v * dim_k,) and dt_bias.shape != (heads_v, dim_k):
            what = f"[HV * K] = [{heads_v * dim_k}] or [HV, K] = [{heads_v}, {dim_k}]"
            arguments.value_error("dt_bias", what, list(dt_bias.shape))
        arguments.last_dim("dt_bias", dt_bias)


def check_cp_context(cp_context: object) -> None:
    """Refuses context parallelism over several GPUs."""
    if cp_context is not None:
        raise NotImplementedError(
            f"cp_context: expected None, got {type(cp_context).__name__}; sequences are not split over several GPUs, "
            "only within one (use_intracard_cp)"
        )


def check_operand_dtype(operand_dtype: torch.dtype | None) -> None:
    """Refuses anything but the dtypes that kernels hand to the tensor cores, and None."""
    if operand_dtype not in (None, *(getattr(torch, name) for name in OPERAND_DTYPES)):
        names = ", ".join(f"torch.{name}" for name in OPERAND_DTYPES)
        arguments.type_error("operand_dtype", f"{names} or None", repr(operand_dtype))


def check_split_choice(choice: bool | str, segment_tokens: int | None) -> None:
    """Refuses any use_intracard_cp but "auto", True and False, and lengths of segments that no kernel has."""
    name = "use_intracard_cp"
    if not (isinstance(choice, bool) or (isinstance(choice, str) and choice == "auto")):
        arguments.value_error(name, "'auto', True or False", repr(choice))
    whole = "False" if choice is False else None
    arguments.segment_tokens(segment_tokens, not_beside=whole, of=name)


def check_segments(
    choice: bool | str,
    segment_tokens: int | None,
    tokens: int,
    cu_seqlens: Tensor | None,
    copy: Tensor | None,
) -> None:
    """Checks the choice of a kernel's segments: where they are asked for, a sequence is long enough for two."""
    name = "use_intracard_cp"
    check_split_choice(choice, segment_tokens)
    if segment_tokens is not None or choice is not True:
        return
    longest = tokens
    for offsets in (copy, cu_seqlens):
        if offsets is not None and arguments.is_readable(offsets):
            longest = longest_sequence(offsets)
            break
    least = 2 * MIN_SEGMENT_CHUNKS * CHUNK
    if longest < least:
        expected = f"'auto' or False unless a sequence has at least {least} tokens"
        arguments.value_error(name, expected, f"True with at most {longest}")


def _check_workspace(
    workspace: Tensor, heads_v: int, whole: int, why: str | None, q: Tensor
) -> None:
    """Checks a workspace. whole: the bytes that a call in one piece needs. why: it must not be made in pieces."""
    name = "workspace"
    arguments.tensor(name, workspace)
    if workspace.dtype != torch.uint8:
        arguments.type_error(name, "uint8", dtype_name(workspace.dtype))
    if workspace.dim() != 1:
        arguments.value_error(name, "1 dimension", list(workspace.shape))
    arguments.contiguous_elements(name, workspace)
    arguments.device(name, workspace, q)
    size, least = workspace.shape[0], heads_v * BLOCK_BYTES
    if size < least:
        what = f"at least {least} bytes, one chunk of {CHUNK} tokens of every value head"
        arguments.value_error(name, what, size)
    if why is not None and size < whole:
        arguments.value_error(name, f"at least {whole} bytes with {why}", size)
    # Memory of the CPU is not used, and torch does not align it so.
    if workspace.is_cuda and arguments.is_real(workspace):
        past = workspace.data_ptr() % _WORKSPACE_ALIGNMENT
        if past:
            expected = f"an address that is a multiple of {_WORKSPACE_ALIGNMENT} bytes"
            arguments.value_error(name, expected, f"one that is {past} bytes past it")
