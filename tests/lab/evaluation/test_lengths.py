import pytest

from linrec.lab.evaluation import default_lengths, parse_lengths

# the first column of HGRN's table 14
TABLE_14 = [512, 768, 1024, 1280, 1536, 1792, 2048, 3072, 4096, 5120, 6144, 7168]
TABLE_14 += [8192, 9216, 10240, 11264, 12288, 13312, 14336]


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("512", [512]),
        ("1024, 512,512", [512, 1024]),
        ("512,768,...,2048,3072,...,14336", TABLE_14),
        ("512,768,...,14336", [*range(512, 14337, 256)]),
        ("1,2,...,3", [1, 2, 3]),
    ],
)
def test_lists_of_lengths(text: str, lengths: list[int]) -> None:
    assert parse_lengths(text) == tuple(lengths)


@pytest.mark.parametrize("text", ["", "512,", "0", "-1", "512;1024", "1e3", "..", "5.5"])
def test_what_is_no_length(text: str) -> None:
    with pytest.raises(ValueError, match="--lengths must be positive numbers separated by commas"):
        parse_lengths(text)


@pytest.mark.parametrize(
    "text", ["...", "...,5", "5,...,9", "1,2,...", "1,2,...,x", "1,3,...,6", "5,3,...,9", "1,2,...,2"]
)
def test_dots_that_lead_nowhere(text: str) -> None:
    with pytest.raises(ValueError, match="three dots must follow two lengths") as error:
        parse_lengths(text)
    assert str(error.value).endswith(f"; got {text}.")


@pytest.mark.parametrize(
    ("trained", "n_tokens", "lengths"),
    [
        (512, 14337, TABLE_14),
        (512, 14336, TABLE_14[:-1]),
        (256, 513, [256, 512]),
        (256, 512, [256]),
        (256, 257, [256]),
        (256, 256, [255]),
        (20000, 30000, [*TABLE_14, 20000]),
    ],
)
def test_lengths_of_the_table_as_far_as_the_text_goes(
    trained: int, n_tokens: int, lengths: list[int]
) -> None:
    assert default_lengths(trained, n_tokens) == tuple(lengths)
