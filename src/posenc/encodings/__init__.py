"""One file for each family of encodings. They make plans; none of them names an engine."""
