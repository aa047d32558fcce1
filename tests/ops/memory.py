"""What a call allocates, seen from the operations that it runs."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Follows the memory of all results that are alive.

    `peak` is the most bytes at once, `largest` the elements of the largest result; what exists before is not
    counted.
    """

    def __init__(self):
        super().__init__()
        self.peak, self.largest = 0, 0
        self._alive = {}
        self._given = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                address = tensor.untyped_storage().data_ptr()
                if not any(address == other for other, _ in self._alive.values()):
                    self._given.add(address)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self._given:
                storage = tensor.untyped_storage()
                key = id(tensor), len(self._alive), self.peak
                self._alive[key] = storage.data_ptr(), storage.nbytes()
                weakref.finalize(tensor, self._alive.pop, key, None)
                self.largest = max(self.largest, tensor.numel())
        self.peak = max(self.peak, sum(dict(self._alive.values()).values()))
        return result
