"""Tokenizers of linrec as tokenizers of transformers, with the same ids."""

from typing import Any

import torch

from linrec.extras import import_extra
from linrec.text import ByteTokenizer, CharacterTokenizer, HuggingFaceTokenizer, Tokenizer

import_extra("transformers", "a tokenizer of transformers", extra="hf")

from tokenizers import Regex, decoders, models, pre_tokenizers  # noqa: E402
from tokenizers import Tokenizer as Backend  # noqa: E402
from torch import nn  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from linrec.hf.model import LinrecForCausalLM  # noqa: E402

__all__ = ["add_end", "fast_tokenizer", "make_room"]

# spellings of tokens that stand for no text
END, PAD = "<|endoftext|>", "<|pad|>"
# pads of other tokenizers
USUAL_PADS = (PAD, "<pad>", "[PAD]", "<|padding|>", "<PAD>")
# a byte that is in no text: UTF-8 does not use it
NO_TEXT = 0xFF
# how far the logit of a new token is below the mean
UNLIKELY = 10.0


def fast_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return a tokenizer of transformers that gives every text the same token ids.

    A text that spells out the end-of-document token, "<|endoftext|>" for bytes, gets this token. It also
    starts empty texts. A token of its own, "<|pad|>" or the vocabulary's, pads batches, so that the end of a
    text has a loss. For bytes it is the byte 255, which UTF-8 does not use. If the vocabulary has no pad, its
    id follows the vocabulary, and the model needs `make_room`.

    Args:
        tokenizer: a tokenizer of `linrec.text`.
    """
    end = None
    if isinstance(tokenizer, ByteTokenizer):
        backend, end = _of_bytes(), END
    elif isinstance(tokenizer, CharacterTokenizer):
        backend = _of_characters(tokenizer.characters)
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        # linrec adds no special tokens around a text
        backend, end = Backend.from_str(tokenizer.backend.to_str()), tokenizer.end
        backend.post_processor = None
    else:
        raise TypeError(
            "`tokenizer` must be a ByteTokenizer, CharacterTokenizer or HuggingFaceTokenizer; got a "
            f"{type(tokenizer).__name__}."
        )
    special = {} if end is None else {"bos_token": end, "eos_token": end}
    pads = (pad for pad in USUAL_PADS if pad != end and backend.token_to_id(pad) is not None)
    special["pad_token"] = next(pads, PAD)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, padding_side="left", **special
    )


def add_end(tokenizer: PreTrainedTokenizerFast) -> None:
    """Give a tokenizer without an end-of-document token, such as a tokenizer of characters, the token."""
    if tokenizer.eos_token is None:
        tokenizer.add_special_tokens({"eos_token": END})


def make_room(model: LinrecForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Give the model a row of its embedding and its head for each token, where it has fewer.

    A new row is the mean of the others, with a bias that makes the token unlikely until it is trained. The
    logits of the other tokens stay as they are.
    """
    config = model.config
    before, needed = config.vocab_size, 1 + max(tokenizer.get_vocab().values())
    if needed <= before:
        return
    if model.lm_head.bias is None:
        model.lm_head.bias = nn.Parameter(model.lm_head.weight.new_zeros(before))
        config.model = config.model | {"head_bias": True}
    # the rows that torch draws are replaced
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model.resize_token_embeddings(needed, mean_resizing=False)
        head: Any = model.lm_head
        for tensor in (*model.get_input_embeddings().parameters(), *head.parameters()):
            tensor[before:] = tensor[:before].mean(0)
        head.bias[before:] -= UNLIKELY


def _of_bytes() -> Backend:
    # the alphabet of byte-level tokenizers: a printable byte is its own character, and the n-th of the other
    # bytes is character 256 + n
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    letters[NO_TEXT] = PAD
    backend = Backend(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END, PAD])
    return backend


def _of_characters(characters: str) -> Backend:
    backend = Backend(models.WordLevel({character: place for place, character in enumerate(characters)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return backend
