"""One world for tests: a case is data, runs on any executor, and is compared with a model in float64.

`case` has the data and the tensors that it stands for, `model` what must come out, `calls` and `program` what a rank
does, `threads` and `processes` the ranks, `draw` random cases from seeds, `shorten` the least case that still fails.
"""
