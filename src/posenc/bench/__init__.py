"""Position encodings side by side with their peers, in time and memory. A wrong result is never timed.

workloads.py  what is attended: a scheme, causal or not, one query or all       a line each
peers.py      who attends: posenc, PyTorch, textbook formulas, other libraries  a class each, optional, versioned
measure.py    how: medians of interleaved runs, peak bytes of tensors
run.py        check against the float64 reference, then measure
report.py     terminal, JSON, plot, README
"""
