"""One sequence over several processes: time parallelism.

Imported by name, as `linrec.parallel`; it needs `torch.distributed`.
"""

from linrec.parallel.context import time_parallel
from linrec.parallel.ranks import part

__all__ = ["part", "time_parallel"]
