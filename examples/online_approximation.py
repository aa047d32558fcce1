"""The past of a signal in 64 numbers, updated at every step, and the signal read back from them: HiPPO.

    x' = A x + B u,    u(t - s) is near sum_n x_n(t) F_n(s)

LegS keeps all of the past, the longer the more coarsely; LegT and FouT keep a window; LagT fades.

    python examples/online_approximation.py [PICTURE.png]
"""

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

from linrec.hippo import OnlineApproximation

length, window, N = 2000, 500, 64
generator = torch.Generator().manual_seed(0)

# noise without its fast waves
spectrum = torch.fft.rfft(torch.randn(length, dtype=torch.float64, generator=generator))
u = torch.fft.irfft(spectrum * torch.exp(-torch.arange(len(spectrum)) / 12), n=length)
u = u / u.std()

measures = {
    "LegS, all of the past": ("legs", None, length),
    f"LegT, the last {window} steps": ("legt", window, window),
    f"FouT, the last {window} steps": ("fout", window, window),
    "LagT, a past that fades": ("lagt", window / 20, length),
}

figure = Figure(figsize=(10, 5), layout="constrained")
for axes, (name, (measure, scale, back)) in zip(
    figure.subplots(2, 2, sharex=True, sharey=True).flat, measures.items(), strict=True
):
    approximation = OnlineApproximation(measure, N, window=scale)
    # the signal arrives in two pieces; between them, only the state is kept
    _, past = approximation(u[None, :700, None])
    _, past = approximation(u[None, 700:, None], past)

    ages = torch.arange(back) + 0.5
    read = approximation.reconstruct(past, ages)[0, :, 0].flip(0)
    error = (read - u[-back:])[-window:].square().mean().sqrt()
    print(f"{name}: error {error:.3f} over the last {window} steps, from {past.x.numel()} numbers")

    steps = torch.arange(length)
    axes.plot(steps, u, color="0.75", linewidth=3, label="signal")
    axes.plot(steps[-back:], read, color="C3", linewidth=1.2, label="read from the state")
    axes.set(title=name, ylim=(-3.2, 3.2))
    axes.label_outer()
for axes in figure.axes[2:]:
    axes.set_xlabel("step")
figure.axes[0].legend(loc="upper left", ncols=2, frameon=False)

path = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/online_approximation.png")
path.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(path, dpi=120)
print(f"wrote {path}")
