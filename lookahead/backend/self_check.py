"""Comparisons of passes with the model's own code: whether kernels agree, and whether bits are equal."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.backend.choice import backend_for
from lookahead.backend.cpu.cpu_backend import CpuBackend
from lookahead.backend.cpu.exact_attention import MAX_ROWS
from lookahead.backend.cpu.fused_layers import find_fused
from lookahead.backend.cpu.linears import keeps_bits, keeps_bits_of_long_texts, keeps_bits_packed
from lookahead.backend.cpu.product_bits import has_other_products
from lookahead.backend.layer_probes import layers_with_solo_bits
from lookahead.backend.probes import CHAIN, PROBES, TOLERANCE, TREE, agree, own_pass, step_logits
from lookahead.backend.protocol import BitPolicy, Shape
from lookahead.drafting.tree import TokenTree
from lookahead.errors import UnsupportedModelError, is_out_of_memory, with_place
from lookahead.kernels.prompt_attention import tokens_alike
from lookahead.kernels.weighted_sums import BLOCK
from lookahead.model.calls import kind_of
from lookahead.model.facts import decoder_vocabulary, rope_parameters_of
from lookahead.model.model_state import plan_of, state_of
from lookahead.model.state_scope import mixers_of, probe_text
from lookahead.utils.kept_values import truth

_SMALL_MODEL = 1 << 22  # parameters; up to this size several trees are compared
_TRIALS = 8
_CHAIN = 4  # nodes of the chain in those trees; others branch off in turn
_PACKED_SIZES = 3, 40, 9, 17  # tokens of prompts
_BEHIND, _SHORTER = 20, 430  # tokens behind a block of keys, and of a text that begins alike
_ROOT = np.zeros(1, np.int32)  # the path of the root alone, the last token of a prompt


def kernels_agree(model: PreTrainedModel, shape: Shape) -> bool:
    """Whether the kernels for passes of one prompt agree with the model's own code up to rounding.

    The first call for a model compares them: packed weights, fused layers, and all layers in one call. A mismatch is
    logged, and the caller should run the model's own code.
    """
    name, plan = f"kernels for {shape}, {torch.get_num_threads()} threads", plan_of(model)
    probe = partial(state_of(model).probed, name, model, partial(_kernels_agree, model, shape), truth)
    return plan.part(name, plan.form, probe)


@torch.inference_mode()
def _kernels_agree(model: PreTrainedModel, shape: Shape) -> bool:
    vocabulary = decoder_vocabulary(model)
    first, *drafted = (token * vocabulary // 9 for token in PROBES[0])
    tree = TokenTree.from_parents(drafted, TREE if shape == "trees" else CHAIN)
    backend = backend_for(model, rows=1, capacity=64, shape=shape)
    problem = "other logits than by the model's own code"
    try:
        with backend.serving():
            backend.read([np.array([first], np.int32)])
            backend.cache.commit(0, _ROOT)
            logits = backend.score([tree])[0, -2]
        path = [first, *(drafted[node] for node in _path_to(tree, len(drafted) - 2))]
        if agree(model, logits, *step_logits(model, path[:1], path[1:])):
            return True
    except Exception as error:
        if is_out_of_memory(error):
            raise
        problem = with_place(error)
    state_of(model).note_problem(f"{type(model).__name__} is decoded without kernels", problem)
    return False


def _path_to(tree: TokenTree, node: int) -> list[int]:
    """The nodes from the root to a node."""
    path = [node]
    while path[0]:
        path.insert(0, int(tree.parents[path[0]]))
    return path


def keeps_solo_bits(model: PreTrainedModel) -> bool:
    """Whether the logits of a tree can have the bits of decoding token by token: half precision on a CPU.

    The first call for a model compares the nodes of a tree with passes over one token each.
    """
    name, plan = f"bitwise, {torch.get_num_threads()} threads", plan_of(model)

    def find() -> bool:
        probe = partial(_has_bits_of_single_tokens, model)
        return may_keep_bits(model) and state_of(model).probed(name, model, probe, truth)

    return plan.part((name, torch.is_autocast_enabled("cpu")), plan.form, find)  # a user may have entered it since


def packs_prompts(model: PreTrainedModel, policy: BitPolicy) -> bool:
    """Whether several prompts may be read in one pass without padding, each with its bits or its rounding alone.

    In half precision rows decoded alone must keep their bits. The first call for a model compares them.
    """
    plan = plan_of(model)
    ropes = rope_parameters_of(model.config.get_text_config())
    can = (
        plan.device.type == "cpu"
        and plan.processes == 1
        and plan.registers_attention
        and plan.attention in ("sdpa", "eager")
        and "position_ids" in plan.inputs
        and not (plan.reads_at_once or kind_of(model).has_encoder or (plan.may_keep_states and mixers_of(model)))
        # The longest text of a pass would decide on the embeddings of all.
        and not any(rope.get("rope_type") in ("dynamic", "longrope") for rope in ropes)
    )
    if not can or model.dtype == torch.float32:
        return can
    name = f"packed prompts, {torch.get_num_threads()} threads"
    probe = partial(state_of(model).probed, name, model, partial(_keep_bits_packed, model), truth)
    return policy is BitPolicy.SOLO and not any(plan.windows) and bool(plan.part(name, plan.form, probe))


@torch.inference_mode()
def _keep_bits_packed(model: PreTrainedModel) -> bool:
    """Compare prompts read in one pass with each read alone."""
    if has_other_products(model) or getattr(model, "is_quantized", False) or not keeps_bits_packed(model):
        return False
    vocabulary = decoder_vocabulary(model)
    prompts = [(np.arange(size, dtype=np.int32) * (size + 3) + 1) % vocabulary for size in _PACKED_SIZES]
    backend, count = CpuBackend(model, rows=2 * len(prompts), capacity=64, packs_prompts=True), len(prompts)
    with backend.serving():
        alone = torch.cat([backend.read([prompt], row) for row, prompt in enumerate(prompts)])
        packed = backend.read(prompts, count)
    rows = [backend.cache.extract_row(row).kv for row in range(2 * count)]
    return torch.equal(alone, packed) and all(
        torch.equal(some, others)
        for one, other in zip(rows[:count], rows[count:], strict=True)
        for at in one
        for some, others in zip(one[at], other[at], strict=True)
    )


def shares_beginnings(model: PreTrainedModel) -> bool:
    """Whether half-precision prompts may copy keys and values of a prompt that begins alike, as far as bits are alike.

    `packs_prompts` must hold. The first call for a model compares a text behind the beginning of a shorter one with the
    text read as a whole.
    """
    name = f"beginnings of other lengths, {torch.get_num_threads()} threads"
    return state_of(model).probed(name, model, partial(_keep_bits_behind_copies, model), truth)


@torch.inference_mode()
def _keep_bits_behind_copies(model: PreTrainedModel) -> bool:
    if not keeps_bits_of_long_texts(model):
        return False
    text = (np.arange(BLOCK + _BEHIND, dtype=np.int32) * 7 + 1) % decoder_vocabulary(model)
    backend = CpuBackend(model, rows=3, capacity=len(text), packs_prompts=True, shares_beginnings=lambda: True)
    try:
        with backend.serving():
            alone = backend.read([text])
            behind = backend.read([text[:_SHORTER], text], 1, texts=[text[:0]])[1:]
    except UnsupportedModelError:
        return False
    if backend.reused_tokens != [0, tokens_alike(_SHORTER, _SHORTER, len(text))]:
        return False
    rows = [backend.cache.extract_row(row).kv for row in (0, 2)]
    return torch.equal(alone, behind) and all(map(torch.equal, *(sum(kv.values(), ()) for kv in rows)))


def serves_experts(model: PreTrainedModel) -> bool:
    """Whether kernels multiply by the weights of experts in some layer."""
    return any(layer.experts for layer in find_fused(model).layers)


def may_keep_bits(model: PreTrainedModel) -> bool:
    """Whether comparing bits of a model's passes is worthwhile: half precision on a CPU, without autocast."""
    plan = plan_of(model)
    return (
        model.dtype in TOLERANCE
        and plan.device.type == "cpu"
        and plan.registers_attention
        and plan.attention in ("sdpa", "eager")
        # Masks of chunks change the order of summation.
        and not getattr(model.config.get_text_config(), "attention_chunk_size", None)
        and not torch.is_autocast_enabled("cpu")
    )


@torch.inference_mode()
def _has_bits_of_single_tokens(model: PreTrainedModel) -> bool:
    """Compare trees of `MAX_ROWS` nodes with decoding some of their nodes."""
    # Linear layers split a product so that its rows keep their bits. Other products take all rows at once, and an
    # expert's products take the rows routed to it, except by kernels.
    mixtures = [part.module for layer in find_fused(model).layers if (part := layer.experts)]
    inner = {id(module) for mixture in mixtures for module in mixture.modules()}
    has_experts = any("experts" in name and id(module) not in inner for name, module in model.named_modules())
    # Recurrent mixers split calls to keep bits, and an encoder reads no nodes.
    apart = list(map(model.get_submodule, mixers_of(model).layers))
    apart += kind_of(model).modules_beside(model) + mixtures
    layers = layers_with_solo_bits(model)
    if layers is None or has_experts or has_other_products(model, [*apart, *layers]) or not keeps_bits(model, layers):
        return False
    # In a small model, activations with few changed bits show only after many products.
    trials = 1 if model.num_parameters() > _SMALL_MODEL else _TRIALS
    try:
        return all(_has_bits_after(model, step) for step in range(7, 7 + trials))
    except Exception as error:  # the model's attention may raise anything; masks still work
        state_of(model).note_problem(f"{type(model).__name__} is not decoded bit for bit", with_place(error))
        return False


def _has_bits_after(model: PreTrainedModel, step: int) -> bool:
    """Compare passes after a prompt of tokens that are `step` apart.

    They are one over a tree, of which a path is compared, with siblings before and behind it, and one over a token
    behind the path.
    """
    vocabulary = decoder_vocabulary(model)
    prompt, plan = probe_text(model, step), plan_of(model)
    chain, branches = np.arange(-1, _CHAIN - 1).clip(0), np.arange(_CHAIN, MAX_ROWS) % _CHAIN
    nodes = np.arange(MAX_ROWS)
    tokens = nodes // _CHAIN + nodes % _CHAIN * (MAX_ROWS // 4) + prompt[-1]  # siblings differ
    tree = TokenTree.from_parents(tokens % vocabulary, [*chain, *branches])
    path = _path_to(tree, MAX_ROWS - 2)
    make_inputs, past, inputs = kind_of(model).probe(model, prompt.tolist(), 1)
    own_read, plan.own_read = plan.own_read, None
    backend = CpuBackend(model, rows=1, capacity=64, make_inputs=make_inputs)
    with backend.serving():
        backend.read([prompt])
        backend.cache.commit(0, _ROOT)
        scores = backend.score([tree], BitPolicy.SOLO)[0]
        backend.cache.commit(0, np.array(path, np.int32))
        behind = backend.score([TokenTree.root(int(prompt[0]))], BitPolicy.SOLO)[0, 0]
    if own_read is None:
        own_pass(model, prompt, past, 0, inputs)
    past = past if own_read is None else own_read
    steps = [*((tree.tokens[node : node + 1], scores[node]) for node in path), (prompt[:1], behind)]
    return all(
        torch.equal(own_pass(model, token, past, len(prompt) + depth, inputs), logits)
        for depth, (token, logits) in enumerate(steps)
    )
