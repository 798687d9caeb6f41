"""Every public function and class has an example in its docstring."""

import cula_lightning_sm90
from cula_testing import docstrings


class TestExamples(docstrings.Examples):
    package = cula_lightning_sm90
