"""Modal form of filters: poles and residues whose impulse response matches a given kernel."""

import math

import torch
from jaxtyping import Complex, Float
from torch import Tensor
from torch.nn import functional

__all__ = ["exact_modes", "fit_modes", "hankel_singular_values"]

# oversampling beyond the order, and number of subspace iterations, to find dominant singular subspaces
SPARE, ROUNDS = 32, 6
# singular values below this, relative to the largest, are too small to resolve residues
RESOLVED = 1e-7


def hankel_singular_values(kernel: Float[Tensor, "d length"], count: int) -> Float[Tensor, "d count"]:
    """Return the largest singular values of H_ij = K_{1+i+j}, which show how many modes a kernel needs.

    The kernel is zero after its last tap. In the spectral norm of H, the error of a system of order n is at
    least singular value n + 1 (the theorem of Adamyan, Arov and Krein). A conjugate pair is one mode, but has
    order 2.

    Args:
        kernel: K (d, length), the tap of the current step first; this tap needs no mode.
        count: number of values; values beyond the size of H are zero.

    Returns:
        The values, largest first, in float64 on the CPU.

    Raises:
        ValueError: `count` is below 1, or the kernel has no taps or non-finite taps.

    Source:
        Laughing Hyena Distillery (Massaroli and others, 2023), its section on the choice of the order.

    Example:
        Two real poles:

        >>> import torch
        >>> t = torch.arange(300.0)
        >>> values = hankel_singular_values((0.9**t + 0.5**t)[None], 4)
        >>> (values > 1e-6 * values[:, :1]).sum().item()
        2
    """
    if count < 1:
        raise ValueError(f"`count` must be at least 1; got {count}.")
    found = torch.zeros(len(kernel), count, dtype=torch.float64)
    for row, taps in zip(found, _taps(kernel), strict=True):
        values = _principal(taps[1:], count)[0][:count].abs()
        row[: len(values)] = values
    return found


def fit_modes(
    kernel: Float[Tensor, "d length"], modes: int
) -> tuple[Complex[Tensor, "d n"], Complex[Tensor, "d n"], Float[Tensor, "d"]]:
    """Fit Re(sum_n R_n a_n^l), l > 0, to the taps K_l of every channel, and to zero after the last tap.

    The poles are the eigenvalues of the shift operator on the dominant singular vectors of the Hankel matrix
    H_ij = K_{1+i+j} (Kung's method). They are stable, since the filter is finite. The residues are then the
    least-squares solution over the taps and equally many zeros. A mode is a conjugate pair or one real pole.
    The fit with the least squared error is chosen among all orders that need at most `modes` modes, so more
    modes never give a worse fit. Everything is in float64, and products with H use the FFT, so long kernels
    can be fitted too.

    A smooth kernel needs few modes. A kernel with jumps or with isolated large taps needs about half as many
    modes as it has taps; use `exact_modes` for it. With that many modes the fitted poles cluster at zero and
    sums of modes lose precision, so the fit uses fewer.

    Args:
        kernel: K (d, length), the tap of the current step first.
        modes: n, at least 1.

    Returns:
        a (d, n) and R (d, n) in complex128, and D (d,) in float64 with K_0 = Re(sum_n R_n) + D, on the CPU.
        Unused modes of a channel are zero.

    Raises:
        ValueError: `modes` is below 1, or the kernel has no taps or non-finite taps.

    Source:
        S. Kung, A New Identification and Model Reduction Algorithm via Singular Value Decompositions (1978),
        instead of the gradient descent of Laughing Hyena Distillery (Massaroli and others, 2023).

    Example:
        >>> import torch
        >>> t = torch.arange(300.0)
        >>> a, R, D = fit_modes((3 * 0.9**t * torch.cos(t))[None], 1)
        >>> f"{a.abs().item():.4f} {a.angle().item():.4f} {R.real.item():.4f}"
        '0.9000 1.0000 3.0000'
    """
    if modes < 1:
        raise ValueError(f"`modes` must be at least 1; got {modes}.")
    taps = _taps(kernel)
    poles, residues = torch.zeros(2, len(kernel), modes, dtype=torch.complex128)
    for row, of_channel in enumerate(taps[:, 1:]):
        a = _best(of_channel, modes)
        poles[row, : len(a)] = a
        residues[row, : len(a)] = _residues(of_channel, a)
    return poles, residues, taps[:, 0] - residues.real.sum(1)


def exact_modes(
    kernel: Float[Tensor, "d length"], radius: float
) -> tuple[Complex[Tensor, "d n"], Complex[Tensor, "d n"], Float[Tensor, "d"]]:
    """Convert K_l = Re(sum_n R_n a_n^l) exactly, with as many real numbers in the state as there are taps.

    The poles are the roots of unity of order `length` + 1, without the root 1, times the radius. The residues
    are a discrete Fourier transform of K_l / radius^l. The recurrence does not stop after the last tap: it
    continues with minus the sum of the taps, then repeats the kernel, damped by the radius at each step.

    Args:
        kernel: K (d, length), the tap of the current step first.
        radius: radius of the poles, above 0 and at most 1: the base of the kernel's exponential decay, if
            it has one. Rounding errors grow with radius^(-length).

    Returns:
        a (d, n) and R (d, n) in complex128 with n = ceil(length / 2), where each conjugate pair is one entry,
        and D (d,), zeros, on the CPU.

    Raises:
        ValueError: `radius` is out of range, or the kernel has no taps or non-finite taps.

    Source:
        Accelerating Toeplitz Neural Network with Constant-time Inference Complexity (Qin and Zhong, 2023),
        its exact Toeplitz-to-SSM conversion, ETSC.

    Example:
        >>> import torch
        >>> a, R, D = exact_modes(torch.tensor([[3.0, 1.0, 2.0]]), 0.9)
        >>> (R * a**2).sum().real.item()
        2.0...
    """
    if not 0 < radius <= 1:
        raise ValueError(f"`radius` must be above 0 and at most 1; got {radius}.")
    taps = _taps(kernel)
    length = taps.shape[1]
    taps = taps / radius ** torch.arange(length, dtype=torch.float64)
    spectrum = torch.fft.rfft(torch.cat([taps, -taps.sum(1, keepdim=True)], 1)) / (length + 1)
    n = torch.arange(1, spectrum.shape[1])
    # the middle root, -1, is real and counts once
    pairs = torch.where(2 * n == length + 1, 1.0, 2.0).double()
    angle = 2 * math.pi * n.double() / (length + 1)
    poles = torch.polar(torch.full_like(angle, radius), angle)
    return poles.expand(len(taps), -1).clone(), pairs * spectrum[:, 1:], taps.new_zeros(len(taps))


def _taps(kernel: Tensor) -> Tensor:
    if kernel.ndim != 2 or kernel.shape[1] < 1:
        raise ValueError(
            f"`kernel` must have shape (d, length) with at least 1 tap; got {tuple(kernel.shape)}. "
            "Add a channel axis to a single filter: `kernel[None]`."
        )
    taps = kernel.detach().double().cpu()
    if wrong := int((~taps.isfinite()).sum()):
        raise ValueError(
            f"`kernel` must be finite; got {wrong} non-finite taps of {taps.numel()}. "
            "No recurrence can represent them: find out where they come from."
        )
    return taps


def _principal(taps: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return eigenvalues of H_ij = K_{i+j}, largest magnitude first, and eigenvectors (rows, k)."""
    rows = len(taps)
    if rows == 0:
        return taps, taps[:, None]
    spectrum = torch.fft.rfft(taps, n=2 * rows)

    def product(vectors: Tensor) -> Tensor:
        # (H v)_i = sum_j K_{i+j} v_j is a slice of the convolution with v reversed
        turned = torch.fft.rfft(vectors.flip(0), n=2 * rows, dim=0)
        return torch.fft.irfft(spectrum[:, None] * turned, n=2 * rows, dim=0)[rows - 1 : 2 * rows - 1]

    # subspace iteration: it needs only products with H
    generator = torch.Generator().manual_seed(0)
    width = 1 << (count + SPARE - 1).bit_length()
    basis = torch.randn(rows, min(rows, width), dtype=taps.dtype, generator=generator)
    for _ in range(ROUNDS):
        basis = torch.linalg.qr(product(basis))[0]
    values, vectors = torch.linalg.eigh(basis.mT @ product(basis))
    order = values.abs().argsort(descending=True)
    return values[order], basis @ vectors[:, order]


def _best(taps: Tensor, modes: int) -> Tensor:
    """Return at most `modes` poles whose fit to the taps K_1, K_2, .. has the least squared error."""
    values, vectors = _principal(taps, 2 * modes)
    sizes, shifted = values.abs(), vectors[:-1].mT @ vectors[1:]
    resolved = int((sizes > RESOLVED**2 * sizes.sum()).sum())
    best, least = taps.new_zeros(0, dtype=torch.complex128), taps.norm()
    for order in range(min(2 * modes, resolved, len(taps) - 1), 0, -1):
        # the largest omitted singular value is a lower bound on the error of this and all smaller orders
        if order < len(sizes) and sizes[order] > math.sqrt(2 * len(taps)) * least:
            break
        poles = _poles(shifted[:order, :order], vectors[-1, :order])
        if len(poles) <= modes and (error := _error(taps, poles)) < least:
            best, least = poles, error
    return best


def _poles(shifted: Tensor, end: Tensor) -> Tensor:
    """Return the eigenvalues of V_1^+ V_2; of each conjugate pair, only the one above the real axis.

    V_1 is a matrix of orthonormal columns without its last row, and V_2 without its first row. `shifted` is
    V_1^T V_2 and `end` is the last row, so V_1^T V_1 = I - end end^T.
    """
    shift = shifted + end[:, None] * (end @ shifted) / (1 - end @ end)
    poles = torch.linalg.eigvals(shift)
    return poles[poles.imag >= 0]


def _error(taps: Tensor, poles: Tensor) -> Tensor:
    """Return the residual norm of `_residues` in closed form, accurate to `RESOLVED` times the taps' norm."""
    steps = 2 * len(taps) + 1

    def sums(x: Tensor) -> Tensor:
        return x * (1 - x**steps) / (1 - x)

    scale = sums(poles.abs().square()).sqrt()
    outer = sums(poles[:, None] * poles.conj()) / (scale[:, None] * scale)
    inner = sums(poles[:, None] * poles) / (scale[:, None] * scale)
    crossed = (outer.imag - inner.imag) / 2
    real, imaginary = (outer.real + inner.real) / 2, (outer.real - inner.real) / 2
    gram = torch.cat([torch.cat([real, crossed], 1), torch.cat([crossed.mT, imaginary], 1)])
    powers = torch.ones(1, len(poles), dtype=poles.dtype)
    factor = poles
    while len(powers) <= len(taps):
        powers, factor = torch.cat([powers, powers * factor]), factor * factor
    products = (taps.to(poles) @ powers[1 : len(taps) + 1]) / scale
    sizes, vectors = torch.linalg.eigh(gram)
    explained = (torch.cat([products.real, -products.imag]) @ vectors).square() / sizes
    left = taps.square().sum() - explained[sizes > RESOLVED**2 * sizes[-1]].sum()
    return left.clamp(min=RESOLVED**2 * taps.square().sum()).sqrt()


def _residues(taps: Tensor, poles: Tensor) -> Tensor:
    """Return R of the least squared error of Re(sum_n R_n a_n^l), over the taps and equally many zeros."""
    steps = torch.arange(1, 2 * len(taps) + 2)
    powers = poles ** steps[:, None]
    # normalise columns; otherwise the solver would drop modes that decay at once
    scale = powers.abs().square().sum(0).sqrt()
    columns = powers / scale
    matrix = torch.cat([columns.real, -columns.imag], 1)
    target = functional.pad(taps, (0, len(taps) + 1))[:, None]
    solution = torch.linalg.lstsq(matrix, target, rcond=RESOLVED, driver="gelsd").solution[:, 0]
    return torch.complex(*solution.chunk(2)) / scale
