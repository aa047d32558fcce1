"""Time mixers, one file per paper. The file's name is the name that users type.

A mixer is found by its file: `names` lists the files of this folder and `get` imports one, so adding a model
is adding a file. The first entry of the file's `__all__` is the mixer's class, which is also an attribute of
this package: `from linrec.mixers import Mamba` imports its file alone.
"""

import importlib
import inspect
import sys
from typing import TYPE_CHECKING, Any, TypeVar, overload

from linrec.discovery import files_of, imported
from linrec.errors import folded, unknown, unknown_argument
from linrec.literals import MixerName, other_names
from linrec.nn.mixer import Mixer, State, Transitions

if TYPE_CHECKING:
    # made by `python docs/tables.py`
    # table: mixer_imports
    from linrec.mixers.aft import AFT as AFT
    from linrec.mixers.antisymmetric_rnn import AntisymmetricRNN as AntisymmetricRNN
    from linrec.mixers.attention import Attention as Attention
    from linrec.mixers.base_conv import BaseConv as BaseConv
    from linrec.mixers.block_recurrent import BlockRecurrent as BlockRecurrent
    from linrec.mixers.block_state import BlockState as BlockState
    from linrec.mixers.cfc import CfC as CfC
    from linrec.mixers.comba import Comba as Comba
    from linrec.mixers.compressive_transformer import CompressiveTransformer as CompressiveTransformer
    from linrec.mixers.cornn import CoRNN as CoRNN
    from linrec.mixers.ctrnn import CTRNN as CTRNN
    from linrec.mixers.decaying_fast_weights import DecayingFastWeights as DecayingFastWeights
    from linrec.mixers.delta_delta_net import DeltaDeltaNet as DeltaDeltaNet
    from linrec.mixers.delta_lstm import DeltaLSTM as DeltaLSTM
    from linrec.mixers.delta_net import DeltaNet as DeltaNet
    from linrec.mixers.dlr import DLR as DLR
    from linrec.mixers.dss import DSS as DSS
    from linrec.mixers.e_lstm import ELSTM as ELSTM
    from linrec.mixers.elman import Elman as Elman
    from linrec.mixers.eu_rnn import EURNN as EURNN
    from linrec.mixers.exp_rnn import ExpRNN as ExpRNN
    from linrec.mixers.falcon_h1 import FalconH1 as FalconH1
    from linrec.mixers.fast_grnn import FastGRNN as FastGRNN
    from linrec.mixers.fast_rnn import FastRNN as FastRNN
    from linrec.mixers.flash_gau import FlashGAU as FlashGAU
    from linrec.mixers.fnet import FNet as FNet
    from linrec.mixers.forgetting_transformer import ForgettingTransformer as ForgettingTransformer
    from linrec.mixers.gate_loop import GateLoop as GateLoop
    from linrec.mixers.gate_loop_attention import GateLoopAttention as GateLoopAttention
    from linrec.mixers.gated_delta_net import GatedDeltaNet as GatedDeltaNet
    from linrec.mixers.gated_delta_net_2 import GatedDeltaNet2 as GatedDeltaNet2
    from linrec.mixers.gated_delta_product import GatedDeltaProduct as GatedDeltaProduct
    from linrec.mixers.gilr import GILR as GILR
    from linrec.mixers.gla import GLA as GLA
    from linrec.mixers.gmlp import GMLP as GMLP
    from linrec.mixers.gru import GRU as GRU
    from linrec.mixers.gru_d import GRUD as GRUD
    from linrec.mixers.gss import GSS as GSS
    from linrec.mixers.h3 import H3 as H3
    from linrec.mixers.hawk import Hawk as Hawk
    from linrec.mixers.hgrn2 import HGRN2 as HGRN2
    from linrec.mixers.hgru import HGRU as HGRU
    from linrec.mixers.hippo_rnn import HiPPORNN as HiPPORNN
    from linrec.mixers.hyena import Hyena as Hyena
    from linrec.mixers.ind_rnn import IndRNN as IndRNN
    from linrec.mixers.infini_attention import InfiniAttention as InfiniAttention
    from linrec.mixers.irnn import IncrementalRNN as IncrementalRNN
    from linrec.mixers.jordan import Jordan as Jordan
    from linrec.mixers.kda import KimiDeltaAttention as KimiDeltaAttention
    from linrec.mixers.lem import LEM as LEM
    from linrec.mixers.lfm2 import LFM2 as LFM2
    from linrec.mixers.lightning_attention import LightningAttention as LightningAttention
    from linrec.mixers.linear_attention import LinearAttention as LinearAttention
    from linrec.mixers.linformer import Linformer as Linformer
    from linrec.mixers.lipschitz_rnn import LipschitzRNN as LipschitzRNN
    from linrec.mixers.liquid_s4 import LiquidS4 as LiquidS4
    from linrec.mixers.lmu import LMU as LMU
    from linrec.mixers.lru import LRU as LRU
    from linrec.mixers.ls_lstm import LSLSTM as LSLSTM
    from linrec.mixers.lssl import LSSL as LSSL
    from linrec.mixers.lstm import LSTM as LSTM
    from linrec.mixers.ltc import LTC as LTC
    from linrec.mixers.mamba import Mamba as Mamba
    from linrec.mixers.mamba2 import Mamba2 as Mamba2
    from linrec.mixers.mamba3 import Mamba3 as Mamba3
    from linrec.mixers.mega import Mega as Mega
    from linrec.mixers.mesa_net import MesaNet as MesaNet
    from linrec.mixers.min_gru import MinGRU as MinGRU
    from linrec.mixers.min_lstm import MinLSTM as MinLSTM
    from linrec.mixers.mlstm import MLSTM as MLSTM
    from linrec.mixers.neural_wave_machine import NeuralWaveMachine as NeuralWaveMachine
    from linrec.mixers.nn_rnn import NNRNN as NNRNN
    from linrec.mixers.noisy_rnn import NoisyRNN as NoisyRNN
    from linrec.mixers.ode_fast_weights import OdeFastWeights as OdeFastWeights
    from linrec.mixers.ode_rnn import OdeRNN as OdeRNN
    from linrec.mixers.on_lstm import OnLSTM as OnLSTM
    from linrec.mixers.preconditioned_delta_net import PreconditionedDeltaNet as PreconditionedDeltaNet
    from linrec.mixers.qrnn import QRNN as QRNN
    from linrec.mixers.r_transformer import RTransformer as RTransformer
    from linrec.mixers.recurrent_attention_network import (
        RecurrentAttentionNetwork as RecurrentAttentionNetwork,
    )
    from linrec.mixers.recurrent_delta_net import RecurrentDeltaNet as RecurrentDeltaNet
    from linrec.mixers.recurrent_positions import RecurrentPositions as RecurrentPositions
    from linrec.mixers.reformer import Reformer as Reformer
    from linrec.mixers.relit import ReLiT as ReLiT
    from linrec.mixers.retnet import RetNet as RetNet
    from linrec.mixers.rfa import RFA as RFA
    from linrec.mixers.rg_lru import RGLRU as RGLRU
    from linrec.mixers.rsa import RSA as RSA
    from linrec.mixers.rwkv4 import RWKV4 as RWKV4
    from linrec.mixers.rwkv5 import RWKV5 as RWKV5
    from linrec.mixers.rwkv6 import RWKV6 as RWKV6
    from linrec.mixers.rwkv7 import RWKV7 as RWKV7
    from linrec.mixers.s4 import S4 as S4
    from linrec.mixers.s4d import S4D as S4D
    from linrec.mixers.s5 import S5 as S5
    from linrec.mixers.s5_hyena import S5Hyena as S5Hyena
    from linrec.mixers.scornn import ScoRNN as ScoRNN
    from linrec.mixers.sgconv import SGConv as SGConv
    from linrec.mixers.slstm import SLSTM as SLSTM
    from linrec.mixers.spacetime import SpaceTime as SpaceTime
    from linrec.mixers.sru import SRU as SRU
    from linrec.mixers.srwm import SRWM as SRWM
    from linrec.mixers.strongly_typed_rnn import StronglyTypedRNN as StronglyTypedRNN
    from linrec.mixers.synthesizer import Synthesizer as Synthesizer
    from linrec.mixers.tarnn import TARNN as TARNN
    from linrec.mixers.tnn import TNN as TNN
    from linrec.mixers.trans_normer import TransNormer as TransNormer
    from linrec.mixers.transformer_ls import TransformerLS as TransformerLS
    from linrec.mixers.transformer_xl import TransformerXL as TransformerXL
    from linrec.mixers.u_rnn import URNN as URNN
    from linrec.mixers.unicornn import UnICORNN as UnICORNN
    from linrec.mixers.wave_rnn import WaveRNN as WaveRNN
    from linrec.mixers.xlstm_7b import XLSTM7B as XLSTM7B
    # end of table
else:
    # unseen by type checkers, for which a module with `__getattr__` has every attribute
    def __getattr__(name: str) -> type[Mixer]:
        if not name[:1].isupper():
            raise AttributeError(f"module 'linrec.mixers' has no attribute {name!r}")
        try:
            found = get(name)
        except ValueError as error:
            raise AttributeError(str(error)) from error
        if found.__name__ != name:
            raise AttributeError(
                f"module 'linrec.mixers' has no attribute {name!r}; did you mean {found.__name__!r}?"
            )
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *(get(name).__name__ for name in names())})


__all__ = ["Mixer", "MixerName", "State", "Transitions", "build", "canonical", "get", "names"]

M = TypeVar("M", bound=Mixer)


# layers of `linrec.models` that stand among mixers, but read no sequences
LAYERS = ("s4nd",)


def names() -> list[str]:
    """Names of all mixers, sorted.

    Example:
        >>> "gate_loop" in names()
        True
    """
    return files_of(__path__)


def canonical(name: str, *, what: str = "mixer") -> str:
    """Return the name of a mixer's file, which configurations store, for another name of the mixer.

    Args:
        name: a name from `names()`; the name of the class; or the name of a paper or of released code from
            `linrec.literals`, if it stands for a single mixer with its default arguments. Case, spaces,
            hyphens and underscores do not count. Import paths as in `get` are returned as they are.
        what: the argument or the kind of thing that the name is for, as the error says it.

    Raises:
        ValueError: the name stands for no mixer or for several; the message gives the mixers it may mean.

    Example:
        >>> canonical("HGRN"), canonical("Mamba-2")
        ('hgru', 'mamba2')
    """
    file = name.replace("-", "_")
    # to look through the folder takes milliseconds
    if ":" in name or f"{__name__}.{file}" in sys.modules:
        return name if ":" in name else file
    if name in LAYERS:
        return name
    files = names()
    meant = {folded(other): keys for other, keys in other_names().items()}
    meant |= {folded(each): (each,) for each in files}
    found, *more = meant.get(folded(name), ("",))
    if more or found not in files:
        raise unknown(what, name, files, other_names())
    return found


def get(name: str) -> type[Mixer]:
    """Return the class of a mixer.

    Args:
        name: a name that `canonical` takes; or where a mixer of your own is, as in
            "my_package.my_module:MyMixer", a `Mixer` that Python can import, which runs the module's code.

    Raises:
        ValueError: there is no such mixer, or several; the message gives the nearest ones.

    Example:
        >>> get("gate_loop").__name__
        'GateLoop'
    """
    if ":" in name:
        return imported(name, "mixer", "a linrec.mixers.Mixer", _is_mixer)
    module = importlib.import_module(f"{__name__}.{canonical(name)}")
    return getattr(module, module.__all__[0])


@overload
def build(name: MixerName, d_model: int, **arguments: Any) -> Mixer: ...
@overload
def build(name: type[M], d_model: int, **arguments: Any) -> M: ...
def build(name: str | type[Mixer], d_model: int, **arguments: Any) -> Mixer:
    """Return a mixer of width `d_model` with its keyword arguments.

    Args:
        name: a name, or the class of a mixer. Type checkers know the names from `names()`. A name that is
            only known when the program runs, such as an import path from a file, is `build(get(name), ...)`.
        d_model: width of the sequence.
        arguments: keyword arguments of the mixer.

    Raises:
        ValueError: there is no such mixer, or it takes no such argument; the message names the nearest.

    Example:
        >>> build("gate_loop", 16, n_heads=4).state_size
        64
    """
    mixer = get(name) if isinstance(name, str) else name
    known = [p.name for p in inspect.signature(mixer).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for argument in arguments:
        if argument not in known:
            of_file = mixer.__module__.startswith(f"{__name__}.")
            called = mixer.__module__.rpartition(".")[2] if of_file else mixer.__name__
            raise unknown_argument(f"mixer {called!r}", argument, known)
    return mixer(d_model, **arguments)


def _is_mixer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Mixer) and value is not Mixer
