"""What the tests on a GPU do with every problem: a call into memory full of NaN, held against the recurrence in fp64.

x = inputs(1, 300, 2, 4, "mixed", initial=True)          of .inputs, on the CPU or on the GPU
errors = check(chunk_kda, x, kind="mixed", state="pool", device="cuda")
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from cula_core.delta_rule.config import workspace_bytes
from cula_core.reference import kda as reference
from cula_emulator.memory import poisoned_memory

from ..comparing import assert_within, same
from ..tensors import int32, spaced
from .inputs import flags

MAX_ERROR = 3e-3
# Operands in bfloat16, whatever the keys; keys that never change.
MAX_BFLOAT16_ERROR, MAX_ONE_KEY_ERROR = 5e-3, 5e-3
CHUNK_BYTES = 59_904  # of a workspace, per value head
GUARD = 4096  # bytes behind a workspace

_OF_REFERENCE = {
    "scale": "scale",
    "use_qk_l2norm_in_kernel": "l2norm",
    "use_beta_sigmoid_in_kernel": "beta_sigmoid",
    "allow_neg_eigval": "neg_eigval",
}


def moved(x: dict, device: torch.device | str | None) -> dict:
    """x on a device; where it is without one."""
    return {name: t if t is None or device is None else t.to(device) for name, t in x.items()}


def fused(x: dict, offset: int, gap: int, far: int = 0) -> dict:
    """Returns x with q, k, v as slices of one projection full of NaN elsewhere, `offset` elements into each row, and g
    of another. far: elements from one sequence to the next, if more than needed."""
    views = dict(x)
    for names in (("q", "k", "v"), ("g",)):
        batch, tokens = x["v"].shape[:2]
        widths = [x[name][0, 0].numel() for name in names]
        pitch = offset + sum(widths) + gap
        stride = max(far, (tokens + 2) * pitch)
        size = (batch - 1) * stride + (tokens + 2) * pitch
        storage = x[names[0]].new_full((size,), math.nan)
        first = offset + pitch
        for name, width in zip(names, widths):
            view = storage.as_strided(x[name].shape, (stride, pitch, 128, 1), first)
            views[name] = view.copy_(x[name])
            first += width
    return views


def stored(states: Tensor, v_first: bool) -> Tensor:
    """[.., K, V] laid out as a call with this flag takes it; the same again turns it back."""
    return states.mT.contiguous() if v_first else states


def nan_workspace(x: dict, chunks: int | None = None) -> Tensor:
    """Room for some chunks of every value head, or for all; the bytes are those of NaN in any format."""
    batch, tokens, heads_v = x["v"].shape[:3]
    sequences = None if x["cu_seqlens"] is None else len(x["cu_seqlens"]) - 1
    size = max(workspace_bytes(batch, tokens, heads_v, sequences), heads_v * CHUNK_BYTES)
    if chunks is not None:
        size = min(size, chunks * heads_v * CHUNK_BYTES)
    return torch.full((size + GUARD,), 255, dtype=torch.uint8, device=x["v"].device)[:size]


def settings(gate: str, kind: str, options: dict) -> dict:
    """Options of a call: what it is told about g, and the norm of q and k unless told otherwise."""
    return {"use_qk_l2norm_in_kernel": True, **flags(gate, kind), **options}


def attend(
    chunk_kda: Callable[..., tuple],
    x: dict,
    gate: str = "safe",
    kind: str = "typical",
    *,
    state: str = "both",
    indices: Tensor | None = None,
    **options,
) -> tuple:
    """Calls the public function of a package, `chunk_kda`.

    state: "none", "initial" (taken only), "final" (returned only), "both"; "pool" (updated in place at indices) and
    "read" (a pool that is only read); x["initial_state"] as the call takes it.
    """
    given = dict(x)
    initial = given.pop("initial_state")
    if state in ("pool", "read"):
        given |= {"state_pool": initial, "initial_state_indices": indices}
        given["update_state_pool"] = state == "pool"
    elif state in ("initial", "both"):
        given["initial_state"] = initial
    given["output_final_state"] = state in ("final", "both", "read")
    return chunk_kda(**given, **settings(gate, kind, options))


def recurrence(
    x: dict, gate: str = "safe", kind: str = "typical", indices: Tensor | None = None, **options
) -> tuple[Tensor, Tensor]:
    """What `attend` should compute, in fp64, from states [.., K, V]; options it does not depend on are ignored."""
    known = _of_reference(gate, kind, options)
    return reference.recurrent_prefill(**x, state_indices=indices, dtype=torch.float64, **known)


def _of_reference(gate: str, kind: str, options: dict) -> dict:
    """Options of a call as the reference takes them."""
    options = settings(gate, kind, options)
    known = {name: options[n] for n, name in _OF_REFERENCE.items() if n in options}
    return known | {"gate": gate, "lower_bound": options.get("lower_bound") or 0.0}


def check_intermediates(
    x: dict, found: list[Tensor], gate: str, kind: str, bound: float, options: dict
) -> None:
    """Those of `return_intra` against their definitions in fp64."""
    given = {name: t for name, t in x.items() if name != "initial_state"}
    for name in ("q", "k", "v", "g", "beta"):
        given[name] = given[name].double()
    known = {"scale": x["q"].shape[3] ** -0.5, "l2norm": False, "beta_sigmoid": False}
    known |= {"neg_eigval": False} | _of_reference(gate, kind, options)
    expected = reference.intermediates(**given, **known)
    assert len(found) == (6 if options.get("disable_recompute") else 2)
    for name, actual, exact in zip(expected._fields, found, expected):
        assert actual.dtype == x["q"].dtype
        assert_within(actual.to(exact.device), exact, bound, name=name)


def check(
    chunk_kda: Callable[..., tuple],
    x: dict,
    gate: str = "safe",
    kind: str = "typical",
    *,
    state: str = "both",
    v_first: bool = False,
    chunks: int | None = None,
    gaps: bool = False,
    bound: float = MAX_ERROR,
    device: torch.device | str | None = None,
    ways: tuple[dict, ...] = ({},),
    **options,
) -> dict[str, float]:
    """Calls on `device` (where x is, unless given), held against the recurrence where x is: numbers, and what must not
    change bit for bit.

    chunks: how many the workspace holds. gaps: of 16 bytes or more, full of NaN, between the rows of q, k, v, g and the
    outputs. ways: options of a call each, which do not change what is expected. Returns relative errors, of the last.
    """
    initial, indices = x["initial_state"], None
    sequences = len(initial)
    slots = list(range(sequences))
    if state in ("pool", "read"):
        # Backwards, one slot in three is padding, and two rows belong to nobody.
        slots = [sequences + 1 - n if n % 3 != 1 else -1 - n for n in range(sequences)]
        initial = initial.new_full((sequences + 2, *initial.shape[1:]), math.nan)
        for n, slot in enumerate(slots):
            if slot >= 0:
                initial[slot] = x["initial_state"][n]
        indices = int32(*slots).to(initial.device)
    taken = initial if state not in ("none", "final") else None
    expected = recurrence(x | {"initial_state": taken}, gate, kind, indices, **options)
    live = [n for n, slot in enumerate(slots) if slot >= 0]

    errors: dict[str, float] = {}
    for way in ways:
        there = x | {"initial_state": stored(initial, v_first).clone(), "indices": indices}
        there = moved(there, device)
        rows = there.pop("indices")
        if gaps:
            there |= {name: spaced(there[name]) for name in ("q", "k", "v", "g")}
        before = there["initial_state"].clone()
        *outer, width = there["v"].shape
        wide = there["v"].new_full((*outer, width + (8 if gaps else 0)), math.nan)
        out, workspace = wide[..., :width], nan_workspace(there, chunks)
        with poisoned_memory():
            got, final, *intra = attend(
                chunk_kda, there, gate, kind, state=state, indices=rows, out=out, workspace=workspace,
                state_v_first=v_first, **options, **way,
            )  # fmt: skip
        assert got is out
        behind = workspace.as_strided((GUARD,), (1,), workspace.storage_offset() + len(workspace))
        assert (behind == 255).all(), "something was written behind the workspace"
        assert wide[..., width:].isnan().all(), "something was written beside the output"
        out = out.to(x["v"].device)
        errors = {"out": assert_within(out, expected[0], bound, name="output")}
        if options.get("return_intra"):
            check_intermediates(x, intra, gate, kind, bound, options)
        assert not out[(expected[0] == 0).all(-1)].any(), "a padding slot has an output"

        pool = there["initial_state"]
        if state == "pool":
            assert final is pool
            others = [row for row in range(len(pool)) if row not in slots]
            assert same(pool[others], before[others]), "a row of no sequence has changed"
            final = pool[[slots[n] for n in live]]
        else:
            assert same(pool, before), "the initial state has changed"
            if state == "read":
                padding = [n for n in range(sequences) if n not in live]
                assert not final[padding].any(), "a padding slot has a state"
                final = final[live]
        if state in ("none", "initial"):
            assert final is None
            continue
        final = stored(final, v_first).to(x["v"].device)
        errors["state"] = assert_within(final, expected[1][live], bound, name="state")
    return errors
