"""What can go wrong in training that is nobody's bug; each message is one line that a user can act on."""


class TrainError(Exception):
    """Base of all errors below: catch it to report a run that ended early in one line."""


class ConfigError(TrainError, ValueError):
    """A configuration that cannot be trained."""


class UntrustedCodeError(ConfigError):
    """A stored configuration that would run code of others."""


class RunFolderError(TrainError, ValueError):
    """A folder that is not, or not yet, or already a run."""


class CheckpointError(TrainError):
    """A checkpoint that could not be written or read."""


class DivergedError(TrainError):
    """The loss is no longer a number."""


class InterruptedRunError(TrainError):
    """The run was asked to stop, and has stopped after writing its checkpoint."""
