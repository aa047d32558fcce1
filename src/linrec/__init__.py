"""Linear recurrent sequence models on one idea: S_t = diag(a_t) S_{t-1} + k_t^T v_t, y_t = Re(q_t S_t)."""

__version__ = "0.1.0"
