"""Sound: wav files, mel-frequency cepstral coefficients, and samples of 8 bits by the mu-law."""

import math
import wave
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, Int16, UInt8
from torch import Tensor

from linrec.text import DataError

__all__ = ["from_mu_law", "mfcc", "mu_law", "read_wav", "write_wav"]

WINDOW, HOP = 200, 100
"""Samples of a window, and between windows."""
N_MELS, N_MFCC = 64, 20
SMALL = 1e-6
MU = 255


def mfcc(samples: Float[Tensor, "n t"], *, rate: int) -> Float[Tensor, "n s k"]:
    """Return the first 20 mel-frequency cepstral coefficients of windows of 200 samples, 100 samples apart.

        P_sf = |sum_i w_i x_{100 s + i - 100} exp(-2 pi i f i / 200)|^2      w_i = (1 - cos(2 pi i / 200)) / 2
        M_sm = log(sum_f F_fm P_sf + 0.000001)
        c_sk = sqrt((1 + [k > 0]) / 64) sum_m M_sm cos(pi (m + 1/2) k / 64)

    x is reflected at both ends. F has 64 triangles, whose corners are equally spaced from 0 to half the rate
    on the scale mel(h) = 2595 log10(1 + h / 700). A triangle may be narrower than the distance of two
    frequencies; then its M is constant.

    Args:
        samples: x, in [-1, 1], at least 101 of them.
        rate: samples per second.

    Returns:
        c, shape (n, 1 + t // 100, 20).

    Source: Davis and Mermelstein (1980) for the coefficients; the released code of Neural CDE (Kidger and
    others, 2020) for all numbers, with the formulas of torchaudio's MFCC with `log_mels`.

    Example:
        >>> mfcc(torch.zeros(2, 16000), rate=16000).shape
        torch.Size([2, 161, 20])
    """
    x = torch.nn.functional.pad(samples[:, None], (HOP, HOP), mode="reflect")[:, 0]
    window = torch.hann_window(WINDOW, dtype=x.dtype, device=x.device)
    power = torch.fft.rfft(x.unfold(1, WINDOW, HOP) * window).abs().square()
    mels = (power @ _triangles(rate).to(power) + SMALL).log()
    return mels @ _cosines().to(mels)


def mu_law(samples: Float[Tensor, "*n"]) -> UInt8[Tensor, "*n"]:
    """Return samples with 8 bits, on a scale that is finer near 0.

        m = floor((sign(x) log(1 + 255 |x|) / log(256) + 1) / 2 * 255 + 1/2)

    Args:
        samples: x, in [-1, 1].

    Source: WaveNet (van den Oord and others, 2016, arXiv:1609.03499), section 2.2, after G.711.

    Example:
        >>> mu_law(torch.tensor([-1.0, 0.0, 0.01, 1.0]))
        tensor([  0, 128, 157, 255], dtype=torch.uint8)
    """
    scaled = samples.sign() * (MU * samples.abs()).log1p() / math.log1p(MU)
    return ((scaled + 1) / 2 * MU + 0.5).floor().to(torch.uint8)


def from_mu_law(values: Int[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return samples from 8 bits by the mu-law.

        x = sign(u) (256^|u| - 1) / 255      u = 2 m / 255 - 1

    Args:
        values: m, from 0 to 255, of any integer dtype.

    Example:
        >>> from_mu_law(mu_law(torch.tensor([-1.0, 0.01, 1.0])))
        tensor([-1.0000,  0.0102,  1.0000])
    """
    # integers of 8 bits would overflow
    u = 2 * values.float() / MU - 1
    return u.sign() * (u.abs() * math.log1p(MU)).expm1() / MU


def read_wav(path: Path) -> tuple[Int16[np.ndarray, "t channels"], int]:
    """Return the samples of a wav file of 16 bits, and its rate in Hz.

    Raises:
        DataError: the file cannot be read, is truncated, or has another number of bits.
    """
    try:
        with wave.open(str(path), "rb") as file:
            n_channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            n_bytes = file.getnframes() * n_channels * width
            content = file.readframes(file.getnframes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (EOFError, wave.Error) as error:
        why = str(error) or "it ends too soon"
        raise DataError(f"{path} is not a wav file, or it is damaged: {why}. Unpack it again.") from error
    if width != 2:
        raise DataError(f"{path} must have samples of 16 bits; it has {8 * width} bits. Convert it.")
    if len(content) != n_bytes:
        raise DataError(
            f"{path} must have {n_bytes} bytes of samples; it has {len(content)}. It is truncated: unpack it "
            "again."
        )
    return np.frombuffer(content, dtype="<i2").reshape(-1, n_channels), rate


def write_wav(path: Path, samples: Float[Tensor, "t"], *, rate: int) -> None:
    """Write samples in [-1, 1] as a wav file of one channel and 16 bits."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        numbers = (samples * (2**15 - 1)).round().to(torch.int16)
        file.writeframes(numbers.cpu().numpy().astype("<i2").tobytes())


def _triangles(rate: int) -> Float[Tensor, "f m"]:
    """Return F, the weight of each frequency in each band, float64."""
    frequencies = torch.linspace(0, rate / 2, WINDOW // 2 + 1, dtype=torch.float64)
    highest = 2595 * math.log10(1 + rate / 2 / 700)
    corners = 700 * (10 ** (torch.linspace(0, highest, N_MELS + 2, dtype=torch.float64) / 2595) - 1)
    widths = corners.diff()
    rising = (frequencies[:, None] - corners[:-2]) / widths[:-1]
    falling = (corners[2:] - frequencies[:, None]) / widths[1:]
    return torch.minimum(rising, falling).clamp(min=0)


def _cosines() -> Float[Tensor, "m k"]:
    """Return the matrix of the orthonormal cosine transform, float64."""
    m, k = torch.arange(N_MELS, dtype=torch.float64)[:, None], torch.arange(N_MFCC, dtype=torch.float64)
    return (torch.pi * (m + 0.5) * k / N_MELS).cos() * ((1 + (k > 0).double()) / N_MELS).sqrt()
