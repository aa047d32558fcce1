"""Triton kernels of what is done before, between and after the transforms of a convolution.

Imported at the first use, because importing Triton is slow.

Sequences (b, t, d) have channels next to each other, and transforms need time so: tiles of both are turned on
the way. Spectra (b, d, f) are complex, their parts next to each other.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(time, channels, T: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the row of a program, its steps (T, 1) and its channels (1, C)."""
    blocks = tl.cdiv(channels, C)
    block = tl.program_id(0) % blocks
    steps = tl.program_id(0) // blocks % tl.cdiv(time, T) * T + tl.arange(0, T)
    row = tl.program_id(0) // blocks // tl.cdiv(time, T)
    return row.to(tl.int64), steps[:, None].to(tl.int64), (block * C + tl.arange(0, C))[None].to(tl.int64)


@triton.jit
def pad(  # type: ignore[no-untyped-def]
    x_ptr,
    out_ptr,
    time,
    channels,
    size,
    row_stride,
    step_stride,
    channel_stride,
    SCALED: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """Turn x (b, t, d) of any strides into (b, d, size), with zeros after the end; SCALED divides by size."""
    row, step, channel = _tile(size, channels, T, C)
    place = row * row_stride + step * step_stride + channel * channel_stride
    x = tl.load(x_ptr + place, mask=(step < time) & (channel < channels), other=0.0)
    x = x.to(out_ptr.dtype.element_ty)
    if SCALED:
        x = x / size
    tl.store(out_ptr + (row * channels + channel) * size + step, x, mask=(step < size) & (channel < channels))


@triton.jit
def cut(  # type: ignore[no-untyped-def]
    x_ptr,
    out_ptr,
    time,
    channels,
    size,
    row_stride,
    step_stride,
    channel_stride,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """Turn the first steps of x (b, d, size) into out (b, t, d) of any strides."""
    row, step, channel = _tile(time, channels, T, C)
    mask = (step < time) & (channel < channels)
    x = tl.load(x_ptr + (row * channels + channel) * size + step, mask=mask)
    place = row * row_stride + step * step_stride + channel * channel_stride
    tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load(ptr, row, begin, frequencies, F: tl.constexpr):  # type: ignore[no-untyped-def]
    parts = 2 * begin + tl.arange(0, 2 * F)
    x = tl.load(ptr + 2 * row * frequencies + parts, mask=parts < 2 * frequencies, other=0.0)
    return tl.split(tl.reshape(x, [F, 2]))


@triton.jit
def _store(ptr, row, begin, frequencies, real, imaginary, F: tl.constexpr):  # type: ignore[no-untyped-def]
    parts = 2 * begin + tl.arange(0, 2 * F)
    x = tl.reshape(tl.join(real, imaginary), [2 * F])
    tl.store(ptr + 2 * row * frequencies + parts, x, mask=parts < 2 * frequencies)


@triton.jit
def multiply(x_ptr, k_ptr, channels, frequencies, F: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply x (b, d, f) by k (d, f), in place."""
    blocks = tl.cdiv(frequencies, F)
    row, begin = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * F
    x_r, x_i = _load(x_ptr, row, begin, frequencies, F)
    k_r, k_i = _load(k_ptr, row % channels, begin, frequencies, F)
    _store(x_ptr, row, begin, frequencies, x_r * k_r - x_i * k_i, x_r * k_i + x_i * k_r, F)


@triton.jit
def gradients(  # type: ignore[no-untyped-def]
    dy_ptr,
    u_ptr,
    k_ptr,
    dk_ptr,
    batch,
    channels,
    frequencies,
    size,
    NEEDS_U: tl.constexpr,
    NEEDS_K: tl.constexpr,
    F: tl.constexpr,
):
    """Multiply dy (b, d, f) by k^* (d, f), in place, and set dk to the sum of u^* dy over b, over size."""
    blocks = tl.cdiv(frequencies, F)
    channel, begin = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * F
    if NEEDS_U:
        k_r, k_i = _load(k_ptr, channel, begin, frequencies, F)
    if NEEDS_K:
        dk_r, dk_i = tl.zeros([F], dk_ptr.dtype.element_ty), tl.zeros([F], dk_ptr.dtype.element_ty)
    for b in range(batch):
        row = b * channels + channel
        dy_r, dy_i = _load(dy_ptr, row, begin, frequencies, F)
        if NEEDS_K:
            u_r, u_i = _load(u_ptr, row, begin, frequencies, F)
            dk_r += u_r * dy_r + u_i * dy_i
            dk_i += u_r * dy_i - u_i * dy_r
        if NEEDS_U:
            _store(dy_ptr, row, begin, frequencies, dy_r * k_r + dy_i * k_i, dy_i * k_r - dy_r * k_i, F)
    if NEEDS_K:
        _store(dk_ptr, channel, begin, frequencies, dk_r / size, dk_i / size, F)
