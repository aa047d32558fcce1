"""The learning rate as a pure function of the step."""

import dataclasses
import math
import warnings

from linrec.lab.train.config import OptimConfig


def schedule_factor(step: int, config: OptimConfig, total_steps: int) -> float:
    """Return the learning rate of a step as a fraction of the peak learning rate.

    The warm-up is linear. The factor of step n is

        (n + 1) / w                                        n < w
        f + (1 - f) cos(pi (n - w) / (2 (N - w)))^2        otherwise, for "cosine"
        sqrt(w / (n + 1))                                  otherwise, for "inverse-sqrt"
        1                                                  otherwise, for "constant"

    where w is `warmup_steps`, N is `total_steps`, and f is `min_lr` / `lr`. The learning rate is positive at
    the first step, and at its peak at the last step of the warm-up. The cosine would reach `min_lr` one step
    after the last step.

    Args:
        step: number of the step, from 0.
        config: the optimiser's configuration.
        total_steps: steps of the whole run, more than `warmup_steps`.

    Returns:
        A factor in [0, 1].

    Source: GateLoop (Katsch 2023), tables 3 and 4: "cosine decay (linear warm-up)"; HGRN (Qin, Yang and Zhong
    2023), table 16: "Inverse sqrt".

    Example:
        >>> config = OptimConfig(warmup_steps=2)
        >>> [round(schedule_factor(step, config, total_steps=6), 6) for step in (0, 1, 2, 4)]
        [0.5, 1.0, 1.0, 0.5]
    """
    warmup_steps = config.warmup_steps
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "inverse-sqrt":
        return math.sqrt(warmup_steps / (step + 1))
    final = config.min_lr / config.lr
    return (
        final
        + (1 - final) * math.cos(math.pi / 2 * (step - warmup_steps) / (total_steps - warmup_steps)) ** 2
    )


def cut_warmup(config: OptimConfig, total_steps: int) -> OptimConfig:
    """Return the configuration; a warm-up that is not shorter than the run is cut to a tenth of the run.

    Warns:
        UserWarning: the warm-up is cut.

    Example:
        >>> cut_warmup(OptimConfig(warmup_steps=2), 10).warmup_steps
        2
    """
    if config.warmup_steps < total_steps:
        return config
    shorter = dataclasses.replace(config, warmup_steps=max(1, total_steps // 10))
    warnings.warn(
        f"`optim.warmup_steps` = {config.warmup_steps} is not less than the steps of the run, {total_steps}, "
        f"so the warm-up is cut to {shorter.warmup_steps} steps. Pass --optim.warmup-steps to change it.",
        stacklevel=2,
    )
    return shorter
