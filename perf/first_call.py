"""Prints the seconds of an operation's first forward and backward pass in this process.

python -m perf.first_call OPERATION DEVICE
"""

import sys
import time

import torch

from perf.operations import OPERATIONS, make, outputs_and_gradients
from perf.rows import Row
from perf.timing import wait


def first_call(row: Row, device: torch.device) -> float:
    """Return the seconds from the call to its gradients, compilation included; torch has started before."""
    inputs, dy = make(row, device)
    wait(device)
    start = time.perf_counter()
    outputs_and_gradients(OPERATIONS[row.operation].run, inputs, dy)
    wait(device)
    return time.perf_counter() - start


if __name__ == "__main__":
    operation, device_type = sys.argv[1:]
    print(first_call(Row(operation, (32, 1024, 512), "f32", (None, None)), torch.device(device_type)))
