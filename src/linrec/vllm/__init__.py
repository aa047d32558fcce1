"""A plugin of vLLM: `vllm serve FOLDER` serves a folder that `linrec publish` wrote.

The state of each recurrent layer is a row of bytes in vLLM's pool, and softmax attention has its keys and
values in vLLM's paged cache. vLLM finds the plugin by the entry point `vllm.general_plugins`.
"""

import logging

from linrec.errors import MissingExtraError

__all__ = ["register"]

ARCHITECTURE = "LinrecForCausalLM"
BACKEND = "LINREC"


def register() -> None:
    """Make linrec's models known to vLLM, which calls this in each of its processes, and maybe several times.

    With a version of vLLM that the plugin does not fit, this logs a warning and raises nothing, because vLLM
    may serve models of other libraries. Serving a model of linrec then fails with the same message.
    """
    from vllm import ModelRegistry

    # a string: the class is imported after vLLM has started its processes
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, "linrec.vllm.model:Model")
    try:
        from linrec import hf  # noqa: F401 - makes the configuration known to transformers
        from linrec.vllm.checks import Checks
        from linrec.vllm.private import MODELS_CONFIG_MAP, MambaAttentionBackendEnum
    except MissingExtraError as error:
        logging.getLogger(__name__).warning("%s", error)
        return
    MODELS_CONFIG_MAP[ARCHITECTURE] = Checks
    if not hasattr(MambaAttentionBackendEnum, BACKEND):
        MambaAttentionBackendEnum.register(BACKEND, "linrec.vllm.metadata.Backend")
