"""Every public function and class has an example in its docstring."""

import cula_delta_decode
from cula_testing import docstrings


class TestExamples(docstrings.Examples):
    package = cula_delta_decode
