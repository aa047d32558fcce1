"""Code that all operators share: the table of backends, the call, kernels, checks, precision."""
