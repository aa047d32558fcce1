"""What all operators share, written once: the table of backends, the call, kernels, checks, precision."""
