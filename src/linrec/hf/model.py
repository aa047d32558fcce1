"""linrec's language models as models of transformers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationMixin,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from linrec.hf.cache import CACHE, StateCache, cache_of_call
from linrec.hf.config import LinrecConfig
from linrec.hf.masks import Reading, check_last_piece, reading
from linrec.hf.weight_decay import name_undecayed
from linrec.models import InitialState, LanguageModel
from linrec.nn import Head
from linrec.nn.parameters import Float32Module, tensor_options
from linrec.restored import RestoredModule
from linrec.rules import require
from linrec.tensor_files import check_sealed

__all__ = ["LinrecForCausalLM", "LinrecForSequenceClassification", "LinrecModel"]


class LinrecPreTrainedModel(RestoredModule, PreTrainedModel):
    """Base class of the models: initialisation, tied weights, checkpointing."""

    config_class = LinrecConfig
    base_model_prefix = "model"
    _is_stateful = True
    _no_split_modules = ("Block",)
    _skip_keys_device_placement = ("cache", "past_key_values")
    supports_gradient_checkpointing = True

    if TYPE_CHECKING:
        # transformers' attributes have no types, and are no tensors or modules alone
        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *arguments: Any, **options: Any
    ) -> Any:
        """Load a model as transformers does; weights in a folder of `linrec publish` are verified."""
        # a name on the hub is no folder, and None has no files
        folder = Path(os.devnull if pretrained_model_name_or_path is None else pretrained_model_name_or_path)
        check_weights(folder)
        return super().from_pretrained(pretrained_model_name_or_path, *arguments, **options)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise the tensors of a module that the checkpoint lacks; transformers guards all others."""
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    def initialize_weights(self) -> None:
        """Initialise the tensors that the checkpoint lacks."""
        super().initialize_weights()
        self.base_model.fresh = None

    def tune_state(self) -> None:
        """Freeze all parameters, and add a trainable initial state; see `linrec.models.InitialState`.

        `save_pretrained` and `from_pretrained` keep the state.
        """
        self.requires_grad_(False)
        model = self.base_model
        model.initial_state = InitialState(model.body).to(**tensor_options(model.body.embedding))
        model.config.tuned_state = True

    def post_init(self) -> None:
        """Finish the construction: say by name which parameters are shared, and which do not decay."""
        name_undecayed(self)
        self._tied_weights_keys = self.get_expanded_tied_weights_keys()
        super().post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return the parameters that are shared: the name of each, by that of a copy."""
        names: dict[int, str] = {}
        tied = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            first = names.setdefault(id(parameter), name)
            if first != name:
                tied[name] = first
        return tied

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Compute every block again in the backward pass, without reentrant autograd."""
        require(
            every_n_layers == 1 and not offload,
            "linrec recomputes every block and keeps activations on their device; got "
            f"`every_n_layers` = {every_n_layers}, `offload` = {offload}. Leave both out.",
        )
        self._recompute(True)

    def gradient_checkpointing_disable(self) -> None:
        """Keep the activations of all blocks."""
        self._recompute(False)

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether blocks are computed again in the backward pass."""
        # the inherited property warns of its name, though PEFT reads it
        return bool(self.base_model.gradient_checkpointing)

    def _recompute(self, wanted: bool) -> None:
        self.base_model.body.recompute = wanted


class LinrecModel(LinrecPreTrainedModel):
    """The model without its head; its cache is a `StateCache`.

    Each row runs as if its masked steps were not there, wherever they stand. The output at a masked step is
    the output of the row's last step before it in the call, so `generate` also continues rows with padding on
    the right. Packed documents, as in batches of `DataCollatorWithFlattening`, do not read each other.

    Args:
        config: the configuration.

    Raises:
        UntrustedCodeError: the configuration names a mixer by an import path that is not imported yet.
    """

    def __init__(self, config: LinrecConfig) -> None:
        super().__init__(config)
        dtype, own = torch.get_default_dtype(), config.model_config()
        # constants are computed in float32
        with default_dtype(torch.float32):
            body = LanguageModel(own)
            self.initial_state = InitialState(body).to(dtype) if config.tuned_state else None
            self.body = body.to(dtype)
        del self.body.head
        # transformers loads a checkpoint into a model on the meta device
        self.loading = self.body.embedding.weight.is_meta
        # a copy that is initialised as linrec does, while a checkpoint that lacks tensors is loaded
        self.fresh: tuple[dict[str, Tensor], dict[nn.Module, str]] | None = None
        self._keep_in_fp32_modules_strict = set(_names_in_float32(self.body))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module as linrec does; constants, such as HiPPO matrices, are in no checkpoint."""
        if not self.loading or not [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            return
        if self.fresh is None:
            # loading draws no random numbers of the caller's
            with torch.random.fork_rng(devices=[]), torch.device("cpu"), default_dtype(torch.float32):
                twin = LinrecModel(self.config)
            tensors = dict([*twin.named_parameters(), *twin.named_buffers()])
            self.fresh = tensors, {part: name for name, part in self.named_modules()}
        tensors, names = self.fresh
        for name, tensor in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ):
            init.copy_(tensor, tensors[f"{names[module]}.{name}"])

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether blocks are computed again in the backward pass."""
        return self.body.recompute

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.body.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding."""
        self.body.embedding = value  # type: ignore[assignment]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        position_ids: Tensor | None = None,
        past_key_values: StateCache | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the input of the head (b, t, d_model), the cache, and `hidden_states` if wanted.

        `hidden_states` are the inputs of all blocks, and the input of the head. The output holds the cache as
        `cache`, or as `past_key_values` before transformers 5.24.

        Args:
            input_ids: tokens (b, t).
            attention_mask: 0 at steps to leave out, and 1 or the number of a document at others (b, n), for
                all steps so far or for the new steps.
            cache: cache of the earlier steps; it is updated.
            inputs_embeds: embeddings (b, t, d_model) in place of tokens.
            use_cache: whether to return a cache; None means the configuration's choice, but none in training
                without `cache`.
            position_ids: positions (b, t). Documents begin at 0, and where positions do not increase; else
                linrec counts positions itself.
            past_key_values: another name of `cache`.
            output_hidden_states: whether to return hidden states; None means the configuration's choice.
            kwargs: `cu_seq_lens_q`, `cu_seq_lens_k`, `cu_seqlens` or `seq_idx` of packed documents. A cache
                and other tensors are refused, and other values are not used.

        Raises:
            TypeError: a cache or a tensor that linrec does not know.
            ValueError: both or neither of tokens and embeddings; a mask, positions or documents of another
                shape, or out of range; or packed documents for a model with a tuned state.
        """
        cache = cache_of_call(cache, past_key_values, kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of `input_ids` and `inputs_embeds` must be given.")
        x = self.body.embedding(cast(Tensor, input_ids)) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = cache is not None or (self.config.use_cache and not self.training)
        if use_cache and cache is None:
            cache = StateCache()
        states = None if cache is None else cache.states
        mask, reset = Reading(None, None)
        # a compiled step goes on with its text: a mask that grows would be compiled at every length
        if x.shape[1] != 1 or states is None or not torch.compiler.is_compiling():
            past, read = (0, 0) if cache is None else (cache.get_seq_length(), cache.read)
            mask, reset = reading(x, past, read, attention_mask, position_ids, kwargs)
        if reset is not None and self.initial_state is not None:
            raise ValueError(
                "a model with a tuned state must have one document in each row: got packed documents, which "
                "start from zeros. Pass each document as a row, with `attention_mask`."
            )
        if states is None and self.initial_state is not None:
            states = self.initial_state(self.body.init_state(len(x), device=x.device))
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        options: dict[str, Any] = {"keep_state": use_cache, "every_layer": output_hidden_states}
        x, states = self.body.transformed(x, states, reset=reset, mask=mask, **options)
        if use_cache and cache is not None:
            cache.write(states, x.shape[1], mask)
        hidden = x.split(self.config.hidden_size, -1)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden[-1],
            hidden_states=hidden if output_hidden_states else None,
            **{CACHE: cache if use_cache else None},
        )


class LinrecForSequenceClassification(GenericForSequenceClassification, LinrecPreTrainedModel):
    """The model with a linear layer on the last token of each sequence; `config.num_labels` is its width.

    The last token is the last that is not `config.pad_token_id`, which batches of several sequences need.
    """


class LinrecForCausalLM(LinrecPreTrainedModel, GenerationMixin):
    """The language model, for `generate`, `pipeline`, `Trainer`, PEFT and lm-eval.

    `generate(cache_implementation="static")` compiles the step on a GPU.

    Args:
        config: the configuration.
    """

    def __init__(self, config: LinrecConfig) -> None:
        super().__init__(config)
        self.model = LinrecModel(config)
        self.lm_head = _head(config)
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return the parameters that are shared, the tied head included: the name of each, by a copy's."""
        tied = super().get_expanded_tied_weights_keys(all_submodels)
        if self.config.tie_word_embeddings:
            tied["lm_head.weight"] = "model.body.embedding.weight"
        return tied

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the head; a plain layer, as resizing makes it, gets the cap of the logits."""
        if type(value) is nn.Linear:
            with torch.device("meta"):
                head = Head(value.in_features, value.out_features, cap=self.config.model_config().logit_cap)
            head.weight, head.bias = value.weight, value.bias
            value = head
        self.lm_head = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: StateCache | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the loss where there are labels, the logits, the cache, and `hidden_states` if wanted.

        The arguments are those of `LinrecModel.forward`, and three more. `labels` are tokens (b, t), -100
        where there is no target; they are shifted here. `logits_to_keep` is the number of last steps, or the
        indices of steps, whose logits are returned; 0 is all. `kwargs` are passed to the model, and to the
        loss, such as `num_items_in_batch`.
        """
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            cache=cache_of_call(cache, past_key_values, kwargs),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            position_ids=position_ids,
            output_hidden_states=output_hidden_states,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(found.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=found.hidden_states, **{CACHE: found.get(CACHE)}
        )

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """Return the mask of the steps, which takes the place of masks of pairs of steps."""
        return attention_mask

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        cache = cache_of_call(
            model_kwargs.pop("cache", None), model_kwargs.pop("past_key_values", None), model_kwargs
        )
        if cache is not None:
            require(generation_config.use_cache is not False, "`cache` needs `use_cache=True`; got False.")
            # transformers makes positions from the mask, which is as long as the tokens if it is not given
            before, steps = cache.get_seq_length(), model_kwargs["position_ids"].shape[-1]
            require(
                steps > before,
                f"`cache` has {before} steps, so tokens or `attention_mask` must be longer; got {steps}. "
                "Pass the tokens of the cache too, or a mask over them and the new tokens.",
            )
            model_kwargs[CACHE] = cache
            new = model_kwargs.get("inputs_embeds")
            if new is not None and new.shape[1] < steps:
                # new embeddings alone: transformers leaves out the first ones, as many as the cache has steps
                model_kwargs["inputs_embeds"] = nn.functional.pad(new, (0, 0, steps - new.shape[1], 0))
            # transformers notes that the cache is the caller's
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        elif generation_config.use_cache is not False:
            static = generation_config.cache_implementation == "static"
            model_kwargs[CACHE] = StateCache(static=static)
        mask = model_kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2 and generation_config.use_cache is not False:
            past = 0 if cache is None else cache.get_seq_length()
            check_last_piece(mask, past, generation_config.prefill_chunk_size)


def check_weights(folder: Path) -> None:
    """Raise ValueError if a file of weights in a folder of `linrec publish` is damaged."""
    for path in folder.glob("*.safetensors"):
        try:
            check_sealed(path)
        except ValueError as error:
            raise ValueError(f"{path} cannot be loaded: {error}. Publish the run again.") from error


def _head(config: LinrecConfig) -> nn.Module:
    """Return the head of linrec's model."""
    own = config.model_config()
    bias = not own.tie_embeddings if own.head_bias is None else own.head_bias
    return Head(own.d_model, own.vocab_size, bias=bias, cap=own.logit_cap)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Return a context in which new tensors have a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _names_in_float32(model: nn.Module) -> Iterator[str]:
    """Yield the names of the tensors that stay in float32 when others are cast to half precision."""
    kept = {
        id(tensor)
        for module in model.modules()
        if isinstance(module, Float32Module)
        for tensor in module.kept_in_float32()
    }
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) in kept:
            yield name


AutoConfig.register("linrec", LinrecConfig)
AutoModel.register(LinrecConfig, LinrecModel)
AutoModelForCausalLM.register(LinrecConfig, LinrecForCausalLM)
AutoModelForSequenceClassification.register(LinrecConfig, LinrecForSequenceClassification)
