"""Generation: text, or any tokens, from a language model; one token at a time, from a state of constant size.

A prompt is read in parallel, in pieces. From then on each token is one step from the carried state, which can
be kept in a file. On CUDA the step is a captured graph.
"""

from linrec.generation.decoding import Generated, TokenStream, generate, stream
from linrec.generation.prompts import Prompts, pad_prompts
from linrec.generation.sampling import Candidates, Sampling, candidates, draw
from linrec.generation.state import GenerationState
from linrec.generation.state_file import StateFileError, fingerprint, load_state, save_state

__all__ = [
    "Candidates",
    "Generated",
    "GenerationState",
    "Prompts",
    "Sampling",
    "StateFileError",
    "TokenStream",
    "candidates",
    "draw",
    "fingerprint",
    "generate",
    "load_state",
    "pad_prompts",
    "save_state",
    "stream",
]
