"""Kernels of loops over time with a nonlinear recurrence and a matrix of recurrent weights per head."""
