"""Good arguments of every public function, and the table of wrong ones that test_check.py goes through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cula import kda, lightning, lite

B, T, H, HV, K, V = 2, 3, 2, 4, 8, 6
MIDDLE = torch.tensor([1])
FUNCTIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        kda.chunk_kda,
        kda.fused_recurrent_kda,
        lightning.lightning_attn_fwd,
        lightning.lightning_attn_fwd_varlen,
        lightning.chunk_lightning_attn,
        lightning.chunk_simple_gla,
        lightning.chunk_gated_delta_rule,
        lightning.fused_recurrent_gated_delta_rule,
        lightning.linear_attention_decode,
        lightning.linear_attention_commit,
        lite.lite_attention,
    )
}


def good(function: str) -> dict[str, Any]:
    """Arguments that are accepted."""
    batch = 1 if function == "lightning_attn_fwd_varlen" else B
    q, k, v = torch.randn(batch, T, H, K), torch.randn(batch, T, H, K), torch.randn(batch, T, HV, V)
    decay = torch.rand(HV)
    gates = {"beta": torch.rand(batch, T, HV), "scale": 0.5}
    match function:
        case "chunk_kda" | "fused_recurrent_kda":
            return {"q": q, "k": k, "v": v, "g": -torch.rand(batch, T, HV, K), **gates}
        case "chunk_gated_delta_rule" | "fused_recurrent_gated_delta_rule":
            return {"q": q, "k": k, "v": v, "g": -torch.rand(batch, T, HV), **gates}
        case "lightning_attn_fwd":
            return {"q": q, "k": k, "v": v, "decay": decay}
        case "lightning_attn_fwd_varlen":
            return {
                "q": q, "k": k, "v": v, "decay": decay, "cu_seqlens": torch.tensor([0, 1, T]),
                "state_pool": torch.randn(5, HV, K, V),
                "initial_state_indices": torch.tensor([4, -1], dtype=torch.int32),
            }  # fmt: skip
        case "chunk_lightning_attn":
            return {"q": q, "k": k, "v": v, "layer_idx": 1, "num_layers": 4}
        case "chunk_simple_gla":
            return {"q": q, "k": k, "v": v, "g": -torch.rand(batch, T, HV)}
        case "linear_attention_decode" | "linear_attention_commit":
            found: dict[str, Any] = {
                "q": q, "k": k, "v": v, "state": torch.randn(5, HV, K, V), "decay": decay,
                "state_indices": torch.tensor([3, 0], dtype=torch.int32),
            }  # fmt: skip
            if function == "linear_attention_commit":
                del found["q"]
                found["num_accepted"] = torch.tensor([1, 2], dtype=torch.int32)
            return found
        case "lite_attention":
            return {
                "q": torch.randn(B, 9, 4, K),
                "k": torch.randn(B, 7, 2, K),
                "v": torch.randn(B, 7, 2, V),
                "block_m": 4,
                "block_n": 2,
            }
    raise AssertionError(function)


# A case: function, argument to blame, what to change (a value or a function of the good arguments), error, what the
# message says was expected. `q` and the like stand for the good tensors.
Case = tuple[str, str, dict[str, Any], type[Exception], str]
PREFILL = ("chunk_kda", "fused_recurrent_kda", "lightning_attn_fwd", "lightning_attn_fwd_varlen",
           "chunk_lightning_attn", "chunk_simple_gla", "chunk_gated_delta_rule",
           "fused_recurrent_gated_delta_rule")  # fmt: skip
PACKED = (
    "chunk_kda",
    "fused_recurrent_kda",
    "lightning_attn_fwd_varlen",
    "chunk_lightning_attn",
    "chunk_simple_gla",
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
)
DENSE = tuple(name for name in PREFILL if name != "lightning_attn_fwd_varlen")
KDA = ("chunk_kda", "fused_recurrent_kda")
CHUNKED = ("chunk_kda", "chunk_gated_delta_rule")
RECURRENT = ("fused_recurrent_kda", "fused_recurrent_gated_delta_rule")
DELTA = (*CHUNKED, *RECURRENT)
# Heads of q, k and v are grouped in any way, states have HS heads, and g and beta are optional.
GATED = "chunk_gated_delta_rule"
DECODE = ("linear_attention_decode", "linear_attention_commit")
META = torch.device("meta")
# The arguments that Lightning prefill functions alone have; test_check_prefill.py is about those.
OF_LIGHTNING_PREFILL = {
    "use_qk_l2norm_in_kernel", "exact_state", "state_checkpoints", "checkpoint_every_n_tokens", "num_splits",
    "update_state_pool", "segment_tokens", "checkpoint_rows", "checkpoint_offsets",
}  # fmt: skip
# Those of chunk_kda that say where states are; `cula_testing.kda.contract` is about them.
OF_KDA_STATES = {
    "state_pool", "initial_state_indices", "output_state_indices", "update_state_pool", "null_slot",
    "has_initial_state", "state_checkpoints", "checkpoint_every_n_tokens", "checkpoint_rows", "checkpoint_offsets",
}  # fmt: skip
# Those that chunk_gated_delta_rule alone has; `cula_testing.gated.contract` is about them.
OF_GATED = {
    "softplus_beta", "softplus_threshold", "state_pool", "state_indices", "output_state_indices", "update_state_pool",
    "null_slot", "has_initial_state", "state_checkpoints", "checkpoint_every_n_tokens", "checkpoint_rows",
    "checkpoint_offsets", "use_intracard_cp", "operand_dtype", "segment_tokens",
}  # fmt: skip


def change(name: str, f: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    return {name: lambda args: f(args[name])}


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values with a gap between the elements of the last dimension."""
    return torch.stack((x, x), -1)[..., 0]


def cases() -> list[Case]:
    found: list[Case] = []

    def add(
        functions: tuple[str, ...] | str,
        blamed: str,
        changes: dict[str, Any],
        error: type[Exception],
        expected: str,
    ) -> None:
        for function in (functions,) if isinstance(functions, str) else functions:
            found.append((function, blamed, changes, error, expected))

    def tensor(
        functions: tuple[str, ...] | str,
        name: str,
        like: Callable[..., Any] | None = None,
        **more: Any,
    ) -> None:
        """What is wrong with any tensor: no tensor, another device."""
        value = like or (lambda args: args[name])
        add(
            functions,
            name,
            {**more, name: lambda args: value(args).tolist()},
            TypeError,
            "a torch.Tensor, got list",
        )
        add(
            functions,
            name,
            {**more, name: lambda args: value(args).to(META)},
            ValueError,
            "a tensor on cpu",
        )

    for function in FUNCTIONS:
        names = ("k", "v") if function == "linear_attention_commit" else ("q", "k", "v")
        for name in names:
            add(function, name, {name: 1.0}, TypeError, "a torch.Tensor, got float")
            add(function, name, change(name, lambda x: x[0]), ValueError, "")
            if function not in DECODE or name != "k":
                add(
                    function,
                    name,
                    change(name, strided),
                    ValueError,
                    "a contiguous last dimension, got strides",
                )
        add(
            function,
            names[0],
            change(names[0], torch.Tensor.int),
            TypeError,
            "bfloat16 or float16 or float32 or float64, got int32",
        )
        add(
            function,
            names[1],
            change(names[1], torch.Tensor.half),
            TypeError,
            f"the dtype of {names[0]}, float32, got float16",
        )
        add(
            function,
            names[1],
            change(names[1], lambda x: x.to(META)),
            ValueError,
            f"a tensor on cpu, as {names[0]}, got meta",
        )
        if function != "lite_attention":
            add(
                function,
                "v",
                change("v", lambda x: x[:, :, :3]),
                ValueError,
                "heads HV that is a multiple of HQ = 2 or divides it, got 3"
                if function == GATED
                else "heads HV that is a multiple of H = 2, got 3",
            )
            add(
                function,
                "v",
                change("v", lambda x: x[:, :2]),
                ValueError,
                "[B, T, HV, V] with B, T = ",
            )
            add(
                function,
                "v",
                change("v", lambda x: x[..., :0]),
                ValueError,
                "a head dimension V of at least 1",
            )
        if function in PREFILL and function != GATED:
            add(function, "k", change("k", lambda x: x[:, :, :1]), ValueError, "the shape of q")
        add(function, "impl", {"impl": "nothing"}, ValueError, "'auto' or one of")
        add(function, "impl", {"impl": None}, TypeError, "a str, got NoneType")
        if function != "linear_attention_commit":
            for bad, error in (
                ("1", TypeError),
                (True, TypeError),
                (float("inf"), ValueError),
                (float("nan"), ValueError),
            ):
                add(
                    function,
                    "scale",
                    {"scale": bad},
                    error,
                    "a float or None" if error is TypeError else "a finite number",
                )
        if function not in ("lite_attention", "linear_attention_commit"):
            zeros = {"out": lambda args: torch.zeros_like(args["v"])}
            tensor(function, "out", zeros["out"])
            add(
                function,
                "out",
                {"out": lambda args: torch.zeros_like(args["v"]).double()},
                TypeError,
                f"the dtype of {'k' if function in DECODE else 'q'}, float32, got float64",
            )
            add(
                function,
                "out",
                {"out": lambda args: torch.zeros_like(args["v"])[:, 1:]},
                ValueError,
                "[B, T, HS, V] = [2, 3, 4, 6]" if function == GATED else "the shape of v",
            )
            add(
                function,
                "out",
                {"out": lambda args: strided(torch.zeros_like(args["v"]))},
                ValueError,
                "a contiguous last dimension",
            )
        if function in DENSE:
            grad = {**zeros, "q": lambda args: args["q"].clone().requires_grad_()}
            add(function, "out", grad, ValueError, "None when gradients are required")
        if function != "lite_attention":
            add(function, "state_v_first", {"state_v_first": 1}, TypeError, "a bool, got int")
        if function in PREFILL:
            add(
                function,
                "output_final_state",
                {"output_final_state": None},
                TypeError,
                "a bool, got NoneType",
            )

    state = {"initial_state": lambda args: torch.zeros(B, HV, K, V)}
    tensor(DENSE, "initial_state", state["initial_state"])
    for functions, dtype, expected in (
        (
            tuple(f for f in DENSE if f not in RECURRENT),
            torch.float64,
            "float32 or bfloat16 or float16, got float64",
        ),
        (RECURRENT, torch.int32, "float32 or bfloat16 or float16 or float64, got int32"),
    ):
        wrong = {"initial_state": lambda args, dtype=dtype: torch.zeros(B, HV, K, V, dtype=dtype)}
        add(functions, "initial_state", wrong, TypeError, expected)
    add(
        DENSE,
        "initial_state",
        {"initial_state": lambda args: torch.zeros(B, HV, V, K)},
        ValueError,
        ", K, V] = [N, 4, 8, 6]",
    )
    add(
        DENSE,
        "initial_state",
        {**state, "state_v_first": True},
        ValueError,
        ", V, K] = [N, 4, 6, 8]",
    )
    add(
        DENSE,
        "initial_state",
        {"initial_state": lambda args: torch.zeros(B + 1, HV, K, V)},
        ValueError,
        "one state for each of 2 sequences, got 3",
    )
    add(
        DENSE,
        "initial_state",
        {"initial_state": lambda args: strided(torch.zeros(B, HV, K, V))},
        ValueError,
        "dense matrices (last strides 6, 1, or 1, 8), got strides",
    )

    def packed(cu: Any, name: str = "cu_seqlens", **more: Any) -> dict[str, Any]:
        """The first row of the batch, packed by `cu`."""
        cut = {n: (lambda args, n=n: args[n][:1]) for n in ("q", "k", "v", "g", "beta")}
        return {**cut, name: cu, **more}

    three = ("chunk_kda", "chunk_gated_delta_rule", "chunk_simple_gla")
    rising = "offsets that rise from 0 to T = 3, got "
    whole = "the shape of cu_seqlens, [2], got "
    for bad, error, expected, of_copy in (
        ([0, T], TypeError, "a torch.Tensor, got list", None),
        (torch.tensor([0.0, T]), TypeError, "int32 or int64, got float32", None),
        (torch.tensor([[0, T]]), ValueError, "[N + 1], got [1, 2]", whole + "[1, 2]"),
        (torch.tensor([], dtype=torch.int32), ValueError, "[N + 1], got [0]", whole + "[0]"),
        (torch.tensor([0, T], device=META), ValueError, "a tensor on cpu, as q, got meta", "a tensor on the CPU, got "),
        (torch.tensor([[0, 9], [T, 9]])[:, 0], ValueError, "contiguous elements, got strides (2,)", None),
        (torch.tensor([1, T]), ValueError, rising + "[1, 3]", None),
        (torch.tensor([0, 2, 1, T]), ValueError, rising + "[0, 2, 1, 3]", whole + "[4]"),
        (torch.tensor([0, T - 1]), ValueError, rising + "[0, 2]", None),
        (torch.tensor([0, T + 1]), ValueError, rising + "[0, 4]", None),
        (torch.tensor([0]), ValueError, "[N + 1] with N >= 1 for T = 3, got [1]", whole + "[1]"),
    ):  # fmt: skip
        add(PACKED, "cu_seqlens", packed(bad), error, expected)
        both = packed(torch.tensor([0, T]), cu_seqlens_cpu=bad)
        for function in three:
            add(function, "cu_seqlens_cpu", both, error, of_copy or expected)
    with_cu = packed(torch.tensor([0, 1, T]))
    add(
        three,
        "cu_seqlens_cpu",
        {"cu_seqlens_cpu": torch.tensor([0, T])},
        ValueError,
        "None without cu_seqlens",
    )
    falling = {**with_cu, "cu_seqlens_cpu": torch.tensor([0, T + 1, T])}
    add(three, "cu_seqlens_cpu", falling, ValueError, rising + "[0, 4, 3]")
    add(
        three,
        "cu_seqlens_cpu",
        {**with_cu, "cu_seqlens_cpu": torch.tensor([0, T])},
        ValueError,
        "the shape of cu_seqlens, [3], got [2]",
    )
    add(
        (*three, *RECURRENT),
        "cu_seqlens",
        {"cu_seqlens": torch.tensor([0, 1, T])},
        ValueError,
        "None unless B = 1, got a tensor with B = 2",
    )
    add(
        (*three, *RECURRENT),
        "initial_state",
        {**with_cu, "initial_state": torch.zeros(1, HV, K, V)},
        ValueError,
        "one state for each of 2 sequences, got 1",
    )

    for function in (*DELTA, "chunk_simple_gla"):
        for wrong in (0.25, float("nan")):
            positive = change("g", lambda x, wrong=wrong: x.clone().index_fill_(1, MIDDLE, wrong))
            expected = f"values <= 0, got {wrong}"
            add(function, "g", positive, ValueError, expected)

    for name in ("g", "beta"):
        tensor(DELTA, name)
        letters = (("[B, T, HS] = ", (GATED,)), ("[B, T, HV", (*KDA, *RECURRENT)))
        for expected, functions in letters:
            wrong = change(name, lambda x: x[:, :, :H])
            add(functions, name, wrong, ValueError, expected)
        add(
            DELTA,
            name,
            change(name, torch.Tensor.long),
            TypeError,
            "float32 or bfloat16 or float16 or float64, got int64",
        )
    add(KDA, "g", change("g", strided), ValueError, "a contiguous last dimension")
    tensor("chunk_simple_gla", "g")
    add(
        "chunk_simple_gla",
        "g",
        change("g", lambda x: x[..., None]),
        ValueError,
        "[B, T, HV] = [2, 3, 4], got [2, 3, 4, 1]",
    )
    for function, name, sign in (
        ("chunk_simple_gla", "g_gamma", -1),
        ("lightning_attn_fwd", "decay", 1), ("lightning_attn_fwd_varlen", "decay", 1),
        ("linear_attention_decode", "decay", 1), ("linear_attention_commit", "decay", 1),
    ):  # fmt: skip
        alone = {"g": None} if name == "g_gamma" else {}
        lead = "k" if function in DECODE else "q"
        values = "values >=" if sign > 0 else "values <="
        for value, error, expected in (
            ([0.0] * HV, TypeError, "a torch.Tensor, got list"),
            (torch.zeros(HV).half(), TypeError, "float32, got float16"),
            (torch.zeros(H), ValueError, "[HV] = [4], got [2]"),
            (torch.zeros(HV, 1), ValueError, "[HV] = [4], got [4, 1]"),
            (torch.zeros(HV, device=META), ValueError, f"a tensor on cpu, as {lead}, got meta"),
            (torch.zeros(HV, 2)[:, 0], ValueError, "contiguous elements, got strides (2,)"),
            (torch.tensor([0.0, 1.0, -0.5, 1.0]) * sign, ValueError, f"{values} 0, got {-0.5 * sign}"),
            (torch.tensor([0.0, float("nan"), 0.0, 0.0]), ValueError, f"{values} 0, got nan"),
        ):  # fmt: skip
            add(function, name, {**alone, name: value}, error, expected)

    gate = {"use_gate_in_kernel": True, "A_log": torch.zeros(HV)}
    for name in (
        "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
    ):
        add(DELTA, name, {name: 1}, TypeError, "a bool, got int")
    doubled = {"allow_neg_eigval": True}
    for functions, expected in (
        (("chunk_kda",), "use_beta_sigmoid_in_kernel=True with it"),
        ((*RECURRENT, GATED), "False unless there are beta and use_beta_sigmoid_in_kernel"),
    ):
        add(functions, "allow_neg_eigval", doubled, ValueError, expected)
    add(
        (*CHUNKED, "chunk_simple_gla", "chunk_lightning_attn"), "cp_context", {"cp_context": object()}, TypeError,
        "a ContextParallel, a ProcessGroup",
    )  # fmt: skip
    for functions, expected in (
        (("chunk_kda",), "None unless use_gate_in_kernel is True, got Tensor"),
        ((*RECURRENT, GATED), "None unless there are g and use_gate_in_kernel, got a tensor"),
    ):
        for name in ("A_log", "dt_bias"):
            add(functions, name, {name: torch.zeros(HV)}, ValueError, expected)
    add(
        DELTA,
        "A_log",
        {"use_gate_in_kernel": True},
        ValueError,
        "a tensor with use_gate_in_kernel",
    )
    tensor(DELTA, "A_log", lambda args: torch.zeros(HV), use_gate_in_kernel=True)
    add(DELTA, "A_log", {**gate, "A_log": torch.zeros(H)}, ValueError, "] = [4], got [2]")
    add(
        DELTA,
        "A_log",
        {**gate, "A_log": torch.zeros(HV).long()},
        TypeError,
        "float32 or bfloat16 or float16 or float64, got int64",
    )
    add(DELTA, "dt_bias", {**gate, "dt_bias": [0.0]}, TypeError, "a torch.Tensor, got list")
    add(DELTA, "dt_bias", {**gate, "dt_bias": torch.zeros(HV + 1)}, ValueError, "[H")
    add(
        DELTA,
        "dt_bias",
        {**gate, "dt_bias": torch.zeros(HV * K, dtype=torch.int32)},
        TypeError,
        "float32 or bfloat16 or float16 or float64, got int32",
    )
    add(
        KDA,
        "dt_bias",
        {**gate, "dt_bias": torch.zeros(HV)},
        ValueError,
        "[HV * K] = [32] or [HV, K] = [4, 8], got [4]",
    )
    add(
        KDA,
        "dt_bias",
        {**gate, "dt_bias": torch.zeros(HV * K, device=META)},
        ValueError,
        "a tensor on cpu, as q, got meta",
    )

    for function in (GATED, "fused_recurrent_gated_delta_rule"):
        raw, logits = "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"
        add(function, raw, {**gate, "g": None}, ValueError, "False without g, got True")
        without = {"beta": None, logits: True}
        add(function, logits, without, ValueError, "False without beta, got True")
    rule = "fused_recurrent_gated_delta_rule"
    for name, dim, letter in (("gk", K, "K"), ("gv", V, "V")):
        decays = torch.zeros(B, T, HV, dim)
        tensor(rule, name, lambda args, decays=decays: decays)
        shape = f"[B, T, HV, {letter}] = [2, 3, 4, {dim}], got [2, 3, 4]"
        for bad, error, expected in (
            (decays.long(), TypeError, "float32 or bfloat16 or float16 or float64, got int64"),
            (decays[..., 0], ValueError, shape),
            (strided(decays), ValueError, "a contiguous last dimension"),
            (decays + 0.25, ValueError, "values <= 0, got 0.25"),
        ):
            add(rule, name, {name: bad}, error, expected)

    for name in ("safe_gate", "disable_recompute", "return_intermediate_states"):
        add("chunk_kda", name, {name: "yes"}, TypeError, "a bool, got str")
    for changes, error, expected in (
        (
            {"safe_gate": True, **gate},
            ValueError,
            "a float with use_gate_in_kernel and safe_gate, got None",
        ),
        (
            {"safe_gate": True, "lower_bound": -5.5},
            ValueError,
            "a number in [-5, 0) with safe_gate, got -5.5",
        ),
        ({"safe_gate": True, "lower_bound": 0.0}, ValueError, "a number below 0, got 0.0"),
    ):
        add("chunk_kda", "lower_bound", changes, error, expected)
    for function, flags in zip(KDA, ("use_gate_in_kernel or safe_gate", "use_gate_in_kernel")):
        expected = f"None unless {flags} is True, got -1.0"
        add(function, "lower_bound", {"lower_bound": -1.0}, ValueError, expected)
    for bad, error, expected in (
        (1.0, ValueError, "a number below 0, got 1.0"),
        (float("-inf"), ValueError, "a finite number, got -inf"),
        (float("nan"), ValueError, "a finite number, got nan"),
        ("-5", TypeError, "a float or None, got str"),
    ):
        add(KDA, "lower_bound", {**gate, "lower_bound": bad}, error, expected)
    for bad in ("always", 1, None, 0.0):
        add(
            "chunk_kda",
            "use_intracard_cp",
            {"use_intracard_cp": bad},
            ValueError,
            "'auto', True or False",
        )
    for bad, error, expected in (
        (
            {"segment_tokens": 1000},
            ValueError,
            "a multiple of 64, at least 1024, or None, got 1000",
        ),
        ({"segment_tokens": 1024.0}, TypeError, "an int or None, got float"),
        (
            {"segment_tokens": 1024, "use_intracard_cp": False},
            ValueError,
            "None with use_intracard_cp=False, got 1024",
        ),
    ):
        add("chunk_kda", "segment_tokens", bad, error, expected)
    for bad, error, expected in (
        (64.5, TypeError, "an int, got float"),
        (True, TypeError, "an int, got bool"),
        (48, ValueError, "16, 32 or 64, got 48"),
    ):
        add(CHUNKED, "chunk_size", {"chunk_size": bad}, error, expected)
    states = {"return_intermediate_states": True}
    other = {**states, "chunk_size": 32}
    add("chunk_kda", "chunk_size", other, ValueError, "64 with return_intermediate_states, got 32")
    add("chunk_kda", "use_graph", {"use_graph": 1}, TypeError, "a bool, got int")
    two = packed(torch.tensor([0, 1, T]))
    for number, error, expected in (
        (2.0, TypeError, "an int, got float"),
        (1, ValueError, "at least the 2 sequences of cu_seqlens, got 1"),
    ):
        add("chunk_kda", "max_num_seqs", {**two, "max_num_seqs": number}, error, expected)
    add(
        "chunk_kda",
        "return_intermediate_states",
        {**states, "disable_recompute": True},
        ValueError,
        "disable_recompute=False with it",
    )
    grad = {"beta": lambda args: args["beta"].clone().requires_grad_()}
    add("chunk_kda", "return_intermediate_states", {**states, **grad}, ValueError, "no gradients")

    for bad, error, expected in (
        ([[0, 0]], TypeError, "a torch.Tensor"),
        (torch.zeros(1, 2), TypeError, "int32 or int64, got float32"),
        (torch.zeros(2, dtype=torch.int32), ValueError, "[NT, 2], got [2]"),
        (torch.zeros(1, 2, dtype=torch.int32, device=META), ValueError, "a tensor on cpu"),
    ):  # fmt: skip
        add(
            "chunk_gated_delta_rule",
            "chunk_indices",
            {**with_cu, "chunk_indices": bad},
            error,
            expected,
        )
    indices = torch.zeros(1, 2, dtype=torch.int32)
    add(
        "chunk_gated_delta_rule",
        "chunk_indices",
        {"chunk_indices": indices},
        ValueError,
        "None without cu_seqlens",
    )

    for name, value, error, expected in (
        ("layer_idx", 1.0, TypeError, "an int, got float"),
        ("layer_idx", 4, ValueError, "0 to 3, got 4"),
        ("layer_idx", -1, ValueError, "0 to 3, got -1"),
        ("num_layers", True, TypeError, "an int, got bool"),
        ("num_layers", 0, ValueError, "at least 1, got 0"),
    ):
        add("chunk_lightning_attn", name, {name: value}, error, expected)

    for function, pool, rows in (
        ("lightning_attn_fwd_varlen", "state_pool", "initial_state_indices"),
        *((function, "state", "state_indices") for function in DECODE),
    ):
        tensor(function, pool)
        tensor(function, rows)
        add(function, pool, change(pool, torch.Tensor.int), TypeError, "float32")
        add(
            function,
            pool,
            change(pool, lambda x: x[:, :H]),
            ValueError,
            "[pool, HV, K, V] = [pool, 4, 8, 6]",
        )
        add(
            function,
            pool,
            {"state_v_first": True},
            ValueError,
            "[pool, HV, V, K] = [pool, 4, 6, 8]",
        )
        add(
            function,
            pool,
            change(pool, strided),
            ValueError,
            "dense matrices (last strides 6, 1, or 1, 8), got strides",
        )
        missing = "state_indices" if function in DECODE else "indices"
        too_few = {pool: torch.zeros(1, HV, K, V), rows: None}
        add(function, pool, too_few, ValueError, f"= 2 states when there are no {missing}, got 1")
        add(function, rows, change(rows, torch.Tensor.long), TypeError, "int32, got int64")
        add(function, rows, change(rows, lambda x: x[:1]), ValueError, "= [2], got [1]")
        add(
            function,
            rows,
            change(rows, lambda x: x + 5),
            ValueError,
            f"indices below the 5 rows of {pool}, got ",
        )
        add(
            function,
            rows,
            change(rows, lambda x: x * 0 + 3),
            ValueError,
            f"a row of {pool} once at most, got [3, 3]",
        )
    add(
        "lightning_attn_fwd_varlen",
        "initial_state_indices",
        {"state_pool": None},
        ValueError,
        "None without a state_pool",
    )
    varlen = "lightning_attn_fwd_varlen"
    known = torch.ones(2, dtype=torch.bool)
    for name, value, error, expected in (
        ("null_slot", 0.0, TypeError, "an int or None, got float"),
        ("null_slot", True, TypeError, "an int or None, got bool"),
        ("null_slot", 1 << 31, ValueError, "a 32-bit integer"),
        ("has_initial_state", [True, False], TypeError, "a torch.Tensor, got list"),
        ("has_initial_state", known.int(), TypeError, "bool, got int32"),
        ("has_initial_state", known[:1], ValueError, "[N] = [2], got [1]"),
        ("has_initial_state", known.to("meta"), ValueError, "a tensor on cpu, as q, got meta"),
    ):
        add(varlen, name, {name: value}, error, expected)
    for name, value in (("null_slot", 0), ("has_initial_state", known)):
        nothing = {"state_pool": None, "initial_state_indices": None, name: value}
        add(varlen, name, nothing, ValueError, "None without")
    grad = {"v": lambda args: args["v"].clone().requires_grad_()}
    add("lightning_attn_fwd_varlen", "state_pool", grad, ValueError, "no gradients with it")

    for name, value in (("null_slot", 0.0), ("null_slot", True)):
        add(DECODE, name, {name: value}, TypeError, "an int or None")
    add(DECODE, "null_slot", {"null_slot": 1 << 31}, ValueError, "a 32-bit integer")
    for function in DECODE:
        for name in ("k", "v", "state", "decay"):
            wants = change(name, lambda x: x.clone().requires_grad_())
            add(
                function, name, wants, ValueError, "no gradient (the state is updated in place; use"
            )
        for length in (0, 9):
            long = {
                n: (lambda args, n=n, m=length: args[n].repeat(1, 3, 1, 1)[:, :m])
                for n in ("q", "k", "v")
            }
            add(function, "k", long, ValueError, f"1 to 8 tokens (dimension 1), got {length}")
        bf16 = {"state": lambda args: args["state"].bfloat16()}
        add(
            function,
            "rounding_seed",
            {"rounding_seed": 1},
            ValueError,
            "None unless the state is bfloat16",
        )
        for seed, error, expected in (
            (1.5, TypeError, "an int, an int64 tensor"),
            (True, TypeError, "an int, an int64 tensor"),
            (1 << 63, ValueError, "a 64-bit integer"),
            (torch.ones(1, dtype=torch.int32), TypeError, "int64, got int32"),
            (torch.ones(2, dtype=torch.int64), ValueError, "one element, [1], got [2]"),
            (torch.ones(1, dtype=torch.int64, device=META), ValueError, "a tensor on cpu"),
        ):
            add(function, "rounding_seed", {**bf16, "rounding_seed": seed}, error, expected)
    add("linear_attention_decode", "q", change("q", lambda x: x[0]), ValueError, "4 dimensions")
    flat = {n: (lambda args, n=n: args[n][0]) for n in ("q", "k", "v")}
    add(
        "linear_attention_decode", "q", flat, ValueError, "4 dimensions [B, T, H, K], got [3, 2, 8]"
    )
    add(
        "linear_attention_decode",
        "q",
        change("q", lambda x: x[:, :, :1]),
        ValueError,
        "the shape of k",
    )
    add(
        "linear_attention_decode",
        "q",
        change("q", lambda x: x.clone().requires_grad_()),
        ValueError,
        "no gradient",
    )
    add("linear_attention_decode", "commit", {"commit": 0}, TypeError, "a bool, got int")
    tensor("linear_attention_commit", "num_accepted")
    add(
        "linear_attention_commit",
        "num_accepted",
        change("num_accepted", torch.Tensor.long),
        TypeError,
        "int32, got int64",
    )
    add(
        "linear_attention_commit",
        "num_accepted",
        change("num_accepted", lambda x: x[:1]),
        ValueError,
        "[B] = [2], got [1]",
    )

    lite_name = "lite_attention"
    add(
        lite_name,
        "k",
        change("k", lambda x: x[..., 1:]),
        ValueError,
        "[B, Sk, Hkv, D] with B, D = 2, 8 as in q",
    )
    add(
        lite_name,
        "k",
        {n: (lambda args, n=n: args[n][:, :, [0, 1, 1]]) for n in ("k", "v")},
        ValueError,
        "Hkv that divides Hq = 4, got 3",
    )
    add(
        lite_name,
        "v",
        change("v", lambda x: x[:, 1:]),
        ValueError,
        "[B, Sk, Hkv, DV] with B, Sk, Hkv = [2, 7, 2]",
    )
    add(
        lite_name,
        "v",
        change("v", lambda x: x[..., :0]),
        ValueError,
        "a head dimension of at least 1",
    )
    for name in ("block_m", "block_n"):
        add(lite_name, name, {name: 0}, ValueError, "at least 1, got 0")
        add(lite_name, name, {name: 8.0}, TypeError, "an int, got float")
    step = torch.ones(1, dtype=torch.int32)
    for bad, error in (
        (0, ValueError), (2, ValueError), (1.0, TypeError), (True, TypeError), (None, TypeError),
        (step.long(), TypeError), (step[0], ValueError), (torch.cat((step, step)), ValueError),
    ):  # fmt: skip
        add(lite_name, "direction", {"direction": bad}, error, "1 or -1, or an int32 tensor [1]")
    add(lite_name, "direction", {"direction": step.to(META)}, ValueError, "a tensor on cpu")
    for name in ("causal", "use_int8", "deterministic"):
        add(lite_name, name, {name: 1}, TypeError, "a bool, got int")
    requiring = {"q": lambda args: args["q"].clone().requires_grad_()}
    add(lite_name, "use_int8", {"use_int8": True, **requiring}, ValueError, "False when gradients")
    add(lite_name, "threshold", {"threshold": "low"}, TypeError, "a float or None, got str")
    for bad in (float("nan"), 0.5):
        message = "log2 units, at most 0, or an infinity"
        add(lite_name, "threshold", {"threshold": bad}, ValueError, message)
    of_length = {"threshold": float("nan"), "threshold_mode": "length"}
    add(lite_name, "threshold", of_length, ValueError, "log2 units, got nan")
    for bad in (None, 1):
        add(lite_name, "threshold_mode", {"threshold_mode": bad}, TypeError, "a str, got")
    bad = {"threshold_mode": "sum"}
    add(lite_name, "threshold_mode", bad, ValueError, "'max' or 'length', got 'sum'")
    mask = torch.ones(B, 4, 3, 4, dtype=torch.bool)
    for name in ("read_mask", "must_do", "grad_mask"):
        add(lite_name, name, {name: mask.tolist()}, TypeError, "a torch.Tensor, got list")
        add(
            lite_name, name, {name: mask.long()}, TypeError, "bool, or int32 words of 32 tiles, got"
        )
        add(lite_name, name, {name: mask.to(META)}, ValueError, "a tensor on cpu")
        add(lite_name, name, {name: mask[..., :3]}, ValueError, "[B, Hq, Mt, Nt] = [2, 4, 3, 4]")
        add(lite_name, name, {name: mask.int()}, ValueError, "[B, Hq, Mt, W] = [2, 4, 3, 1]")
    add(lite_name, "read_mask", {"read_mask": mask[:1]}, ValueError, "[B, Hq, Mt, Nt] = [")
    dense = {"threshold": None}
    add(lite_name, "read_mask", {"read_mask": mask, **dense}, ValueError, "None where threshold is")
    add(lite_name, "must_do", {"must_do": mask, **dense}, ValueError, "None where threshold is")
    for name in ("must_do", "grad_mask"):
        add(lite_name, name, {name: mask[None]}, ValueError, "a shape that broadcasts")
    add(lite_name, "grad_mask", {"grad_mask": mask}, ValueError, "None for the reference")
    add(lite_name, "use_int8", {"use_int8": True}, ValueError, "False for the reference")
    offsets = {"cu_seqlens_q": torch.tensor([0, 4, 9]), "cu_seqlens_k": torch.tensor([0, 7, 7])}
    packed = offsets | {n: (lambda args, n=n: args[n][:1]) for n in ("q", "k", "v")}
    for name, longest in (("cu_seqlens_q", "max_seqlen_q"), ("cu_seqlens_k", "max_seqlen_k")):
        x = offsets[name]
        for changes, error, message in (
            (x.tolist(), TypeError, "a torch.Tensor, got list"),
            (x.float(), TypeError, "int32 or int64, got float32"),
            (x[None], ValueError, "[N + 1], got [1, 3]"),
            (x[:1], ValueError, ""),
            (x.to(META), ValueError, "a tensor on cpu"),
            (x.repeat_interleave(2)[::2], ValueError, "contiguous elements"),
            (x + 1, ValueError, "offsets that rise from 0 to T = "),
            (x[[0, 2, 1]], ValueError, "") if name == "cu_seqlens_q" else (x[[0, 0, 0]], ValueError, ""),
        ):  # fmt: skip
            add(lite_name, name, packed | {name: changes}, error, message)
        alone = "None unless cu_seqlens_q and cu_seqlens_k are given"
        add(lite_name, name, {name: x}, ValueError, alone)
        add(lite_name, longest, {longest: 9}, ValueError, alone)
        add(lite_name, longest, packed | {longest: 9.0}, TypeError, "an int, got float")
        add(lite_name, longest, packed | {longest: 4}, ValueError, "at least the length of the")
    other = {"cu_seqlens_k": torch.tensor([0, 7, 7], dtype=torch.int32)}
    add(
        lite_name,
        "cu_seqlens_k",
        packed | other,
        TypeError,
        "the dtype of cu_seqlens_q, int64, got int32",
    )
    other = {"cu_seqlens_k": torch.tensor([0, 7])}
    add(lite_name, "cu_seqlens_k", packed | other, ValueError, "the shape of cu_seqlens_q, [3]")
    place = torch.zeros(B, 9, 4, V)
    for bad, error, message in (
        ("no", TypeError, "a torch.Tensor, got str"),
        (place.double(), TypeError, "the dtype of q, float32, got float64"),
        (place.to(META), ValueError, "a tensor on cpu"),
        (place[:, 1:], ValueError, "[B, Sq, Hq, DV] = [2, 9, 4, 6]"),
        (strided(place), ValueError, "a contiguous last dimension"),
        (place.clone().requires_grad_(), ValueError, "None when gradients are required"),
    ):
        add(lite_name, "out", {"out": bad}, error, message)
    add(lite_name, "out", {"out": place, **requiring}, ValueError, "None when gradients are")
    return found
