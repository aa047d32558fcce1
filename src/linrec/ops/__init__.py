"""Operators, one per recurrence. Each is exact in every mode, and returns (y, state)."""

from linrec.ops.attention import AttentionCache as AttentionCache
from linrec.ops.attention import gate_loop_attention as gate_loop_attention
from linrec.ops.attention import laplace_attention as laplace_attention
from linrec.ops.attention import softmax_attention as softmax_attention
from linrec.ops.delta_rule import delta_rule as delta_rule
from linrec.ops.dense_ssm import dense_ssm as dense_ssm
from linrec.ops.diagonal_ssm import diagonal_ssm as diagonal_ssm
from linrec.ops.dplr_ssm import dplr_ssm as dplr_ssm
from linrec.ops.gate_loop import gate_loop as gate_loop
from linrec.ops.gate_loop import gate_loop_matrix as gate_loop_matrix
from linrec.ops.gate_loop import normalized_gate_loop as normalized_gate_loop
from linrec.ops.generalized_delta_rule import generalized_delta_rule as generalized_delta_rule
from linrec.ops.long_conv import cauchy_kernel as cauchy_kernel
from linrec.ops.long_conv import discretize_diagonal as discretize_diagonal
from linrec.ops.long_conv import long_conv as long_conv
from linrec.ops.long_conv import vandermonde_kernel as vandermonde_kernel
from linrec.ops.nonlinear_scan import Convergence as Convergence
from linrec.ops.nonlinear_scan import ConvergenceError as ConvergenceError
from linrec.ops.nonlinear_scan import nonlinear_scan as nonlinear_scan
from linrec.ops.scan import scan as scan
from linrec.ops.selective_scan import selective_scan as selective_scan
from linrec.ops.short_conv import short_conv as short_conv
