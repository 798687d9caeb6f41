"""The problems that the stages of a call are tested with, each for one architecture."""

from cula_testing.kda.problems import Problem, make_problem

_PACKED = {"lengths": (70, 0, 1, 64), "packed": True}
_IN_16_BITS = {"gate_dtype": "bfloat16", "beta_dtype": "bfloat16"}
_FIELDS = {
    # The first two run kernels that whole calls of the packages run as well.
    "dense": {"lengths": (130, 130), "strength": "sigmoid", **_IN_16_BITS},
    "packed": {"kind": "moderate", **_PACKED},
    "weak": {"lengths": (100,), "kind": "near_zero"},
    "any decay": {"lengths": (100,), "kind": "resets", "gate": "softplus"},
    "equal keys": {"lengths": (128,), "kind": "equal_keys", "strength": "doubled"},
    "raw": {"lengths": (65,), "gate": "log", "rate": False, "bias": False, "l2norm": False},
}
ARCHITECTURE = {
    "dense": "sm_90a",
    "packed": "sm_100a",
    "weak": "sm_103a",
    "any decay": "sm_90a",
    "equal keys": "sm_100a",
    "raw": "sm_103a",
}
PROBLEMS: dict[str, Problem] = {
    name: make_problem(heads=(1, 2), **fields) for name, fields in _FIELDS.items()
}
# Of which problems what a backward pass takes is tested: products and inverse, and the factors.
WITH_PRODUCTS = ("dense", "packed", "any decay")
WITH_FACTORS = ("dense", "packed", "raw")
