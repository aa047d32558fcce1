"""Tokenizers of linrec as tokenizers of transformers, with the same ids."""

from linrec.extras import import_extra
from linrec.text import ByteTokenizer, CharacterTokenizer, HuggingFaceTokenizer, Tokenizer

import_extra("transformers", "a tokenizer of transformers", extra="hf")

from tokenizers import Regex, decoders, models, pre_tokenizers  # noqa: E402
from tokenizers import Tokenizer as Backend  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

__all__ = ["fast_tokenizer"]

# spelling of the end-of-document token of bytes, which has no bytes
END = "<|endoftext|>"


def fast_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return a tokenizer of transformers that gives every text the same token ids.

    A text that spells out the end-of-document token, "<|endoftext|>" for bytes, gets this token.
    The end-of-document token, if any, also pads batches and starts empty texts. A tokenizer of characters has
    no such token, so it cannot pad.

    Args:
        tokenizer: a tokenizer of `linrec.text`.

    Raises:
        TypeError: the tokenizer is of another class.

    Example:
        >>> from linrec.text import ByteTokenizer
        >>> fast_tokenizer(ByteTokenizer())("né").input_ids
        [110, 195, 169]
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
    special = {} if end is None else {"bos_token": end, "eos_token": end, "pad_token": end}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, padding_side="left", **special
    )


def _of_bytes() -> Backend:
    # the alphabet of byte-level tokenizers: a printable byte is its own character, and the n-th of the other
    # bytes is character 256 + n
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    backend = Backend(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    return backend


def _of_characters(characters: str) -> Backend:
    backend = Backend(models.WordLevel({character: place for place, character in enumerate(characters)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return backend
