"""Code shared by all operators: the table of backends, the call, kernels, checks, precision."""
