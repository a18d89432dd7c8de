"""Benchmarks: positional encodings compared with other implementations, in time and memory. No wrong result is timed.

posenc bench
    workloads.py        the encodings and shapes                                      a line each
    peers.py            posenc, PyTorch and textbook formulas                         a class each
    libraries.py        third-party libraries, optional                               a class each
    measure.py          interleaved timing, peak memory, the machine and its load by other processes
    run.py              compare with the float64 reference, then measure
    growth.py           exponents of time and extra memory
    report.py           terminal, JSON, plot

posenc bench --suite uses    layers, models, decoding and windows at everyday sizes, beside the best code without posenc
    uses.py             a cell: our call, the others, their comparison, their times
    uses_suite.py       the cells of a device in the order in which they run
    uses_layers.py      cells of one layer          uses_by_hand.py   the layers as one writes them without posenc
    uses_models.py      cells of whole models       uses_calls.py     cells of one `attend` call

posenc bench --suite hf, python -m posenc.bench.accelerated      transformers' models, as they are and accelerated
    models.py           their configurations

python -m posenc.bench.rotate            the rotation of queries and keys
"""
