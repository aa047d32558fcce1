"""Lists of window lengths: parsing, and the default."""

from collections.abc import Sequence

from linrec.errors import ConfigError

__all__ = ["default_lengths", "parse_lengths"]

TABLE_14 = (*range(512, 2048, 256), *range(2048, 14336 + 1, 1024))


def parse_lengths(text: str) -> tuple[int, ...]:
    """Return the lengths of a list such as "512,768,...,2048,3072,...,14336".

    Three dots continue the two lengths before them in equal steps, up to the length after them.

    Args:
        text: positive integers and three dots, separated by commas.

    Returns:
        The distinct lengths, ascending.

    Raises:
        ConfigError: the text is not a valid list.

    Example:
        >>> parse_lengths("512,768,...,1536,4096")
        (512, 768, 1024, 1280, 1536, 4096)
    """
    lengths: list[int] = []
    words = [word.strip() for word in text.split(",")]
    for place, word in enumerate(words):
        if word == "...":
            lengths += _between(lengths, words[place + 1 : place + 2])
            continue
        if not word.isdecimal() or int(word) < 1:
            raise ConfigError(
                f"--lengths must be positive numbers separated by commas, such as 512,1024; got {word!r}."
            )
        lengths.append(int(word))
    return tuple(sorted(set(lengths)))


def default_lengths(trained: int, n_tokens: int) -> tuple[int, ...]:
    """Return the lengths of HGRN's table 14 and the training length, as far as they fit into a text.

    Args:
        trained: tokens of context in training.
        n_tokens: tokens of the text; a window of length n needs n + 1 tokens.

    Returns:
        The lengths, ascending. If the text is too short for all lengths, `n_tokens - 1` is the only length.

    Source:
        HGRN (Qin, Yang and Zhong, 2023), table 14.

    Example:
        >>> default_lengths(256, n_tokens=1000), default_lengths(512, n_tokens=100)
        ((256, 512, 768), (99,))
    """
    lengths = sorted({trained, *TABLE_14})
    return tuple(length for length in lengths if length < n_tokens) or (n_tokens - 1,)


def _between(before: Sequence[int], after: Sequence[str]) -> list[int]:
    """Return the lengths that replace three dots."""
    end = int(after[0]) if after and after[0].isdecimal() else 0
    step = before[-1] - before[-2] if len(before) > 1 else 0
    if step <= 0 or end <= before[-1] or (end - before[-1]) % step:
        raise ConfigError(
            "--lengths: three dots must follow two lengths, whose difference is the step, and precede a "
            f"length that is reached in equal steps, as in 512,768,...,1536; got "
            f"{','.join(map(str, [*before[-2:], '...', *after]))}."
        )
    return list(range(before[-1] + step, end, step))
