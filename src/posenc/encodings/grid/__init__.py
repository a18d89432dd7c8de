"""Relative positions over the rows and columns of images: tables, tables from a small network, one table an axis."""
