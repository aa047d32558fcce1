"""Kernels of the selective scan."""
