"""The learning rate as a pure function of the step."""

import math

from linrec.errors import ConfigError
from linrec.train.config import OptimConfig


def schedule_factor(step: int, config: OptimConfig, total_steps: int) -> float:
    """Return the share of the peak learning rate that a step uses: linear warm-up, then a fall.

        (n + 1) / w                                        n < w
        f + (1 - f) cos(pi (n - w) / (2 (N - w)))^2        otherwise, for "cosine"
        sqrt(w / (n + 1))                                  otherwise, for "inverse-sqrt"
        1                                                  otherwise, for "constant"

    with n the step, w `warmup_steps`, N `total_steps` and f = `min_lr` / `lr`. The first step moves already,
    the peak is reached at the last step of the warm-up, and `min_lr` one step after the end.

    Args:
        step: steps made before this one, from 0.
        config: "lr", "min_lr", "warmup_steps" and "schedule" of it are read.
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


def check_warmup(warmup_steps: int, total_steps: int, batches_per_epoch: int) -> None:
    """Refuse a warm-up that the run never gets out of.

    Raises:
        ConfigError: `warmup_steps` is not less than `total_steps`.
    """
    if warmup_steps >= total_steps:
        raise ConfigError(
            f"`optim.warmup_steps` must be less than the steps of the run = {total_steps} "
            f"({total_steps / batches_per_epoch:g} epochs of {batches_per_epoch} batches); "
            f"got {warmup_steps}. Pass --optim.warmup-steps {total_steps // 10}, say, or train longer."
        )
