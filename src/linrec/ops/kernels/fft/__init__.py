"""Kernels of long convolutions, between two transforms and of their taps."""
