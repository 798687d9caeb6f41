"""Every public function and class has an example in its docstring."""

import cula_kda_sm100
from cula_testing import docstrings


class TestExamples(docstrings.Examples):
    package = cula_kda_sm100
