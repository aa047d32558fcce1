"""Kernels of long convolutions and of the sums that make their taps."""
