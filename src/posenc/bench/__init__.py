"""Position encodings side by side with their peers, in time and memory. A wrong result is never timed.

workloads.py  what is attended: an encoding, causal or not, one query or all        a line each
peers.py      who attends: posenc, PyTorch, textbook formulas                    a class each
libraries.py  who attends: other people's libraries, optional and versioned      a class each
measure.py    how: interleaved runs, medians and their spread, peak bytes of tensors, who else used the machine
run.py        check against the float64 reference, then measure what fits and is not too slow
growth.py     exponents of time and extra memory
report.py     terminal, JSON, plot
table.py      the READMEs' tables
"""
