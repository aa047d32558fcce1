"""Kernels of recurrences with one number per channel."""
