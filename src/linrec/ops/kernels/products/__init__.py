"""Kernels of matrix products with few rows."""
