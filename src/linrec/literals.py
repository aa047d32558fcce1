"""Names that users type: Literal types of string arguments, and the names of mixers elsewhere.

This module does not import PyTorch, because the command line imports it at startup.
"""

import functools
from typing import Literal, TypeAlias

__all__ = ["OTHER_NAMES", "TAKES_DT", "DeviceName", "MixerName", "Precision", "SplitName", "other_names"]

DeviceName: TypeAlias = Literal["auto", "cpu", "cuda", "mps"]
Precision: TypeAlias = Literal["32-true", "bf16-mixed"]
SplitName: TypeAlias = Literal["train", "validation", "test"]

# made by `python docs/tables.py`
# fmt: off
MixerName: TypeAlias = Literal[
    # table: mixer_literal
    "aft", "antisymmetric_rnn", "attention", "base_conv", "block_recurrent", "block_state", "cfc", "comba",
    "compressive_transformer", "cornn", "ctrnn", "decaying_fast_weights", "delta_delta_net", "delta_lstm",
    "delta_net", "dlr", "dss", "e_lstm", "elman", "eu_rnn", "exp_rnn", "falcon_h1", "fast_grnn", "fast_rnn",
    "flash_gau", "fnet", "forgetting_transformer", "gate_loop", "gate_loop_attention", "gated_delta_net",
    "gated_delta_net_2", "gated_delta_product", "gilr", "gla", "gmlp", "gru", "gru_d", "gss", "h3", "hawk",
    "hgrn2", "hgru", "hippo_rnn", "hyena", "ind_rnn", "infini_attention", "irnn", "jordan", "kda", "lem",
    "lfm2", "lightning_attention", "linear_attention", "linformer", "lipschitz_rnn", "liquid_s4", "lmu",
    "lru", "ls_lstm", "lssl", "lstm", "ltc", "mamba", "mamba2", "mamba3", "mega", "mesa_net", "min_gru",
    "min_lstm", "mlstm", "neural_wave_machine", "nn_rnn", "noisy_rnn", "ode_fast_weights", "ode_rnn",
    "on_lstm", "preconditioned_delta_net", "qrnn", "r_transformer", "recurrent_attention_network",
    "recurrent_delta_net", "recurrent_positions", "reformer", "relit", "retnet", "rfa", "rg_lru", "rsa",
    "rwkv4", "rwkv5", "rwkv6", "rwkv7", "s4", "s4d", "s5", "s5_hyena", "scornn", "sgconv", "slstm",
    "spacetime", "sru", "srwm", "strongly_typed_rnn", "synthesizer", "tarnn", "tnn", "trans_normer",
    "transformer_ls", "transformer_xl", "u_rnn", "unicornn", "wave_rnn", "xlstm_7b",
    # end of table
]
"""Names of the mixers of linrec, as `linrec.mixers.names()` lists them."""
TAKES_DT = (
    # table: mixers_with_dt
    "cfc", "ctrnn", "gru_d", "lru", "ltc", "mamba", "ode_fast_weights", "ode_rnn", "s4d", "s5",
    # end of table
)
"""Names of the mixers that take irregular steps."""
# fmt: on

# Other names of mixers, besides the names of the file and the class. Case, spaces, hyphens and underscores do
# not count. A name of a key with arguments, or of several keys, is an error that suggests the keys. A first
# name of one word stands in the navigation of the documentation.
OTHER_NAMES: dict[str, str] = {
    "aft": "Attention Free Transformer, AFT-simple",
    'aft(variant="full")': "AFT-full",
    'aft(variant="local")': "AFT-local",
    'aft(variant="conv")': "AFT-conv",
    "attention": "Transformer, softmax attention, multi-head attention, MHA, self-attention, RoFormer, "
    "Llama, Jamba, Bamba, Zamba, Zamba2, Nemotron-H, GraniteMoeHybrid, Qwen3-Next, OLMo Hybrid",
    "attention(n_heads=4, kv_heads=1)": "multi-query attention, MQA",
    "attention(n_heads=4, kv_heads=2)": "grouped-query attention, GQA",
    'attention(positions="alibi")': "ALiBi, attention with linear biases",
    "attention(window=1024)": "local attention, sliding window attention, SWA",
    "attention(cache_size=1024, sinks=4)": "StreamingLLM, attention sinks",
    'attention(cache_size=1024, eviction="tova")': "TOVA, token omission via attention, multi-state RNN",
    'attention(cache_size=1024, eviction="h2o")': "H2O, heavy-hitter oracle",
    "base_conv": "BaseConv of BASED",
    "block_recurrent": "Block-Recurrent Transformer, BRecT",
    "block_state": "Block-State Transformer, BST",
    "cfc": "closed-form continuous-time network",
    "cornn": "coupled oscillatory RNN",
    "ctrnn": "continuous-time RNN, continuous-time recurrent neural network",
    "decaying_fast_weights": "T2FW",
    "delta_delta_net": "recurrent fast weight programmer, RFWP",
    "delta_lstm": "recurrent fast weight programmer, RFWP",
    "delta_net": "delta rule, fast weight programmer, FWP",
    "dlr": "diagonal linear RNN",
    "dss": "diagonal state space, DSS-softmax",
    'dss(kernel="exp")': "DSS-exp",
    'dss(kernel="exp_no_scale")': "DSS-exp-no-scale",
    "elman": "RNN, vanilla RNN, simple recurrent network, SRN",
    'elman(activation="relu", init="identity")': "identity RNN, IRNN of Le",
    "eu_rnn": "EUNN, efficient unitary neural network",
    "exp_rnn": "orthogonal RNN",
    "flash_gau": "FLASH",
    "flash_gau(linear=False)": "GAU, gated attention unit",
    "gate_loop": "simplified GateLoop, SimpleGateLoopLayer, GateLoopedAttention, GatedLinearRNN",
    "forgetting_transformer": "FoX, forgetting attention",
    "gated_delta_net": "gated delta rule, gated delta network, GDN, Qwen3-Next, OLMo Hybrid",
    "gated_delta_net_2": "GDN-2",
    'gated_delta_product(decay="none")': "DeltaProduct",
    "gilr": "gated impulse linear recurrent layer",
    "gla": "gated linear attention, GLA Transformer",
    'gla(forget_gate="head")': "simple GLA",
    "gmlp(d_attention=64)": "aMLP",
    "gru": "gated recurrent unit",
    "gru(refine=True, uniform_init=True)": "UR-GRU",
    "gss": "gated state space",
    "h3": "Hungry Hungry Hippos",
    "hawk": "Griffin, RecurrentGemma, RecurrentBlock",
    "hgrn2": "HGRN2Attention, HGRU2",
    "hgru": "HGRN, HGRN1, hierarchically gated recurrent neural network, "
    "hierarchically gated recurrent unit, HGRU1d, HGRNAttention",
    "hippo_rnn": "HiPPO, HiPPO-LegS",
    'hippo_rnn(measure="legt", window=100.0)': "HiPPO-LegT",
    'hippo_rnn(measure="lagt", window=100.0)': "HiPPO-LagT",
    "hyena": "Hyena Hierarchy, HyenaOperator, HyenaDNA",
    "ind_rnn": "independently recurrent neural network",
    "infini_attention": "Infini-Transformer",
    "irnn": "incremental RNN, incrementally evolving RNN, iRNN of Kag",
    "jordan": "Jordan network, Jordan RNN",
    "kda": "Kimi Linear, Kimi, Kimi delta attention, KimiLinearDeltaAttention",
    "lem": "long expressive memory",
    "lfm2": "gated short convolution, LFM, Lfm2ShortConv",
    "lightning_attention": "MiniMax, MiniMax-01, MiniMax-Text-01, MiniMaxLightningAttention",
    "linear_attention": "linear Transformer, linear attn, Transformers are RNNs",
    'linear_attention(feature_map="performer")': "Performer, FAVOR+",
    'linear_attention(feature_map="cosformer")': "cosFormer",
    'linear_attention(feature_map="dpfp")': "DPFP",
    'linear_attention(feature_map="taylor")': "BASED",
    'linear_attention(feature_map="learned")': "T2R",
    'linear_attention(feature_map="hashed")': "EcoFormer",
    "lipschitz_rnn(gate=True)": "gated Lipschitz RNN",
    "lmu": "Legendre memory unit",
    "lru": "linear recurrent unit",
    "ls_lstm": "linear surrogate LSTM",
    "lssl": "linear state-space layer",
    "lstm": "long short-term memory",
    "lstm(chrono=1000)": "chrono LSTM, chrono initialisation",
    "lstm(refine=True, uniform_init=True)": "UR-LSTM, refine gate",
    "ltc": "liquid time-constant network, liquid neural network, LNN",
    'ltc(variant="network")': "general LTC",
    "mamba": "S6, Mamba-1, selective state space model, Zamba",
    'mamba(inner_norm="rms")': "FalconMamba",
    'mamba(inner_norm="rms_weight")': "Jamba",
    "mamba2": "state space duality, SSD, Transformers are SSMs, Codestral Mamba, Bamba, Zamba2, Nemotron-H, "
    "GraniteMoeHybrid",
    "mega": "moving average equipped gated attention, MovingAverageGatedAttention",
    "mesa_net": "Mesa layer",
    "mega(chunk_size=128)": "Mega-chunk",
    "min_gru": "minRNN, were RNNs all we needed",
    "min_lstm": "minRNN, were RNNs all we needed",
    "mlstm": "xLSTM, matrix LSTM, extended long short-term memory",
    "neural_wave_machine": "NWM",
    "nn_rnn": "non-normal RNN",
    "ode_fast_weights": "continuous fast weight programmer",
    "ode_rnn": "latent ODE",
    'ode_rnn(inputs="field")': "neural ODE, neural ordinary differential equation, NODE",
    "on_lstm": "ordered neurons",
    "preconditioned_delta_net": "PGDN, PKDA, PrecondGatedDeltaNet, PrecondKDA",
    "qrnn": "quasi-recurrent neural network",
    "r_transformer": "RNN-enhanced Transformer, LocalRNN",
    "recurrent_attention_network": "RAN",
    "recurrent_delta_net": "recurrent fast weight programmer, RFWP",
    'recurrent_delta_net(variant="delta_rnn")': "Delta RNN",
    "recurrent_positions": "recurrent positional embedding, RPE",
    "relit": "GaLiTe, recurrent linear Transformer",
    "relit(r=4)": "AReLiT, AGaLiTe",
    "retnet": "retentive network, MultiScaleRetention",
    "rfa": "random feature attention",
    "rg_lru": "Griffin, RecurrentGemma, real-gated linear recurrent unit",
    "rsa": "self-attention with recurrence, recurrence encoding matrix, REM",
    "rwkv4": "RWKV",
    "rwkv5": "Eagle, RWKV, Eagle and Finch",
    "rwkv6": "Finch, RWKV, Eagle and Finch, RWKV6Attention",
    "rwkv7": "Goose, RWKV, RWKV7Attention",
    "s4": "structured state space, S4-NPLR, S4-DPLR, S4-LegS",
    "s4d": "diagonal S4, S4D-Lin",
    's4d(init="inv")': "S4D-Inv",
    's4d(init="legs")': "S4D-LegS",
    "s5": "simplified state space layer, S5SSM",
    "s5_hyena": "Hyena S5, S5Operator",
    "scornn": "scaled Cayley orthogonal RNN",
    "sgconv": "structured global convolution, GConv",
    "slstm": "xLSTM, scalar LSTM, extended long short-term memory",
    "sru": "simple recurrent unit",
    "spacetime": "companion SSM",
    "srwm": "self-referential weight matrix",
    "strongly_typed_rnn": "strongly-typed recurrent neural network, T-LSTM",
    'strongly_typed_rnn(variant="gru")': "T-GRU",
    'strongly_typed_rnn(variant="rnn")': "T-RNN",
    "tarnn": "time adaptive recurrent neural network",
    "tnn": "Toeplitz neural network, gated Toeplitz unit, GTU",
    "trans_normer": "TransNormerLLM, NormLinearAttention",
    "transformer_ls": "Long-Short Transformer",
    "transformer_xl": "Transfo XL",
    "u_rnn": "unitary RNN, unitary evolution RNN",
    "unicornn": "undamped independent controlled oscillatory RNN",
    "wave_rnn": "traveling wave RNN, wRNN",
    "xlstm_7b": "xLSTM, xLSTM-large, extended long short-term memory",
    # configurations of `linrec.models` with several mixers, or with a memory across the stack
    'preset("griffin")': "Griffin",
    'preset("recurrent-gemma-2b")': "RecurrentGemma",
    'preset("samba")': "Samba",
    'preset("sashimi")': "SaShiMi",
    'preset("h3-hybrid")': "H3 hybrid",
    'MemoryConfig(kind="recurrent_memory")': "Recurrent Memory Transformer, RMT",
    'MemoryConfig(kind="enhanced_recurrence")': "ERNIE-Doc",
    'MemoryConfig(kind="memformer")': "Memformer",
    'MemoryConfig(kind="temporal_latent_bottleneck")': "Temporal Latent Bottleneck, TLB",
    'MemoryConfig(kind="token_turing_machine")': "Token Turing Machine, TTM",
}


@functools.cache
def other_names() -> dict[str, tuple[str, ...]]:
    """Return the other names, each with the keys of `OTHER_NAMES` that have it."""
    found: dict[str, tuple[str, ...]] = {}
    for key, names in OTHER_NAMES.items():
        for name in names.split(", "):
            found[name] = (*found.get(name, ()), key)
    return found
