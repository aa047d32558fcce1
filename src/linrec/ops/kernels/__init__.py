"""Triton and Numba kernels, grouped by kind, so that similar kernels are in the same place.

| folder | recurrence | operators |
|---|---|---|
| `elementwise` | one number per channel | `scan`, and `gate_loop` with heads of one channel |
| `matrix` | a matrix per head | `gate_loop`, `delta_rule` |
| `selective` | a few states per channel | `selective_scan` |
| `fft` | fused work between two FFTs, and sums that generate filters | `long_conv`, state-space kernels |
| `nonlinear` | a matrix of recurrent weights per head, and gates of the state | `linrec.nn.slstm_steps` |
| `products` | matrix products with few rows | `linrec.nn.row_linear` |

Modules with kernels are imported at their first use, because importing Triton and Numba is slow.
"""
