"""What a dispatcher reads about this package; importing it imports neither torch kernels nor the DSL."""

from __future__ import annotations

from functools import partial

from cula_core.constants import STATE_DTYPES
from cula_core.spec import SM80_AND_NEWER, loader, supports_decode

from .config import ACTIVATION_DTYPES, HEAD_DIMS, MAX_TOKENS

NAME = "cula-lightning-decode"
OP = "lightning.decode"
ARCHS = SM80_AND_NEWER
PRIORITY = 10
supports = partial(supports_decode, NAME, ACTIVATION_DTYPES, STATE_DTYPES, HEAD_DIMS, MAX_TOKENS)
load = loader("cula_lightning_decode")
