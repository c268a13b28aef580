"""What goes wrong inside a call: the error says what and where, and the model is as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module
from transformers import (
    AttentionInterface,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import lookahead
from lookahead import LookaheadConfig
from lookahead.backend import support
from lookahead.backend.cpu import exact_attention, product_bits
from lookahead.backend.support import support_of
from lookahead.drafting.controller import Controller
from lookahead.drafting.proposal import Call, Feedback, IntArray, Proposal, Proposer
from lookahead.errors import LogitsError, PromptError
from lookahead.utils.fingerprints import model_fingerprint
from tests.support.adversarial_proposers import drafting_by, perfect
from tests.support.families import ENCODER_DECODERS, FAMILIES, build
from tests.support.simulated_devices import DEVICES, on_device

IDS = torch.tensor([[5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]])
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20}
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture
def model(tiny_llama: PreTrainedModel) -> PreTrainedModel:
    return deepcopy(tiny_llama)


def decode(model: PreTrainedModel, processor: Processor | None = None, **options: Any) -> torch.Tensor:
    if processor is not None:
        options["logits_processor"] = LogitsProcessorList([processor])
    return model.generate(IDS, **GREEDY | options, custom_generate=lookahead.decode)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"repetition_penalty": 1.1}])
def test_logits_that_are_not_a_number_are_told_with_the_token_they_were_for(
    model: PreTrainedModel, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    answer = model.generate(IDS, **GREEDY | options)[0, IDS.shape[1] :].tolist()
    torch.manual_seed(0)
    # From the first time a token is read that stands nowhere before, all is not a number.
    first = next(i for i, token in enumerate(answer) if token not in IDS[0].tolist() + answer[:i])
    model.get_input_embeddings().weight.data[answer[first]] = float("nan")
    with pytest.raises(LogitsError, match=f"new token {first + 2} of row 0"):
        decode(model, **options)


def test_a_processor_that_raises_is_heard_and_the_model_works_on(model: PreTrainedModel) -> None:
    calls: list[int] = []

    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 7:
            raise RuntimeError("no more")
        return scores

    before = model.config._attn_implementation
    expected = model.generate(IDS, **GREEDY)
    with pytest.raises(RuntimeError, match="no more"):
        decode(model, fail)
    assert model.config._attn_implementation == before
    assert torch.equal(decode(model), expected)


@pytest.mark.parametrize("length", [12, 15], ids=["at the prompt's end", "later"])
def test_a_processor_that_stops_an_iteration_is_heard_as_it_is(model: PreTrainedModel, length: int) -> None:
    def exhausted(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores if ids.shape[1] < length else next(iter(()))

    with pytest.raises(StopIteration):
        model.generate(IDS, **GREEDY, logits_processor=LogitsProcessorList([exhausted]))
    with pytest.raises(StopIteration):
        decode(model, exhausted)
    with lookahead.enable(model), pytest.raises(StopIteration):
        model.generate(IDS, **GREEDY, logits_processor=LogitsProcessorList([exhausted]))
    assert torch.equal(decode(model), model.generate(IDS, **GREEDY))


@pytest.mark.parametrize("size", [60, 130])
def test_what_was_learned_of_a_vocabulary_is_not_drafted_from_for_another(model: PreTrainedModel, size: int) -> None:
    ids = torch.tensor([[5, 9, 31, 57, 5, 9, 31, 2, 59, 5, 9, 31]])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 60}
    extra = {"custom_generate": lookahead.decode, "lookahead_config": LookaheadConfig(draft="fixed")}
    said = model.generate(ids, **options, **extra)
    assert (said >= 60).any()
    model.generate(said, **options, **extra)
    model.resize_token_embeddings(size)
    assert torch.equal(model.generate(ids, **options, **extra), model.generate(ids, **options))


def test_a_verdict_on_other_weights_does_not_outlive_them() -> None:
    model = build(FAMILIES["Doge"])
    kept = {name: weights.clone() for name, weights in model.state_dict().items()}
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()  # all logits are alike, however tokens are attended to
    assert support_of(model, shortest=4, max_length=30).shape == "trees"
    model.load_state_dict(kept)
    assert support_of(model, shortest=4, max_length=30).shape != "trees"


def by_one_scale(output: torch.Tensor) -> torch.Tensor:
    """Activations rounded by one scale for all tokens of a pass, so that a pass over several tokens changes them."""
    scale = output.abs().amax() / 4
    return (output / scale).round() * scale


def attend_backwards(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    return -sdpa_attention_forward(*args, **kwargs)[0], None


def hook_an_mlp(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: by_one_scale(output))


def replace_a_forward(model: Any) -> None:
    linear = model.model.layers[0].mlp.up_proj
    own = linear.forward
    linear.forward = lambda x: by_one_scale(own(x))


def choose_an_attention(model: Any) -> None:
    AttentionInterface.register("backwards", attend_backwards)
    AttentionMaskInterface.register("backwards", sdpa_mask)
    model.set_attn_implementation("backwards")


@pytest.mark.parametrize("change", [hook_an_mlp, replace_a_forward, choose_an_attention])
def test_a_verdict_on_other_code_does_not_outlive_it(
    looping_llama: PreTrainedModel, change: Callable[[Any], None]
) -> None:
    model = deepcopy(looping_llama)
    decode(model)
    assert support_of(model, shortest=4, max_length=30).shape == "trees"
    change(model)
    assert support_of(model, shortest=4, max_length=30).shape != "trees"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may be decoded plainly
        assert torch.equal(decode(model), model.generate(IDS, **GREEDY))


def test_a_model_is_probed_once_though_its_weights_come_and_go(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[int] = []
    probe = support._probe
    monkeypatch.setattr(support, "_probe", lambda *arguments: (probed.append(1), probe(*arguments))[1])
    cpu_offload(model, torch.device("cpu"))
    for _ in range(3):
        decode(model)
    assert len(probed) == 1
    with torch.no_grad():
        cast(Any, remove_hook_from_module(model, recurse=True)).lm_head.weight.neg_()
    decode(model)
    assert len(probed) == 2


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()], ids=repr)
def test_a_probe_that_runs_out_of_memory_is_repeated_at_the_next_call(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", fail)
        first = support_of(model, shortest=4, max_length=30, trusted=True)
    assert (first.shape, first.reason) == ("none", "there was too little memory to probe it")
    assert support_of(model, shortest=4, max_length=30).shape == "trees"


def test_a_model_that_cannot_run_when_it_is_probed_is_probed_again(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the disk of its offloaded weights is away")

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", fail)
        assert (
            support_of(model, shortest=4, max_length=30, trusted=True).reason
            == "it cannot run (OSError: the disk of its offloaded weights is away)"
        )
    assert support_of(model, shortest=4, max_length=30).shape == "trees"


def test_one_failed_pass_of_a_probe_is_no_verdict(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, calls = model.forward, []

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("on purpose")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", fail_once)
    assert support_of(model, shortest=4, max_length=30, trusted=True).shape == "trees"


def test_activations_quantized_together_are_decoded_plainly_with_the_reason(
    model: PreTrainedModel,
) -> None:
    decode(model)  # a verdict on what it was before does not count
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
    with pytest.warns(UserWarning, match="its Linear layers scale activations by all tokens of a pass"):
        assert torch.equal(decode(model), model.generate(IDS, **GREEDY))


def test_a_processor_may_call_the_model_itself(model: PreTrainedModel) -> None:
    def contrast(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        short = model(ids[:, -3:]).logits[:, -1]  # a padded prompt would need the masks of the model's own attention
        mask = torch.tensor([[0, 1, 1]])
        padded = model(ids[:, -3:], attention_mask=mask).logits[:, -1]
        return scores - 0.3 * short - 0.1 * padded

    expected = model.generate(IDS, **GREEDY, logits_processor=LogitsProcessorList([contrast]))
    assert torch.equal(decode(model, contrast), expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_default_dtype_or_device_of_torch_changes_no_token(name: str, dtype: torch.dtype) -> None:
    model = build(FAMILIES[name]).to(dtype)
    config = LookaheadConfig(draft="fixed")
    expected, marked = model.generate(IDS, **GREEDY), model_fingerprint(model)
    product_bits.rows_of.cache_clear()
    product_bits._own_products.cache_clear()
    exact_attention.has_bits_of_sdpa.cache_clear()
    with torch.device("meta"):
        assert torch.equal(decode(model, lookahead_config=config), expected)
    for default in (torch.float64, torch.bfloat16, torch.float16):
        product_bits.rows_of.cache_clear()
        product_bits._own_products.cache_clear()
        exact_attention.has_bits_of_sdpa.cache_clear()
        torch.set_default_dtype(default)
        try:
            assert torch.equal(decode(deepcopy(model), lookahead_config=config), expected)
            assert model_fingerprint(model) == marked
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_model_with_a_position_table_is_drafted_for_up_to_its_end() -> None:
    options: dict[str, Any] = {"vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.4}
    torch.manual_seed(3)
    gpt2 = GPT2LMHeadModel(GPT2Config(**options, n_positions=32, bos_token_id=1, eos_token_id=None)).eval()
    config = LookaheadConfig(draft="fixed", min_probability=0.0)
    answer = gpt2.generate(IDS, do_sample=False, max_length=33)
    # An end of sequence before the table ends, in a call that allows more: drafts may not run over the table.
    kwargs: dict[str, Any] = {"do_sample": False, "max_length": 60, "eos_token_id": int(answer[0, -1])}
    expected = gpt2.generate(IDS, **kwargs)
    got = gpt2.generate(IDS, **kwargs, custom_generate=lookahead.decode, lookahead_config=config)
    assert torch.equal(got, expected)
    for config in (None, LookaheadConfig(draft="fixed"), LookaheadConfig(proposers=())):
        kwargs = {"do_sample": False, "max_length": 60, "lookahead_config": config}
        with pytest.raises(PromptError, match="33 tokens and the model has 32 positions"):
            gpt2.generate(IDS, **kwargs, custom_generate=lookahead.decode)
    for new_tokens in (1, 5):
        with pytest.raises(PromptError, match="36 tokens and the model has 32 positions"):
            gpt2.generate(IDS.repeat(1, 3), max_new_tokens=new_tokens, custom_generate=lookahead.decode)


def test_drafts_do_not_run_over_a_table_of_slopes() -> None:
    mpt = build(FAMILIES["Mpt"])
    mpt.config.max_seq_len = 32
    answer = mpt.generate(IDS, do_sample=False, max_length=33)
    kwargs: dict[str, Any] = {"do_sample": False, "max_length": 60, "eos_token_id": int(answer[0, -1])}
    expected = mpt.generate(IDS, **kwargs)
    with drafting_by(perfect([[*expected[0].tolist(), *[5] * 40]])):
        assert torch.equal(mpt.generate(IDS, **kwargs, custom_generate=lookahead.decode), expected)


@pytest.mark.parametrize("name", ["M2M100", "Jamba"])
def test_a_model_whose_positions_have_no_end_goes_on_as_in_generate(name: str) -> None:
    model = build(FAMILIES[name] if name in FAMILIES else ENCODER_DECODERS[name])
    limit = model.config.max_position_embeddings
    ids = IDS.repeat(1, 1 if model.config.is_encoder_decoder else limit // IDS.shape[1] + 1)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": limit + 9 if ids.shape[1] < limit else 9}
    expected = model.generate(ids, **options, eos_token_id=None)
    got = model.generate(ids, **options, eos_token_id=None, custom_generate=lookahead.decode)
    assert torch.equal(got, expected)


class Poisoner(Proposer):
    """Offers the right next token, and beside it many times one that no number comes of."""

    sources = ("poisoner",)

    def __init__(self, right: list[list[int]], poison: int, nodes: int, offers: list[int]) -> None:
        self.right, self.poison, self.nodes, self.offers = right, poison, nodes, offers
        self.told: dict[int, list[int]] = {}

    def start(self, row: int, prompt: IntArray) -> None:
        self.told[row] = [int(prompt[-1])]

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        told = self.told[row]
        following = self.right[row][len(told) - 1 :][:1]
        chain = [self.poison] * min(self.nodes, max_nodes - 1)  # each behind the one before, the first behind the root
        tokens = np.array([told[-1], *chain, *following], np.int32)
        parents = np.array([0, *range(len(chain)), *[0 for _ in following]], np.int32)
        self.offers.append(row)
        return Proposal(tokens, parents, np.full(len(tokens), 0.5, np.float32))

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        self.told[row] += feedback.tokens.tolist()

    def finish(self, row: int) -> None:
        del self.told[row]


@pytest.mark.parametrize("nodes", [1, 24])
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"repetition_penalty": 1.1}], ids=str)
def test_a_drafted_token_that_no_number_comes_of_changes_no_other(
    model: PreTrainedModel, options: dict[str, Any], nodes: int
) -> None:
    inputs = {"input_ids": IDS.repeat(2, 1), "attention_mask": torch.ones(2, IDS.shape[1], dtype=torch.long)}
    inputs["attention_mask"][1, :5] = 0
    torch.manual_seed(0)
    expected = model.generate(**inputs, **GREEDY | options)
    answers = expected[:, IDS.shape[1] :].tolist()
    poison = next(token for token in range(3, 100) if token not in expected.unique().tolist())
    model.get_input_embeddings().weight.data[poison] = float("nan")
    offers: list[int] = []

    def make(_: Call) -> Poisoner:
        return Poisoner(answers, poison, nodes, offers)

    config = LookaheadConfig(proposers=(make,), draft="fixed", max_nodes=32, min_probability=0.0)
    torch.manual_seed(0)
    got = model.generate(**inputs, **GREEDY | options, custom_generate=lookahead.decode, lookahead_config=config)
    assert got.tolist() == expected.tolist()
    assert len(offers) > 20


def test_a_step_scored_again_counts_as_the_drafted_one_it_was_and_such_drafts_stop(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted_nodes: list[int] = []
    record = Controller.record

    def recorded(self: Controller, plan: Any, step: Any) -> None:
        counted_nodes.append(step.nodes)
        record(self, plan, step)

    monkeypatch.setattr(Controller, "record", recorded)
    answer = model.generate(IDS, do_sample=False, max_new_tokens=200)[:, IDS.shape[1] :].tolist()
    poison = next(token for token in range(3, 100) if token not in answer[0] + IDS[0].tolist())
    model.get_input_embeddings().weight.data[poison] = float("nan")
    scored: list[int] = []
    score = model.forward

    def counted(*arguments: Any, **options: Any) -> Any:
        scored.append(options["input_ids"].shape[1])
        return score(*arguments, **options)

    model.forward = counted  # type: ignore[method-assign]
    offers: list[int] = []
    config = LookaheadConfig(
        proposers=(lambda _: Poisoner(answer, poison, 24, offers),), memory="request", trust_user_code=True
    )
    for _ in range(2):
        scored.clear()
        with on_device(lambda nodes: 0.003 * DEVICES["half"](nodes)):
            got = model.generate(
                IDS, do_sample=False, max_new_tokens=200, custom_generate=lookahead.decode, lookahead_config=config
            )
        assert got[0, IDS.shape[1] :].tolist() == answer[0]
    assert sum(width > 1 for width in scored) < 40
    assert max(counted_nodes) > 1
