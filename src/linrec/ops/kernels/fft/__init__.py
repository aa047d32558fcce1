"""Kernels for long convolutions: fused work between FFTs, and generation of filters."""
