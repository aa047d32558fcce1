"""Sequence models: a residual block; models of tokens, sequences and images; presets of published models."""

from linrec.models.attentive_recurrence import AttentiveRecurrence, AttentiveRecurrenceConfig
from linrec.models.bidirectional import Bidirectional
from linrec.models.block import Block
from linrec.models.config import MemoryConfig, ModelConfig, StackConfig
from linrec.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from linrec.models.enhanced_recurrence import EnhancedRecurrence
from linrec.models.image_classifier import ImageClassifier, ImageClassifierConfig
from linrec.models.image_scan import ImageScan
from linrec.models.initial_state import InitialState
from linrec.models.language_model import LanguageModel
from linrec.models.memformer import Memformer
from linrec.models.presets import image_preset, image_preset_names, preset, preset_names
from linrec.models.recurrent_memory import RecurrentMemory
from linrec.models.s4nd import S4ND
from linrec.models.sequence_classifier import SequenceClassifier, SequenceClassifierConfig
from linrec.models.sequence_encoder import EncoderConfig, SequenceEncoder
from linrec.models.stack import build_mixer, make_blocks
from linrec.models.stack_memory import StackMemory
from linrec.models.temporal_latent_bottleneck import TemporalLatentBottleneck
from linrec.models.token_turing_machine import TokenTuringMachine

__all__ = [
    "S4ND",
    "AttentiveRecurrence",
    "AttentiveRecurrenceConfig",
    "Bidirectional",
    "Block",
    "EncoderConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "EnhancedRecurrence",
    "ImageClassifier",
    "ImageClassifierConfig",
    "ImageScan",
    "InitialState",
    "LanguageModel",
    "Memformer",
    "MemoryConfig",
    "ModelConfig",
    "RecurrentMemory",
    "SequenceClassifier",
    "SequenceClassifierConfig",
    "SequenceEncoder",
    "StackConfig",
    "StackMemory",
    "TemporalLatentBottleneck",
    "TokenTuringMachine",
    "build_mixer",
    "image_preset",
    "image_preset_names",
    "make_blocks",
    "preset",
    "preset_names",
]
