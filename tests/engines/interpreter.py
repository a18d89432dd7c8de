"""bfloat16 in Triton's interpreter as on a GPU: exact products that are summed in float32, and rounding to nearest.

Triton's interpreter keeps bfloat16 numbers as their 16 bits and multiplies those as integers; and it truncates where a GPU
rounds. The kernels multiply bfloat16 in every dtype (bf16x3.py). Call `mend()` before a kernel runs interpreted.
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
