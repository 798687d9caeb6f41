"""Suites that every KDA package runs: a test class derives from one and names its `Subject`."""

from .contract import RefusalsOnGpu
from .emulated import Emulated
from .gradients import GradientSuite
from .gradients_on_gpu import GradientsOnGpu, GradientsThroughAutograd
from .machine_code import MachineCode
from .on_gpu import OnGpu
from .operator import Operator
from .recurrence import Recurrence
from .slices import Slices
from .states import EngineStates
from .subject import Subject

__all__ = [
    "Emulated",
    "EngineStates",
    "GradientSuite",
    "GradientsOnGpu",
    "GradientsThroughAutograd",
    "MachineCode",
    "OnGpu",
    "Operator",
    "Recurrence",
    "RefusalsOnGpu",
    "Slices",
    "Subject",
]
