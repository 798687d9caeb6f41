"""The ops that can be measured, in one folder per family; a family's `OPS` names the modules that define an `OP`."""

FAMILIES = ("decode", "lightning", "kda", "lite")

# Ops that no GPU has a result of, with the reason; `tables.py --check` refuses any other op without a result file.
WITHOUT_RESULTS: dict[str, str] = {}
