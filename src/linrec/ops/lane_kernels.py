"""How functions that walk a lane are compiled; imported at the first use, because importing Numba is slow."""

import functools

import numba
from numba.core.compiler import CompilerBase, DefaultPassBuilder


class _DistinctArrays(CompilerBase):
    """Numba's compiler, told that no array that a function writes overlaps another one of its arguments.

    Otherwise each loop over channels first asks that of every pair of arrays, and is not made of vector
    instructions where the loop around it runs backwards.
    """

    def define_pipelines(self):  # type: ignore[no-untyped-def]
        """Return Numba's own passes."""
        self.state.flags.noalias = True
        return [DefaultPassBuilder.define_nopython_pipeline(self.state)]


# fused multiply-add is allowed, reordering sums and ignoring NaN is not
lane_kernel = functools.partial(numba.njit, cache=True, fastmath={"contract"}, pipeline_class=_DistinctArrays)
