"""The registry of recipes by name."""

from collections.abc import Callable

from linrec.errors import unknown
from linrec.lab.train.config import TrainConfig

_RECIPES: dict[str, Callable[[], TrainConfig]] = {}


def recipe(make: Callable[[], TrainConfig]) -> Callable[[], TrainConfig]:
    """Register a recipe under its function's name, with hyphens for underscores."""
    register(make.__name__, make)
    return make


def register(name: str, make: Callable[[], TrainConfig]) -> None:
    """Register a recipe under a name, with hyphens for underscores."""
    _RECIPES[name.replace("_", "-")] = make


def recipe_names() -> list[str]:
    """Return the names of all recipes.

    Example:
        >>> "memory-horizon" in recipe_names()
        True
    """
    return list(_RECIPES)


def recipe_summary(name: str) -> str:
    """Return the first line of a recipe's docstring."""
    return (_RECIPES[name].__doc__ or "").split("\n")[0]


def get_recipe(name: str) -> TrainConfig:
    """Return the configuration of a recipe.

    Args:
        name: a name from `recipe_names()`; hyphens and underscores are equivalent.

    Raises:
        ValueError: the recipe does not exist; the message gives the nearest match.

    Example:
        >>> get_recipe("memory-horizon").loop.epochs
        300
    """
    make = _RECIPES.get(name.replace("_", "-"))
    if make is None:
        raise unknown("recipe", name, _RECIPES)
    return make()
