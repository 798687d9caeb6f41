"""Every public function and class has an example in its docstring."""

import liteattention_sm90
from cula_testing import docstrings


class TestExamples(docstrings.Examples):
    package = liteattention_sm90
