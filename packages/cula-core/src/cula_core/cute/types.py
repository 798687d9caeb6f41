"""Names of the DSL's numeric types, and of what configs spell as strings."""

import cutlass

F16, F32, I32 = cutlass.Float16, cutlass.Float32, cutlass.Int32
DTYPES = {"bfloat16": cutlass.BFloat16, "float16": F16, "float32": F32}
INDICES = {"int32": I32, "int64": cutlass.Int64}
