"""Layers: attention around `attend`, its cache, and what a layer knows of its tokens."""
