"""Operations in plain torch that both the kernel packages and `cula` take as their oracle and CPU implementation."""
