"""Generation of tokens with a language model, one token at a time from a cached state of constant size.

The prompt is processed in parallel, in chunks. Each generated token is then a single step from the cached
state, which can be saved to a file. On CUDA, the step is captured as a CUDA graph.
"""

from linrec.generation.beams import Beams, beam_search
from linrec.generation.decoding import Generated, TokenStream, generate, stream
from linrec.generation.prompts import Prompts, pad_prompts
from linrec.generation.sampling import Candidates, Sampling, candidates, draw
from linrec.generation.state import GenerationState
from linrec.generation.state_file import StateFileError, fingerprint, load_state, save_state

__all__ = [
    "Beams",
    "Candidates",
    "Generated",
    "GenerationState",
    "Prompts",
    "Sampling",
    "StateFileError",
    "TokenStream",
    "beam_search",
    "candidates",
    "draw",
    "fingerprint",
    "generate",
    "load_state",
    "pad_prompts",
    "save_state",
    "stream",
]
