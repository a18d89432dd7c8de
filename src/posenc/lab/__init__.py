"""The lab: train small models that differ in their positional encoding only, and compare them.

    posenc compare --preset quick        train, evaluate past the training length, report
    posenc report DIR                    build a run's report again
    posenc claims                        statements of textbooks, tested by measurement

Nothing is imported here: the command line must start without torch.
"""
