"""Rotary encodings: RoPE and its relatives, context extension, configurations of real models."""
