"""The lab: train small models that differ in their positional encoding only, and say which one to use.

    posenc compare --preset quick        train, evaluate past the training length, report
    posenc report DIR                    build a run's report again
    posenc claims                        what textbooks say, and what was measured

Nothing is imported here: the command line must start without torch.
"""
