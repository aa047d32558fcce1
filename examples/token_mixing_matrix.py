"""What a step takes from the steps before it: the token-mixing matrix of `gate_loop`, drawn.

    y_n = sum_{m<=n} W_nm v_m,    W_nm = Re(q_n k_m prod_{j=m+1..n} a_j)

With a fixed decay, W depends on n - m alone. With a decay that the data controls, one step can forget all.

    python examples/token_mixing_matrix.py [PICTURE.png]
"""

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

from linrec.ops import gate_loop, gate_loop_matrix

length = 60
ones = torch.ones(1, length, 1, 1)
v = torch.randn(1, length, 1, 1, generator=torch.Generator().manual_seed(0))

slow = torch.full((1, length, 1), 0.95).log()
forgetting = slow.clone()
forgetting[:, [20, 45]] = -torch.inf  # |a| = 0
turn = torch.full((1, length, 1), 2 * torch.pi / 12)

gates = {
    "|a| = 0.95 at every step": (slow, None),
    "|a| = 0 at steps 20 and 45": (forgetting, None),
    "the same, one turn in 12 steps": (forgetting, turn),
}

figure = Figure(figsize=(10, 3.9), layout="constrained")
for axes, (name, (log_decay, phase)) in zip(figure.subplots(1, 3), gates.items(), strict=True):
    matrix = gate_loop_matrix(ones, ones, log_decay, phase)[0, 0]
    y, _ = gate_loop(ones, ones, v, log_decay, phase)
    torch.testing.assert_close(matrix @ v[0, :, 0], y[0, :, 0], rtol=1e-4, atol=1e-4)
    earliest = matrix[-1].nonzero()[0].item()
    print(f"{name}: W v is the output, and the last step hears back to step {earliest}")
    image = axes.imshow(matrix, cmap="RdBu", vmin=-1, vmax=1)
    axes.set(title=name, xlabel="from step m")
    axes.label_outer()
figure.axes[0].set_ylabel("to step n")
figure.colorbar(image, ax=figure.axes, shrink=0.8, label="W")

path = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/token_mixing_matrix.png")
path.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(path, dpi=120)
print(f"wrote {path}")
