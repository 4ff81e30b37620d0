"""The maths of post-training: values in, values out.

Tensors are flat, one value per token, with a `TokenLayout` beside them (see `hotseat.types`). A token that the policy
did not sample is never read, so its value cannot reach a loss, an advantage or a gradient. float64 stays float64.
`docs/algorithms.md` lists the formulas, the framework whose variant each of them is, and the tests.
"""
