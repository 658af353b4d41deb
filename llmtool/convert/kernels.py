"""The one copy of a conversion: a strided view into a buffer, at the speed of the memory rather than of numpy's loop.

Numpy copies a transposed bfloat16 matrix at a fiftieth of what a plain copy gets, since it walks whole columns of the
source. Cutting the target's fastest axis into strips of a cache line makes both sides walk memory in order
(``bench/kernels.py`` measures it).
"""

import numpy as np

STRIP = 16  # elements of the target's fastest axis that are written together; measured best of 8 to 128


def copy_into(out: np.ndarray, x: np.ndarray) -> None:
    """``out[...] = x`` for two views of one shape and dtype."""
    order = sorted(range(out.ndim), key=lambda axis: -abs(out.strides[axis]))
    out, x = _merged(out.transpose(order), x.transpose(order))
    if out.ndim < 2 or x.strides[-1] == x.itemsize:
        out[...] = x
    elif out.shape[-1] < STRIP // 2:  # rope's halves: numpy's inner loop would be two elements long
        for i in range(out.shape[-1]):
            copy_into(out[..., i], x[..., i])
    else:
        for start in range(0, out.shape[-1], STRIP):
            strip = np.s_[..., start : start + STRIP]
            out[strip] = x[strip]


def _merged(out: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both views with neighbouring axes joined wherever both walk them as one."""
    shape: list[int] = []
    out_strides: list[int] = []
    x_strides: list[int] = []
    for length, a, b in zip(out.shape, out.strides, x.strides, strict=True):
        if length == 1:
            continue
        if shape and out_strides[-1] == a * length and x_strides[-1] == b * length:
            shape[-1] *= length
            out_strides[-1], x_strides[-1] = a, b
        else:
            shape.append(length)
            out_strides.append(a)
            x_strides.append(b)
    view = np.lib.stride_tricks.as_strided
    return view(out, shape, out_strides), view(x, shape, x_strides)
