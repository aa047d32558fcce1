"""Operators: one per recurrence, each exact in every mode, each returning (y, state)."""

from linrec.ops.scan import scan as scan
