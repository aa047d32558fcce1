"""Time parallelism: each process runs a segment of the same sequence.

Import it by name, as `linrec.parallel`; it needs `torch.distributed`.
"""

from linrec.parallel.context import time_parallel
from linrec.parallel.ranks import part

__all__ = ["part", "time_parallel"]
