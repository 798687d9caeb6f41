"""What is fixed when a prefill kernel of the gated delta rule is compiled. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 64
V_TILE = 64
HEAD_DIM = 128
SUB = 16  # rows of a block of a chunk's square matrices
ACTIVATION_DTYPES = ("bfloat16", "float16")
GATE_DTYPES = ("float32", "bfloat16", "float16")
OPERAND_DTYPES = ("float16", "bfloat16")
GATES = ("log", "softplus")
STRENGTHS = ("given", "logits", "doubled logits")


@dataclass(frozen=True)
class Config:
    """Static facts of a call: batch, lengths, head counts, strides, scale and intervals are not among them.

    dtype: of q, k, v and outputs. operand: of what the kernel makes of them and multiplies again. gate: g holds log
    decays ("log"), or what `-exp(A_log) softplus(g + dt_bias)` makes them of ("softplus"); None without g. bias: there
    is a dt_bias. strength: what beta holds, None without it. packed: the sequences are those of `cu_seqlens`. indexed,
    redirected: sequences find the states that they begin and end with through indices, of which negative ones are
    padding. fresh: some sequences begin at zero whatever their states are. in_place: final states replace those of the
    pool. l2norm and the others: see the public function.
    """

    dtype: str
    operand: str = "float16"
    gate: str | None = None
    gate_dtype: str = "float32"
    bias: bool = False
    strength: str | None = None
    strength_dtype: str = "float32"
    l2norm: bool = False
    packed: bool = False
    state_v_first: bool = False
    initial_state: bool = False
    final_state: bool = True
    indexed: bool = False
    redirected: bool = False
    fresh: bool = False
    in_place: bool = False
    checkpoints: bool = False

    @property
    def two_terms(self) -> bool:
        """Whether what is added to the state is rounded to two numbers instead of one: bfloat16 alone is too short."""
        return self.dtype == "bfloat16" and self.operand == "float16"

    def illegal(self) -> str | None:
        """Why no kernel serves this problem, or None."""
        if self.dtype not in ACTIVATION_DTYPES:
            return f"activations must be {' or '.join(ACTIVATION_DTYPES)}, not {self.dtype}"
        if self.operand not in OPERAND_DTYPES:
            return f"operand_dtype must be {' or '.join(OPERAND_DTYPES)}, not {self.operand}"
        if (self.dtype, self.operand) == ("float16", "bfloat16"):
            return "float16 activations are multiplied in float16, not bfloat16"
        for what, dtype in (("g", self.gate_dtype), ("beta", self.strength_dtype)):
            if dtype not in GATE_DTYPES:
                return f"{what} must be {', '.join(GATE_DTYPES)}, not {dtype}"
        if self.gate not in (None, *GATES):
            return f"gate must be None, {', '.join(GATES)}, not {self.gate}"
        if self.strength not in (None, *STRENGTHS):
            return f"strength must be None, {', '.join(STRENGTHS)}, not {self.strength}"
        if (self.indexed or self.fresh or self.in_place) and not self.initial_state:
            return "indices, fresh sequences and in-place states need states to begin with"
        if self.in_place and not self.final_state:
            return "an in-place state is a final state"
        if self.redirected and not (self.in_place and self.indexed):
            return "rows to end in are those of a pool that is updated through indices"
        return None


@dataclass(frozen=True)
class TableConfig:
    """The kernel that makes the segment table of packed sequences. index_dtype: of cu_seqlens."""

    index_dtype: str
