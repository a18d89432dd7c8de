"""Benchmarks: positional encodings compared with other implementations, in time and memory. No wrong result is timed.

posenc bench
    workloads.py        the encodings and shapes                                      a line each
    peers.py            posenc, PyTorch and textbook formulas                         a class each
    libraries.py        third-party libraries, optional                               a class each
    measure.py          interleaved timing, peak memory, load by other processes
    run.py              compare with the float64 reference, then measure
    growth.py           exponents of time and extra memory
    report.py           terminal, JSON, plot
    goals.py, readme_tables.py   the tables of bench/results/README.md and of the documentation (make bench-table)

python -m posenc.bench.gpu               the triton engine on one GPU
python -m posenc.bench.rotate            the rotation of queries and keys
python -m posenc.bench.explorer_redraw   the explorer in a browser
"""
