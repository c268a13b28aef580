"""What is declared of a family of models besides its layers: the names of its classes and modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lookahead.model.families.operations import Norm, Residual


class Family(NamedTuple):
    """A family of models.

    Attributes:
        module: The name of its folder in transformers.
        name: The first part of its class names, such as "Llama" of "LlamaDecoderLayer".
        layer: Declares a decoder layer.
        norm: Declares the norm after the last layer.
        text: The rests of the class names on the way to its decoder, with dots between them.
        kind: The rest of the class name of its decoder layers.
        beside: The name of the second input of its layers; empty for none.
        decoder: The names that lead to the decoder in the model, with dots between them.
        embedding: The name of the embedding in the decoder.
        cache: The name under which its layers take the cache, if it is not the usual one.
        last_norm: The name of the norm after the last layer.
        rotary: The name of the rotary embedding in the decoder.
        embedding_factor: The name in the configuration of the factor of embeddings; empty for none.
        logits_divisor: Likewise, of the divisor of logits.
        logits_cap: Likewise, of the bound of logits.
        causal: The rest of the class name of the model.
        layers: The name of the layers in the decoder.
        placed: Adds learned positions, `[rows, tokens]`, to the embedded tokens of a decoder, `[rows, tokens, size]`.
    """

    module: str
    name: str
    layer: Callable[[Any], tuple[Residual, ...]]
    norm: Callable[[Any], Norm] = Norm
    text: str = "Model"
    kind: str = "DecoderLayer"
    beside: str = ""
    decoder: str = "model"
    embedding: str = "embed_tokens"
    cache: str = ""
    last_norm: str = "norm"
    rotary: str = "rotary_emb"
    embedding_factor: str = ""
    logits_divisor: str = ""
    logits_cap: str = ""
    causal: str = "ForCausalLM"
    layers: str = "layers"
    placed: Callable[[Any, Tensor, Tensor], Tensor] | None = None

    @property
    def file(self) -> str:
        """The module in which transformers defines it."""
        return f"transformers.models.{self.module}.modeling_{self.module}"
