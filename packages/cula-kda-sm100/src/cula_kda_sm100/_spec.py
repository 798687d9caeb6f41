"""What a dispatcher reads about this package; importing it imports neither kernels nor the DSL."""

from __future__ import annotations

from functools import partial

from cula_core.delta_rule import spec
from cula_core.spec import loader

from .arch import TARGET

NAME, ARCHS = TARGET.distribution, TARGET.archs
OP, PRIORITY = spec.OP, spec.PRIORITY
supports = partial(spec.supports, TARGET)
load = loader(TARGET.package)
