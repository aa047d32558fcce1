"""Kernels of recurrences with a matrix per head."""
