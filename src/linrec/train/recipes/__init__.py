"""Recipes: functions that return a complete configuration, and say where its numbers come from.

One file per family; each recipe registers itself under its function's name.
"""

# in the order in which recipes are listed
from linrec.train.recipes import memory_horizon, text, images, long_range_arena, series, synthetic  # noqa: I001, F401
from linrec.train.recipes.registry import get_recipe, recipe, recipe_names, recipe_summary

__all__ = ["get_recipe", "recipe", "recipe_names", "recipe_summary"]
