"""Building blocks of kernels in CuTe DSL that hold for every kernel family, and the one place that compiles them.

Only kernel files and `launch` modules import this folder, because its modules import the DSL: all but `artifacts`,
`key` and `texts`.
"""
