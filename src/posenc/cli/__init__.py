"""The command line: `posenc COMMAND`."""
