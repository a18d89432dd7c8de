"""Layers: attention around `attend`, its cache, and the sequence of its tokens."""
