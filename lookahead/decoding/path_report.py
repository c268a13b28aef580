"""Reports the path that serves the prompts of a model, and why a faster one does not."""

from __future__ import annotations

from transformers import PreTrainedModel

from lookahead.backend import self_check, support
from lookahead.backend.choice import backend_for, records_graphs
from lookahead.backend.protocol import BackendReport, BitPolicy, PathReport
from lookahead.config import LookaheadConfig
from lookahead.decoding import validation
from lookahead.decoding.plan import shape_of
from lookahead.model.calls import kind_of
from lookahead.model.facts import validate_model


def backend_report(model: PreTrainedModel, config: LookaheadConfig | None = None) -> BackendReport:
    """Report the path that serves a prompt of a model, and why a faster one does not.

    The first call for a model probes it, as its first `generate` does.

    Example:
        >>> print(lookahead.backend_report(model))  # doctest: +SKIP
        LlamaForCausalLM is served by CpuBackend
          tree attention: yes
          packed weights: yes, 211 of 211 linear layers

    Args:
        model: The model.
        config: How to draft; the defaults when None.

    Raises:
        ConfigError: The model or the configuration has the wrong type.
        UnsupportedModelError: No request to the model can be served.
    """
    validate_model(model)
    validation.check_config("config", config)
    config = config if config is not None else LookaheadConfig()
    verdict = support.support_of(model, shortest=1, max_length=1, trusted=config.trust_user_code)
    shape, reason = shape_of(model, verdict, config)
    if shape == "none" or kind_of(model).has_encoder:
        paths = (PathReport("drafts", shape != "none", reason or f"its decoder verifies {shape}"),)
        name = "transformers' own loop" if shape == "none" else "a backend behind its encoder"
        return BackendReport(name, type(model).__name__, paths)
    has_kernels = self_check.kernels_agree(model, shape)
    options = {"rows": 1, "capacity": 1, "has_kernels": has_kernels, "captures": records_graphs(model)}
    backend = backend_for(model, shape=shape, **options)
    policy = BitPolicy.SOLO if shape == "trees" and self_check.keeps_solo_bits(model) else BitPolicy.ROUNDED
    with backend.serving():
        return backend.report(policy)
