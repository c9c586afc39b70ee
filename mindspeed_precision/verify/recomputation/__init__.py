"""What modules gave, computed anew in float64 from what they received and from their parameters.

Each file holds one kind of module. Its functions yield what the module must have given (`Exact`), with what
rounding may leave; who asks them is ``verify.invariants.operations``.
"""
