import pytest

from linrec.errors import nearest, unknown


@pytest.mark.parametrize(
    ("name", "expected"),
    [("gateloop", "gate_loop"), ("GATE-LOOP", "gate_loop"), ("attn", "attention"), ("scan", "scan")],
)
def test_nearest_ignores_case_and_hyphens(name: str, expected: str) -> None:
    assert nearest(name, ["attention", "gate_loop", "scan"]) == expected


def test_nearest_needs_a_choice() -> None:
    with pytest.raises(ValueError, match="at least one name"):
        nearest("scan", [])


def test_unknown_names_the_nearest_match_and_everything_that_exists() -> None:
    error = unknown("backend", "trition", ["torch", "triton"])
    assert isinstance(error, ValueError)
    assert str(error) == (
        "there is no backend 'trition'; did you mean 'triton'? Choose from: 'torch', 'triton'."
    )


def test_unknown_without_choices_or_with_a_name_that_is_no_string() -> None:
    assert "none to choose from" in str(unknown("recipe", "x", []))
    assert "there is no mode 3;" in str(unknown("mode", 3, ["scan"]))
