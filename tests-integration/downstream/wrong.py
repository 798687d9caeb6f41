"""The same calls with wrong arguments. Behind each, `E:` names the error that mypy --strict has to report there."""

from __future__ import annotations

from torch import Tensor

import cula
import cula_cp_sm90
import cula_delta_decode
import cula_emulator
import cula_kda_sm100
import cula_lightning_decode
import cula_lightning_sm90
import liteattention_sm89
import liteattention_sm90
from cula.delta import delta_rule_decode
from cula.kda import chunk_kda
from cula.lightning import linear_attention_decode
from cula_core.dtypes import dtype_name
from cula_testing.comparing import relative_rmse


def wrong(x: Tensor) -> None:
    chunk_kda("q", x, x, x, x)  # E: arg-type
    chunk_kda(x, x, x, x, x, scale="half")  # E: arg-type
    linear_attention_decode(x, x, x, x, x, rows=x)  # E: call-arg
    delta_rule_decode(x, x, x, x, x, x, rows=x)  # E: call-arg
    number: int = chunk_kda(x, x, x, x, x)[0]  # E: assignment
    cula.explain(number)  # E: arg-type
    cula_cp_sm90.chunk_kda("q", x, x, x, x)  # E: arg-type
    cula_delta_decode.delta_rule_decode(x, x, x, 0.5, x, x)  # E: arg-type
    cula_kda_sm100.chunk_kda(x, x, x, x)  # E: call-arg
    cula_lightning_decode.linear_attention_decode(x, x, x, x, 0.5)  # E: arg-type
    cula_lightning_sm90.lightning_attn_fwd(x, x, x, [0.5])  # E: arg-type
    liteattention_sm89.LiteAttention(threshold="low")  # E: arg-type
    liteattention_sm90.LiteAttention(threshold="low")  # E: arg-type
    error: str = dtype_name(x.dtype)
    error = relative_rmse(x, x)  # E: assignment
    cula_emulator.Options(seed=error)  # E: arg-type
