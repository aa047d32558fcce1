"""One file per command of `python -m perf`."""
