"""96 values per thread where the launch bound leaves 64 registers for them: the assembler has to spill."""

import cutlass
import cutlass.cute as cute

VALUES = 96


@cute.kernel
def _kernel(data: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    r = cute.make_rmem_tensor((VALUES,), cutlass.Float32)
    for i in cutlass.range_constexpr(VALUES):
        r[i] = data[thread, i]
    for i in cutlass.range_constexpr(VALUES):
        r[i] = r[i] * r[(7 * i + 3) % VALUES] + r[(i + 1) % VALUES]
    for i in cutlass.range_constexpr(VALUES):
        data[thread, i] = r[i]


class RegisterHungry:
    def __init__(self, ctas_per_sm: int):
        self.ctas_per_sm = ctas_per_sm

    @cute.jit
    def __call__(self, data: cute.Tensor):
        _kernel(data).launch(grid=(1, 1, 1), block=(256, 1, 1), min_blocks_per_mp=self.ctas_per_sm)
