"""Operations in plain torch that are the oracle and the CPU implementation of both the kernel packages and `cula`."""
