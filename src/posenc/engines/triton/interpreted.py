"""bfloat16 in Triton's interpreter as on a GPU: exact products that are summed up in float32, and rounding to nearest.

As it comes, the interpreter keeps such numbers as their 16 bits and multiplies those. The kernels have products of bfloat16 in
every dtype: a number for each column is three of them (terms.py).
"""

from __future__ import annotations

import numpy as np
from triton import language as tl
from triton.runtime import interpreter


def mend() -> None:
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "posenc_mended", False):
        return
    dot, cast = builder.create_dot, builder.cast_impl

    def create_dot(self, a, b, d, *rest):
        a, b = (self.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, d, *rest)

    def cast_impl(self, x, kind):
        if x.dtype.scalar != tl.float32 or kind.scalar != tl.bfloat16:
            return cast(self, x, kind)
        bits = np.ascontiguousarray(x.data).view(np.uint32)
        nearest = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
        nearest = np.where(np.isnan(x.data), 0x7FC0, nearest).astype(np.uint16)
        return interpreter.TensorHandle(nearest, tl.bfloat16)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    builder.posenc_mended = True
