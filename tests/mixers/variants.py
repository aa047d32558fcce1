"""Arguments under which the laws are checked, by mixer; a mixer that is not listed runs with its defaults."""

from collections.abc import Iterable
from typing import Any

import pytest

from linrec import mixers
from linrec.nn.segment_mixer import SegmentMixer
from tests import tiers

DEFAULTS: dict[str, dict[str, Any]] = {"defaults": {}}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "aft": {
        "simple": {},
        "bare": {"bias": False, "output_projection": False},
        # shorter than some sequences of the laws, and more than two pairs of steps of others
        "full": {"variant": "full", "max_length": 40, "rank": 3},
        "local": {"variant": "local", "max_length": 40, "rank": 3, "window": 5},
        "conv": {"variant": "conv", "n_heads": 2, "window": 5},
    },
    "attention": {
        "defaults": {},
        "window": {"n_heads": 2, "kv_heads": 1, "window": 4},
        "grouped": {"n_heads": 4, "d_head": 4, "kv_heads": 2, "rotary_fraction": 0.5},
        "heads": {"n_heads": 3, "d_head": 2, "bias": True, "rotary_base": 100.0},
        "no positions": {"n_heads": 2, "positions": "none"},
        "ALiBi": {"n_heads": 4, "kv_heads": 2, "positions": "alibi"},
        "ALiBi in a window": {"n_heads": 3, "d_head": 2, "positions": "alibi", "window": 4},
        "xPos": {"n_heads": 4, "d_head": 4, "kv_heads": 2, "positions": "xpos"},
        "Qwen3-Next": {
            "n_heads": 2,
            "d_head": 4,
            "rotary_fraction": 0.5,
            "qk_norm": "head",
            "output_gate": True,
        },
        "OLMo 2": {"n_heads": 2, "d_head": 4, "kv_heads": 1, "qk_norm": "all"},
        "sinks": {"n_heads": 2, "cache_size": 4, "sinks": 2},
        "TOVA": {"n_heads": 4, "d_head": 4, "kv_heads": 2, "cache_size": 4, "eviction": "tova"},
        "H2O": {"n_heads": 4, "d_head": 4, "kv_heads": 2, "cache_size": 4, "eviction": "h2o"},
        "encoder": {"n_heads": 2, "positions": "alibi", "causal": False},
    },
    "delta_net": {
        "paper": {},
        "negative eigenvalues": {"n_heads": 2, "d_qk": 6, "d_v": 10, "beta": "double_sigmoid"},
        "sum normalisation": {"feature_map": "dpfp", "qk_norm": "l1", "output_norm": "none"},
        "Schlag and others": {
            "n_heads": 2,
            "feature_map": "dpfp",
            "nu": 2,
            "qk_norm": "l1",
            "conv_size": None,
            "value_activation": "none",
            "output_norm": "none",
        },
        "no strength": {"beta": "one", "feature_map": "identity", "output_gate": True},
        "no convolution": {"n_heads": 2, "conv_size": None},
    },
    "delta_delta_net": {
        "paper": {"n_heads": 2},
        "base weights": {"d_qk": 2, "d_v": 6, "base_weights": True, "qk_eps": 1e-5, "feature_map": "softmax"},
    },
    "delta_lstm": {
        "paper": {"n_heads": 2},
        "version 3": {"n_heads": 2, "d_qk": 6, "d_v": 2, "version": 3},
        "version 2": {"version": 2, "d_v": 6, "feature_map": "softmax"},
        "version 1": {"n_heads": 2, "version": 1},
    },
    "block_recurrent": {
        "fixed, skip": {"n_heads": 2, "segment_length": 4, "n_states": 3},
        "lstm, dual": {
            "n_heads": 2,
            "kv_heads": 1,
            "d_head": 3,
            "segment_length": 3,
            "n_states": 2,
            "gate": "lstm",
            "configuration": "dual",
            "sliding": False,
            "write_from": "block",
            "positions": "none",
            "qk_norm": "none",
            "detach": 2,
        },
        "full, single": {
            "segment_length": 2,
            "n_states": 1,
            "gate": "full",
            "configuration": "single",
            "d_hidden": 5,
            "state_norm": "layer",
            "detach": "segment",
        },
    },
    "block_state": {
        "multi-filter": {"n_heads": 2, "segment_length": 4, "n_states": 3},
        "multi-head": {"n_heads": 2, "segment_length": 3, "integration": "multi_head", "sliding": True},
        "single head": {
            "n_heads": 2,
            "d_head": 3,
            "segment_length": 4,
            "integration": "single_head",
            "positions": "none",
            "context_norm": "none",
        },
        "heads before the block": {
            "n_heads": 2,
            "segment_length": 3,
            "integration": "multi_head",
            "n_states": 2,
            "context_norm": "layer",
        },
        "filters of another model": {
            "segment_length": 2,
            "n_states": 2,
            "ssm": "rg_lru",
            "sliding": True,
        },
    },
    "comba": {
        "paper": {"n_heads": 2},
        "released": {"n_heads": 2, "variant": "released", "conv_size": None, "correction": 0.02},
        "plain": {"inner_decay": False, "correction": None, "output_gate": False},
    },
    "compressive_transformer": {
        "paper": {"n_heads": 2, "segment_length": 4, "compression_rate": 2, "init_std": 0.3},
        "mean": {
            "segment_length": 6,
            "memory_length": 2,
            "compressed_length": 3,
            "compression_rate": 3,
            "compression": "mean",
            "detach": "never",
            "init_std": 0.5,
        },
        "max of two segments": {
            "segment_length": 2,
            "memory_length": 3,
            "compression_rate": 1,
            "compression": "max",
            "detach": 2,
            "init_std": 0.3,
        },
        "loss of two segments": {
            "segment_length": 3,
            "memory_length": 5,
            "compression_rate": 3,
            "loss_weight": 0.5,
            "detach": 2,
            "init_std": 0.3,
        },
        "most used": {
            "n_heads": 2,
            "segment_length": 4,
            "memory_length": 5,
            "compression_rate": 2,
            "compression": "most_used",
            "detach": "never",
            "init_std": 0.5,
        },
        "dilated": {
            "segment_length": 4,
            "compression_rate": 2,
            "compression": "dilated",
            "detach": "never",
            "init_std": 0.3,
        },
    },
    "decaying_fast_weights": {
        "paper": {},
        "features": {"n_heads": 2, "feature_map": "dpfp", "gate_bias_init": 4.0, "bias": False},
        "keys alone": {"n_heads": 2, "decay": "key"},
        "sum": {"decay": "none", "feature_map": "elu"},
    },
    "dlr": {
        "paper": {"d_state": 5},
        "products": {"d_state": 3, "kernel": "prod", "angles": "normal"},
    },
    "dss": {
        "softmax": {"d_state": 3, "length": 50},
        "exp": {"d_state": 4, "kernel": "exp", "init": "lin"},
        "no scale": {"d_state": 3, "kernel": "exp_no_scale", "separate_steps": True},
    },
    # larger weights than the paper's, whose outputs would be near zero
    "flash_gau": {
        "paper": {"chunk_size": 4, "d_qk": 6, "init_std": 0.5},
        "chunks apart": {
            "chunk_size": 7,
            "d_qk": 4,
            "linear": False,
            "activation": "softmax",
            "position_bias": "rotary",
            "init_std": 0.5,
        },
        "linear alone": {"chunk_size": 3, "quadratic": False, "positions": "none", "init_std": 0.5},
    },
    "forgetting_transformer": {
        "paper": {"n_heads": 2},
        "norms and gate": {"n_heads": 2, "qk_norm": True, "output_gate": True, "bias": True},
    },
    "gate_loop": {
        "paper": {},
        "heads": {"n_heads": 2, "phase_activation": "tanh", "bias": False},
        "fixed": {"transition": "fixed"},
        "real": {"phase_activation": "none", "magnitude_activation": "stable_exp"},
        "uneven": {"n_heads": 2, "d_qk": 6, "d_v": 4, "output_projection": True, "transition": "fixed"},
        "tuned": {
            "magnitude_init": (0.5, 0.999),
            "phase_init": 0.3,
            "transition_weight_scale": 0.1,
            "scale_query_init": True,
            "gate_bias_init": 1.0,
            "output_norm": "rms",
            "output_gate": True,
            "output_projection": True,
        },
    },
    "gate_loop_attention": {
        "paper": {},
        "heads": {"n_heads": 2, "d_v": 4, "output_projection": True, "transition": "fixed", "scale": 0.5},
        "real": {"phase_activation": "none", "magnitude_activation": "stable_exp"},
    },
    "falcon_h1": {
        "paper": {"attention": {"n_heads": 2}, "mamba2": {"d_state": 5}},
        "released": {
            "attention": {"n_heads": 4, "kv_heads": 2, "d_head": 2, "rotary_base": 1e11},
            "mamba2": {"d_inner": 6, "n_heads": 3, "d_state": 4, "output_norm": "none"},
        },
        "window": {"attention": {"kv_heads": 1, "window": 4}, "mamba2": {"d_state": 3, "conv_size": None}},
    },
    "gilr": {
        "paper": {},
        "refined": {"impulse": "relu", "output_projection": True, "refine": True, "uniform_init": True},
        "released": {"impulse": "elu", "init": "released"},
    },
    "gla": {
        "paper": {},
        "heads": {"n_heads": 2, "d_qk": 6, "d_v": 2, "gate_rank": 3, "tau": 4.0, "output_norm": "rms"},
        "decay per head": {"n_heads": 2, "forget_gate": "head", "output_gate": False},
        "bounded decay": {"n_heads": 2, "clamp_min": -0.04},
        "constant decay": {"n_heads": 2, "forget_gate": "fixed"},
        "linear attention": {"forget_gate": "none", "output_norm": "none"},
        "grouped": {
            "n_heads": 4,
            "kv_heads": 2,
            "d_qk": 8,
            "feature_map": "elu",
            "conv_size": 3,
            "conv_bias": True,
            "output_norm": "rms",
            "norm_eps": 1e-3,
        },
    },
    "gated_delta_net_2": {
        "paper": {"n_heads": 2},
        "fewer keys": {"n_heads": 2, "qk_heads": 1, "erase": "double_sigmoid", "conv_size": None},
    },
    "gated_delta_product": {
        "paper": {},
        "three steps": {"n_heads": 2, "d_qk": 6, "d_v": 4, "n_householder": 3, "conv_bias": True},
        "no decay": {"n_heads": 2, "decay": "none", "conv_size": None, "output_gate": False},
        "single step": {"n_householder": 1, "beta": "sigmoid", "qk_eps": 1e-6},
    },
    "linformer": {
        "paper": {"n_heads": 2, "rank": 3, "max_length": 40},
        "no sharing": {"n_heads": 2, "rank": 2, "max_length": 40, "sharing": "none", "bias": True},
        "key-value": {"rank": 3, "max_length": 2000, "sharing": "key_value"},
    },
    "lightning_attention": {
        "paper": {"n_heads": 2},
        "head size": {"n_heads": 2, "d_head": 3, "output_gate": False},
    },
    "lfm2": {"paper": {}, "biases": {"conv_size": 4, "bias": True}, "single tap": {"conv_size": 1}},
    "infini_attention": {
        "linear": {"n_heads": 2, "segment_length": 4},
        "delta": {"n_heads": 2, "d_head": 4, "segment_length": 3, "update": "delta", "gate_empty": False},
        "detached": {"segment_length": 5, "positions": "none", "gate_init": 1.0, "detach": "segment"},
        "delta of two segments": {"segment_length": 2, "update": "delta", "gate_init": 2.0, "detach": 2},
    },
    "kda": {
        "paper": {},
        "grouped": {"n_heads": 2, "qk_heads": 1, "d_qk": 6, "d_v": 12, "conv_bias": True, "gate_bias": False},
        "bounded": {"n_heads": 2, "d_v": 12, "decay": "bounded", "lower_bound": -3.0, "rank": 2},
        "negative eigenvalues": {"d_v": 12, "beta": "double_sigmoid", "output_gate": False},
        "no convolution": {"n_heads": 2, "conv_size": None},
    },
    "gated_delta_net": {
        "paper": {},
        "grouped": {"n_heads": 4, "qk_heads": 2, "d_qk": 6, "d_v": 8, "beta_bias": True, "conv_bias": True},
        "softmax": {"n_heads": 2, "feature_map": "softmax", "qk_norm": "none"},
        "Longhorn": {"n_heads": 2, "feature_map": "identity", "qk_norm": "longhorn"},
        "no convolution": {"d_qk": 4, "conv_size": None},
        "negative eigenvalues": {"n_heads": 2, "d_qk": 6, "beta": "double_sigmoid", "output_gate": False},
        "no decay": {"decay": "none", "feature_map": "elu", "d_qk": 4, "d_v": 4},
        "features": {"feature_map": "relu", "qk_norm": "l1", "output_norm": "none"},
    },
    # shorter than the longest sequences of the laws
    "gmlp": {
        "paper": {"d_inner": 6, "max_length": 40},
        "aMLP": {"d_inner": 6, "max_length": 40, "d_attention": 3},
        "no bias": {"d_inner": 4, "max_length": 2000, "spatial_bias": False},
        "encoder": {"d_inner": 6, "max_length": 40, "d_attention": 3, "causal": False},
    },
    "gru_d": {
        "paper": {},
        "missing values": {"missing": True},
        "released": {"missing": True, "keep_decayed": False},
    },
    "gss": {
        "paper": {"d_ssm": 3, "d_state": 5},
        "bare": {"d_inner": 6, "d_ssm": 2, "d_state": 3, "norm": "none", "bias": False},
    },
    "h3": {
        "paper": {"d_state": 6},
        "heads": {"n_heads": 2, "d_state": 3, "init": "real", "discretization": "zoh"},
    },
    "hawk": {
        "paper": {},
        "released": {"variant": "released", "d_rnn": 6, "n_blocks": 2},
        "no convolution": {"conv_size": None},
    },
    "hgrn2": {
        "paper": {},
        "grouped": {
            "n_heads": 4,
            "kv_heads": 2,
            "output_gate": "elu",
            "conv_size": 3,
            "conv_bias": True,
            "lower_bound": 0.1,
        },
        "released": {
            "n_heads": 2,
            "lower_bound": 0.5,
            "input_activation": "none",
            "output_gate": "silu",
            "output_norm": "rms",
            "bias": False,
        },
        "without expansion": {"n_heads": 4, "lower_bound": "random", "output_norm": "none"},
        "long memory": {"n_heads": 2, "lower_bound": 0.999},
    },
    "hgru": {
        "paper": {},
        "released": {
            "lower_bound": 0.5,
            "output_gate": "silu",
            "gate_before_norm": False,
            "phase_base": 1e8,
        },
        "flash-linear-attention": {
            "d_state": 5,
            "conv_size": 3,
            "output_gate": "silu",
            "gate_before_norm": False,
            "output_norm": "rms",
            "phase": "none",
            "complex_input": False,
            "bias": False,
        },
        "random bound alone": {"lower_bound": "random", "forget_gate": "bound", "output_norm": "rms"},
        "no forget gate": {"lower_bound": 0.9, "forget_gate": "none", "output_gate": "none"},
        "no input gate": {
            "lower_bound": "decreasing",
            "input_gate": False,
            "refine": True,
            "uniform_init": True,
        },
        "data-dependent phase": {"phase": "data", "complex_input": False},
        "real": {"phase": "none", "complex_input": False, "lower_bound": 0.99, "forget_gate": "bound"},
    },
    "hippo_rnn": {
        "paper": {"order": 3},
        "released": {
            "variant": "released",
            "order": 3,
            "d_memory": 2,
            "refine": True,
            "uniform_init": True,
        },
        "window": {
            "measure": "legt",
            "order": 3,
            "window": 6.0,
            "discretization": "zoh",
            "gate": False,
        },
    },
    "hyena": {
        # shorter than the longest sequences of the laws
        "paper": {"length": 40, "d_filter": 5, "omega": 1.0},
        "order 3": {
            "order": 3,
            "length": 2000,
            "first_filter": False,
            "conv_size": None,
            "d_filter": 3,
            "filter_depth": 2,
            "n_bands": 1,
        },
        "released": {
            "order": 3,
            "length": 40,
            "first_filter": False,
            "d_filter": 3,
            "omega": 1.0,
            "shared_omega": True,
            "shift": 0.0,
            "joint_windows": True,
            "learn_positions": True,
        },
        "heads": {"length": 40, "n_heads": 2, "d_filter": 3, "omega": 1.0},
    },
    "cfc": {
        "paper": {"d_backbone": 6},
        "pure": {"d_backbone": 5, "variant": "pure", "n_layers": 2, "activation": "silu"},
        "mixed memory": {"d_backbone": 5, "mixed_memory": True, "activation": "tanh"},
        "no gate": {"d_backbone": 5, "variant": "no_gate", "mixed_memory": True, "n_layers": 2},
    },
    "cornn": {
        "paper": {},
        "implicit": {"implicit": True, "dt": 0.06, "gamma": 66.0, "epsilon": 15.0},
    },
    "lem": {
        "paper": {},
        "sequential MNIST": {"dt": 0.21},
    },
    "unicornn": {
        "paper": {},
        "no frequency": {"dt": 0.0343, "alpha": 0.0},
    },
    "lipschitz_rnn": {
        "paper": {},
        "midpoint": {"solver": "midpoint", "beta": 0.6, "epsilon": 0.1, "gamma": 0.1, "init_std": 2.0},
        "gate": {"gate": True, "epsilon": 0.1, "gamma": 0.1, "init_std": 2.0},
    },
    "noisy_rnn": {
        # the mixers of the laws are in training, where noise makes every call different
        "no noise": {"gamma_w": 0.2, "add_noise": 0.0, "mult_noise": 0.0, "init_std": 2.0},
    },
    "antisymmetric_rnn": {
        "paper": {},
        "gated": {"gated": True, "epsilon": 0.1, "gamma": 0.01, "init_std": 2.0},
    },
    "neural_wave_machine": {
        "paper": {},
        "row": {"neighbours": "row", "rows": 1, "dt": 0.076, "gamma": 0.4, "epsilon": 8.0},
    },
    "wave_rnn": {
        "paper": {},
        "random": {"init": "random", "input_init": "normal", "n_channels": 2, "activation": "tanh"},
    },
    "elman": {
        "tanh": {},
        "IRNN": {"activation": "relu", "init": "identity"},
        "leaky reservoir": {"init": "reservoir", "leak": 0.3},
    },
    "strongly_typed_rnn": {
        "T-LSTM": {},
        "T-GRU": {"variant": "gru"},
        "T-RNN": {"variant": "rnn"},
    },
    "jordan": {
        "paper": {"mu": 0.5, "d_hidden": 6},
        "textbooks": {"activation": "sigmoid"},
    },
    "ctrnn": {
        "rate": {"n_steps": 2},
        "potential": {"variant": "potential", "activation": "sigmoid", "solver": "rk4", "n_steps": 1},
    },
    "lstm": {
        "torch": {},
        "forget bias": {"forget_bias": 1.0, "mode": "recurrent"},
        "UR-LSTM": {"refine": True, "uniform_init": True},
    },
    "gru": {
        "torch": {},
        "paper": {"reset_after": False},
        "refined": {"refine": True, "chrono": 50},
    },
    "on_lstm": {
        "chunks": {"chunk_size": 2},
        "channels": {"chunk_size": 1},
    },
    "fast_rnn": {
        "released": {},
        "low rank": {"w_rank": 3, "u_rank": 2, "activation": "sigmoid"},
    },
    "fast_grnn": {
        "released": {},
        "low rank": {"w_rank": 3, "u_rank": 2, "gate_activation": "tanh"},
    },
    "irnn": {
        "paper": {},
        "tanh": {"activation": "tanh", "n_steps": 2, "eta_init": 0.3},
    },
    "tarnn": {
        "released": {},
        "steps": {"n_steps": 3, "a_init": 0.3, "activation": "tanh", "gate_inside": True},
    },
    "exp_rnn": {
        "paper": {},
        "Cayley": {"matrix_map": "cayley", "init": "henaff"},
        "dtriv": {"init": "henaff", "base": "start"},
    },
    "nn_rnn": {
        "paper": {},
        "released": {"init": "henaff", "corners": True, "delta": 0.1},
    },
    "scornn": {
        "half": {},
        "few": {"rho": 1},
    },
    "u_rnn": {
        "paper": {},
        "odd": {"d_state": 5},
    },
    "eu_rnn": {
        "tunable": {"capacity": 3},
        "FFT": {"style": "fft"},
        "real": {"is_complex": False},
    },
    "e_lstm": {
        "paper": {},
        "forget bias": {"forget_bias": 1.0},
    },
    "ind_rnn": {
        "paper": {},
        "tanh": {"activation": "tanh", "recurrent_init": "long"},
        "released": {"init": "released", "gamma": 5.0},
    },
    "linear_attention": {
        "paper": {},
        # a floor that is far from rounding, for rectified features vanish together in narrow heads
        "dpfp": {"n_heads": 2, "feature_map": "dpfp", "nu": 2, "floor": 0.1, "bias": False},
        "rotary": {"n_heads": 2, "positions": "rotary", "rotary_base": 100.0},
        "NormAttention": {
            "n_heads": 2,
            "feature_map": "identity",
            "normalization": "rms",
            "positions": "rotary",
        },
        "cosFormer": {"feature_map": "cosformer", "max_length": 65_536, "floor": 0.1},
        "Performer": {"feature_map": "performer", "n_features": 6, "orthogonal": False},
        "turned Performer": {"feature_map": "performer", "n_features": 6, "positions": "rotary"},
        "hyperbolic Performer": {"feature_map": "performer", "n_features": 3, "hyperbolic": True},
        "Performer-ReLU": {"feature_map": "arc_cosine", "orthogonal": True, "epsilon": 0.1},
        "rectified": {"n_heads": 2, "feature_map": "relu", "epsilon": 0.1},
        "softmax": {"n_heads": 2, "feature_map": "softmax", "normalization": "none"},
        "BASED": {"n_heads": 2, "d_qk": 6, "feature_map": "taylor", "bias": False},
        "T2R": {"n_heads": 2, "feature_map": "learned", "n_features": 5, "floor": 0.1},
        "EcoFormer": {"n_heads": 2, "feature_map": "hashed", "n_features": 5, "shared_qk": True},
    },
    "liquid_s4": {
        "PB": {"d_state": 4, "degree": 3},
        "released PB": {"d_state": 4, "degree": 3, "powers": "sums"},
        "KB": {"d_state": 3, "kernel": "kb", "init": "real", "output": "linear"},
    },
    "lmu": {
        "2021": {"order": 6, "theta": 12.0, "d_memory": 3},
        "one signal": {
            "order": 5,
            "theta": 30.0,
            "d_memory": 1,
            "activation": "relu",
            "memory_activation": "gelu",
            "bias": False,
            "discretization": "bilinear",
        },
        "2019": {"order": 4, "theta": 9.0, "d_memory": 3, "feedback": True},
        "keras-lmu": {"order": 4, "theta": 9.0, "d_memory": 2, "feedback": True, "init": "keras_lmu"},
    },
    "ls_lstm": {
        "paper": {},
        "refined": {"impulse": "leaky_relu", "output_projection": True, "refine": True, "uniform_init": True},
        # weights that training has moved: all gates start alike
        "released": {"variant": "released", "forget_bias_init": 1.0},
    },
    "ltc": {
        "paper": {},
        "two steps": {"n_steps": 2},
        "network": {"variant": "network", "n_steps": 2},
        "mixed memory": {"n_steps": 1, "mixed_memory": True},
    },
    "lru": {
        "paper": {},
        "forget gate": {"forget_gate": True},
        "larger state": {"d_state": 7},
        "long memory": {"d_state": 3, "r_min": 0.99, "r_max": 0.9999, "max_phase": 0.3},
    },
    "lssl": {
        "paper": {"d_state": 6},
        "several outputs": {"d_state": 5, "measure": "legt", "n_outputs": 2, "output": "glu"},
        "quasi-separable": {"d_state": 5, "transition": "quasi_separable"},
        "fixed": {
            "d_state": 8,
            "measure": "fout",
            "learn_transition": False,
            "activation": False,
            "output": "none",
        },
    },
    "mamba": {
        "paper": {"d_state": 3},
        "selective in part": {
            "d_state": 2,
            "dt_rank": 3,
            "selective": ("B",),
            "A_init": "random",
            "conv_size": None,
            "bias": True,
            "D": False,
            "inner_norm": "rms",
        },
        "Jamba": {"d_state": 3, "inner_norm": "rms_weight"},
        "held input": {"d_state": 3, "discretization": "zoh"},
    },
    "mamba2": {
        "paper": {"d_state": 5},
        "groups": {
            "n_heads": 4,
            "d_state": 3,
            "n_groups": 2,
            "D": "channel",
            "norm_before_gate": True,
            "dt_limit": (0.01, 1.0),
        },
        "sequential": {
            "n_heads": 2,
            "d_state": 3,
            "heads": "multi_expand",
            "projections": "sequential",
            "feature_map": "identity",
            "bias": True,
        },
        "bare": {
            "n_heads": 2,
            "d_state": 3,
            "heads": "multi_head",
            "feature_map": "dpfp",
            "conv_size": None,
            "D": "none",
            "output_norm": "none",
        },
    },
    "mamba3": {
        "paper": {"d_state": 5},
        "released": {
            "n_heads": 4,
            "d_state": 4,
            "n_groups": 2,
            "rate": "heavy_tail",
            "rope_fraction": 1.0,
            "output_norm": "head",
        },
        "standard": {
            "n_heads": 2,
            "d_state": 6,
            "discretization": "classical",
            "rotation": "standard",
            "biases": "B",
            "bias_init": (-1.0, 1.0),
            "output_norm": "rms",
            "norm_before_gate": False,
        },
        "Mamba-2's": {
            "n_heads": 2,
            "d_state": 3,
            "discretization": "euler",
            "rotation": "none",
            "biases": "none",
            "A_floor": 0.1,
        },
    },
    "mega": {
        "paper": {"d_qk": 6, "n_averages": 3},
        "chunks": {"d_qk": 4, "n_averages": 2, "chunk_size": 4, "ema_skip": True},
        "Laplace": {"d_qk": 5, "n_averages": 1, "attention": "laplace", "position_bias": "none"},
        "released": {
            "d_qk": 5,
            "n_averages": 2,
            "chunk_size": 4,
            "position_bias": "simple",
            "ema_skip": True,
            "input_norm": "layer",
        },
    },
    "min_gru": {
        "paper": {},
        "refined": {"d_state": 7, "refine": True, "uniform_init": True},
        "linear": {"candidate": "linear"},
        "released": {"output_projection": True, "learned_start": True},
    },
    "min_lstm": {
        "paper": {},
        "refined": {"d_state": 3, "refine": True, "uniform_init": True, "forget_bias": 1.0},
        "plain": {"candidate": "linear", "normalize": False},
        "released": {
            "normalize": False,
            "forget_bias": 3.0,
            "output_projection": True,
            "learned_start": True,
        },
    },
    # gates that training has opened: they start as constants
    "mesa_net": {
        "paper": {"n_heads": 2, "n_iterations": 8},
        "gate": {"n_heads": 2, "n_iterations": 4, "output_gate": True, "conv_size": None},
    },
    "mlstm": {
        # the norm of a head of two channels is the sign of their difference, which rounding may flip
        "paper": {"n_heads": 2, "gate_std": 0.5},
        "exponential": {
            "n_heads": 2,
            "d_inner": 6,
            "block_size": 3,
            "conv_size": None,
            "forget_gate": "exponential",
            "gate_std": 1.0,
        },
        "without gates": {"n_heads": 2, "input_gate": False, "forget_gate": "none"},
    },
    "ode_fast_weights": {
        "delta": {"n_heads": 2},
        "Oja": {"rule": "oja", "solver": "midpoint", "n_steps": 2},
        "Hebb": {"rule": "hebb", "n_heads": 2, "solver": "euler"},
        # the rules of Oja and delta diverge at the inputs of the laws, which are long vectors
        "plain": {"n_heads": 2, "plain": True, "rule": "hebb", "solver": "euler"},
        "tanh before": {"n_heads": 2, "tanh_after": False, "solver": "euler", "n_steps": 2},
    },
    "ode_rnn": {
        "paper": {"d_hidden": 5},
        "rk4": {"d_hidden": 4, "n_layers": 1, "solver": "rk4", "n_steps": 2},
        "neural ODE": {"d_hidden": 4, "n_layers": 1, "inputs": "field", "solver": "rk4"},
        "midpoint": {"d_hidden": 3, "n_layers": 3, "solver": "midpoint", "n_steps": 3},
    },
    "preconditioned_delta_net": {
        "paper": {"n_heads": 2},
        "per channel": {"n_heads": 2, "decay": "channel", "conv_size": None, "output_gate": False},
    },
    "qrnn": {
        "paper": {},
        "wide": {"width": 4, "pooling": "ifo", "refine": True},
        "f-pooling": {"width": 1, "pooling": "f", "uniform_init": True},
    },
    "recurrent_attention_network": {
        "paper": {"n_heads": 2, "segment_length": 4, "n_cells": 3},
        "detached": {"d_head": 6, "segment_length": 3, "n_cells": 2, "silu": False, "detach": 2},
    },
    "recurrent_delta_net": {
        "paper": {"n_heads": 2, "output_recurrence": True},
        "Delta RNN": {"n_heads": 2, "d_qk": 6, "d_v": 2, "variant": "delta_rnn"},
        "Delta RNN 1": {"n_heads": 2, "variant": "delta_rnn_v1"},
        "features": {"feature_map": "elu", "d_qk": 6, "d_v": 2},
    },
    # floors that are far from rounding, for rectified features vanish together in narrow heads
    "reformer": {
        "paper": {"n_heads": 2, "n_hashes": 2, "n_buckets": 4},
        "many buckets": {"n_hashes": 3, "n_buckets": 8, "bias": True},
        "encoder": {"n_heads": 2, "n_hashes": 2, "n_buckets": 2, "causal": False},
    },
    "relit": {
        "paper": {"floor": 0.1},
        "AReLiT": {"n_heads": 2, "eta": 3, "r": 5, "floor": 0.1},
        "heads": {"n_heads": 2, "eta": 1, "floor": 0.1},
        "two terms": {"r": 2, "floor": 0.1},
        "released": {"n_heads": 2, "eta": 2, "floor": 0.1, "variant": "released"},
        "released AReLiT": {"n_heads": 2, "r": 4, "floor": 0.1, "variant": "released"},
    },
    "retnet": {
        "paper": {},
        "heads": {"n_heads": 2, "d_v": 6, "rotary_base": 100.0, "output_norm": "rms"},
        "single decay": {"n_heads": 2, "decay": "single", "output_gate": False},
        "linear attention": {"decay": "none", "rotation": False},
        "released": {"n_heads": 2, "output_norm": "rms", "norm_eps": 1e-5, "out_gain": 0.5},
    },
    "rfa": {
        # estimates from few directions come near to 0
        "paper": {"floor": 0.1},
        "heads": {"n_heads": 2, "n_features": 3, "orthogonal": True, "learn_sigma": False, "floor": 0.1},
        "arccos": {"feature_map": "arc_cosine", "gate": False},
        "temperature": {"tau": 2.0, "floor": 0.1},
    },
    "rg_lru": {
        "paper": {},
        "released": {"variant": "released", "n_blocks": 2},
        "no gates": {"a_init_of": "a", "recurrence_gate": False, "input_gate": False},
    },
    "rwkv4": {
        # an output projection of zeros would make every law hold
        "paper": {"zero_init": False},
        "wide": {"zero_init": False, "d_state": 7, "bonus": False},
        "without gate and shift": {"zero_init": False, "token_shift": False, "receptance": False},
    },
    "rwkv5": {
        "paper": {"zero_init": False},
        "heads": {"zero_init": False, "n_heads": 2, "bonus": False, "output_gate": False},
        "without shift and norm": {"zero_init": False, "token_shift": False, "output_norm": False},
    },
    "rwkv6": {
        "paper": {"zero_init": False, "shift_rank": 3, "decay_rank": 2},
        "heads": {"zero_init": False, "n_heads": 2, "token_shift": "learned", "output_gate": False},
        "learned decay": {"zero_init": False, "decay": "learned", "bonus": False, "shift_rank": 2},
        "without shift and norm": {"zero_init": False, "token_shift": "none", "output_norm": False},
    },
    "rwkv7": {
        "paper": {"zero_init": False, "decay_rank": 3, "rate_rank": 2, "gate_rank": 3},
        "heads": {"zero_init": False, "n_heads": 2, "decay_rank": 2, "rate_rank": 2, "gate_rank": 2},
    },
    "s4": {
        "paper": {"d_state": 6},
        "Fourier": {"init": "fout", "d_state": 4, "discretization": "zoh", "output": "glu"},
        "Legendre": {"init": "legt", "d_state": 4, "output": "none", "activation": False},
        "shared": {"d_state": 4, "n_ssm": 2, "n_outputs": 2, "start": "released"},
    },
    "s4d": {
        "paper": {"d_state": 6},
        "real": {"init": "real", "d_state": 3, "discretization": "bilinear", "output": "linear"},
        "inverse": {"init": "inv", "d_state": 4, "learn_b": False, "output": "none", "activation": False},
        "LegS": {"init": "legs", "d_state": 4, "mode": "scan"},
        "shared": {"init": "legs", "d_state": 4, "n_ssm": 2, "n_outputs": 2, "start": "released"},
    },
    "s5": {
        "paper": {},
        "blocks": {"d_state": 12, "n_blocks": 3, "discretization": "bilinear", "output": "glu"},
        "alone": {"d_state": 2, "activation": False, "output": "none"},
        "no pairs": {"d_state": 3, "pairs": False},
        "released": {"d_state": 4, "approximate": "tanh", "step_rescale": 2.0, "C_init": "lecun_normal"},
    },
    "s5_hyena": {
        "released": {"d_state": 6, "n_blocks": 2},
        "order 3": {"order": 3, "d_state": 4, "n_blocks": 1, "conv_size": None, "output": "half_glu"},
        "pairs": {"d_state": 4, "n_blocks": 1, "pairs": True, "activation": False},
    },
    "sgconv": {
        "paper": {"length": 40, "d_kernel": 4},
        "several decays": {
            "length": 100,
            "d_kernel": 3,
            "alpha": (0.25, 1.0),
            "upsampling": "nearest",
            "activation": False,
            "output": "glu",
        },
        "inverse decays": {"length": 40, "d_kernel": 5, "alpha": (1.0, 0.25), "alpha_spacing": "inverse"},
    },
    "slstm": {
        # mixed memories, which start unmixed
        "paper": {"recurrent_init": "uniform"},
        "heads": {"n_heads": 2, "conv_size": None, "forget_gate": "exponential"},
    },
    "sru": {
        "paper": {},
        "scan": {"recurrent_gates": False, "highway_bias": -1.0},
        "refined": {"highway": False, "refine": True, "uniform_init": True},
        "output gate": {"highway": False, "output_gate": True},
    },
    # with the paper's rates, weights of heads this narrow grow over long sequences
    "srwm": {
        "paper": {"beta_init": -3.0},
        "one rate": {"n_heads": 2, "rates": "one", "input_softmax": False},
    },
    "tnn": {
        "paper": {"d_position": 5},
        "no decay": {"length": 40, "decay": 1.0, "expansion": 1, "position_depth": 0, "bias": False},
    },
    # shorter than the longest sequences of the laws
    "synthesizer": {
        "dense": {"n_heads": 2, "max_length": 40, "d_hidden": 3},
        "random": {"n_heads": 2, "max_length": 40, "scores": "random", "bias": False},
        "factorized dense": {"max_length": 40, "scores": "factorized_dense", "factor": 4},
        "factorized random": {"n_heads": 2, "max_length": 40, "scores": "factorized_random", "rank": 3},
        "dense and attention": {"n_heads": 2, "max_length": 40, "second": "attention"},
        "alone": {"max_length": 40, "value_projection": False, "output_projection": False},
        "encoder": {"max_length": 40, "scores": "random", "second": "attention", "causal": False},
    },
    "transformer_ls": {
        "paper": {"n_heads": 2, "segment_length": 4, "window": 6, "n_chunks": 3},
        "several rows": {
            "segment_length": 3,
            "rank": 2,
            "window": 2,
            "n_chunks": 2,
            "bias": True,
            "detach": 2,
        },
        "a window of the step alone": {"n_heads": 2, "segment_length": 2, "window": 1, "n_chunks": 1},
    },
    # larger weights than the paper's, whose outputs would be near zero
    "transformer_xl": {
        "paper": {"n_heads": 2, "segment_length": 4, "init_std": 0.5},
        "same length": {
            "n_heads": 2,
            "d_head": 3,
            "segment_length": 3,
            "memory_length": 5,
            "same_length": True,
            "clamp": 3,
            "detach": "never",
            "init_std": 0.5,
        },
        "two segments of gradients": {"segment_length": 2, "memory_length": 1, "detach": 2, "init_std": 0.5},
        "no recurrence": {"segment_length": 3, "memory_length": 0, "init_std": 0.5},
        "rotary": {"n_heads": 2, "segment_length": 3, "positions": "rotary", "init_std": 0.5},
        "T5": {"n_heads": 2, "segment_length": 3, "positions": "t5", "init_std": 0.5},
        "own norm": {"n_heads": 2, "segment_length": 4, "norm": "layer", "init_std": 0.5},
    },
    "r_transformer": {
        "paper": {"n_heads": 2, "window": 3},
        "two networks": {"n_rnns": 2, "window": 2, "rnn": "lstm", "positions": "rotary", "norm": "rms"},
        "of one step": {"window": 1, "rnn": "elman", "bias": False},
    },
    "recurrent_positions": {
        "shared": {"d_recurrent": 2, "n_heads": 2},
        "independent": {"heads": "independent", "n_recurrent_heads": 2, "rnn": "gru", "bias": True},
    },
    "rsa": {
        "paper": {"n_heads": 4, "d_head": 2},
        "regular": {"n_heads": 2, "gate": "layer", "bias": True},
        "cyclical": {"n_heads": 3, "d_head": 2, "n_cosine": 2, "n_sine": 1},
    },
    "spacetime": {
        "encoder": {"d_state": 5},
        "decoder": {"d_state": 4, "closed_loop": True},
        "shared": {"d_state": 3, "n_kernels": 2},
    },
    "trans_normer": {
        "paper": {},
        "decay": {"n_heads": 2, "positions": "decay", "feature_map": "elu", "output_norm": "rms"},
        "LRPE": {"n_heads": 2, "positions": "lrpe", "output_gate": False},
        "NormAttention": {"positions": "none", "feature_map": "identity", "output_norm": "layer"},
        "linear slopes": {"n_heads": 4, "slopes": "linear", "layer_decay": False},
        "blocks": {"n_heads": 2, "block_size": 3, "positions": "none", "output_gate": False},
        "turned blocks": {"block_size": 5, "positions": "lrpe", "slopes": "geometric"},
    },
    "xlstm_7b": {
        "paper": {"gate_std": 0.5},
        "wide": {"n_heads": 2, "d_qk": 6, "d_v": 8, "gate_cap": None, "gate_std": 1.0},
    },
}


ENCODERS = ["fnet", "linformer"]
"""Mixers that see later steps with any arguments."""
CAUSAL = [name for name in mixers.names() if name not in ENCODERS]
NONLINEAR = [name for name in mixers.names() if mixers.get(name).recurrence == "nonlinear_scan"]
"""Mixers on `nonlinear_scan`, whose default mode is a loop in Python."""
SEGMENTED = [name for name in mixers.names() if issubclass(mixers.get(name), SegmentMixer)]
"""Mixers that are a loop over segments."""


def cases(*names: str) -> list[tuple[str, str]]:
    """(mixer, variant) pairs of the mixers called `names`, or of every mixer that exists."""
    return [(name, variant) for name in names or mixers.names() for variant in VARIANTS.get(name, DEFAULTS)]


OF_ANOTHER_OPERATOR = [
    ("aft", "full"),
    ("decaying_fast_weights", "keys alone"),
    ("dss", "exp"),
    ("flash_gau", "chunks apart"),
    ("linear_attention", "rotary"),
    ("lmu", "2019"),
    ("mamba", "held input"),
    ("mega", "Laplace"),
    ("recurrent_delta_net", "Delta RNN"),
    ("relit", "AReLiT"),
    ("s4", "Fourier"),
    ("sru", "scan"),
    ("trans_normer", "blocks"),
]
"""Variants that do not call the operator of the first variant."""


def of_operators() -> list[tuple[str, str]]:
    """(mixer, variant) pairs: the first variant of every mixer, and those that call another operator."""
    return [cases(name)[0] for name in mixers.names()] + OF_ANOTHER_OPERATOR


def tiered(*names: str) -> list[Any]:
    """Return `cases` as parameters of a test, all but the first variant of each mixer marked thorough."""
    return [
        pytest.param(name, variant, marks=[tiers.thorough] if place else [])
        for name in names or mixers.names()
        for place, (_, variant) in enumerate(cases(name))
    ]


def one_of_operators(names: Iterable[str]) -> list[str]:
    """Return of these mixers one for each operator, and those of `OF_FAMILIES`."""
    ordered = sorted(names, key=lambda name: name not in OF_FAMILIES)
    found = {mixers.get(name).recurrence: name for name in reversed(ordered)}.values()
    return [name for name in ordered if name in OF_FAMILIES or name in found]


def of_mixers() -> list[Any]:
    """Return `cases` as parameters of a test of a promise that every mixer has to keep.

    The first tier has the first variant of every mixer, and the second tier the variants that call another
    operator. The others are nightly, since goldens of the second tier compare the numbers of all variants.
    """
    return tiers.tiered([cases(name)[0] for name in mixers.names()], of_operators(), cases())


OF_FAMILIES = (
    "gate_loop",
    "delta_net",
    "hgru",
    "mamba",
    "s4d",
    "hyena",
    "attention",
    "transformer_xl",
    "gru",
    "srwm",
)
"""One or two mixers of each family."""


def firsts_of_families() -> list[tuple[str, str]]:
    """(mixer, variant) pairs of the first variants of `OF_FAMILIES`."""
    return [cases(name)[0] for name in OF_FAMILIES]


def of_families() -> list[Any]:
    """Return `cases` as parameters of a test of code that the mixers share.

    The first tier has the first variants of `OF_FAMILIES`, the second one `of_operators`; others are nightly.
    """
    return tiers.tiered(firsts_of_families(), of_operators(), cases())


def arguments(name: str, variant: str) -> dict[str, Any]:
    """The keyword arguments of a variant."""
    return VARIANTS.get(name, DEFAULTS)[variant]
