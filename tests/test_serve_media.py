"""Images and sounds in chats: the tokens of `model.generate` for what the model's processor makes of them."""

from __future__ import annotations

import base64
import copy
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.support.grammars import json_tokenizer
from tests.support.running_server import Running, folder, server, wait_until_idle
from tests.support.vision_models import EYES, TEXT

__all__ = ["folder", "server"]  # fixtures
pytest.importorskip("openai")
images, soundfile = pytest.importorskip("PIL.Image"), pytest.importorskip("soundfile")
clip = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
TEMPLATE = (
    "{% if tools %}{{ tools | map(attribute='function.name') | join }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% else %}<media>{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
RATE = 16_000


def tokenizer() -> Any:
    own = copy.deepcopy(json_tokenizer())
    own.add_special_tokens({"additional_special_tokens": ["<media>"]})
    own.chat_template = TEMPLATE
    return own


def sizes(own: Any, kind: str) -> dict[str, Any]:
    return {**TEXT, "vocab_size": len(own), "model_type": kind, "initializer_range": 0.4}


def save(model: Any, processor: Any, path: Path) -> str:
    model.float().eval().save_pretrained(path)
    processor.save_pretrained(path)
    return str(path)


def save_llava(path: Path) -> str:
    own, shape = tokenizer(), {"height": 8, "width": 8}
    place = own.convert_tokens_to_ids("<media>")
    eyes = {**EYES, "model_type": "clip_vision_model"}
    config = transformers.LlavaConfig(vision_config=eyes, text_config=sizes(own, "llama"), image_token_index=place)
    options = {"patch_size": 4, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    reader = clip.CLIPImageProcessorPil(size=shape, crop_size=shape)
    processor = transformers.LlavaProcessor(reader, own, image_token="<media>", chat_template=TEMPLATE, **options)
    torch.manual_seed(5)
    return save(transformers.LlavaForConditionalGeneration(config), processor, path / "seeing")


def save_audio(path: Path) -> str:
    own = tokenizer()
    ears = {"num_mel_bins": 8, "max_source_positions": 1500, "d_model": 16, "encoder_layers": 1}
    ears |= {"encoder_attention_heads": 2, "encoder_ffn_dim": 16}
    place = own.convert_tokens_to_ids("<media>")
    config = transformers.Qwen2AudioConfig(audio_config=ears, text_config=sizes(own, "qwen2"), audio_token_index=place)
    reader = transformers.WhisperFeatureExtractor(feature_size=8)
    tokens = {"audio_token": "<media>", "audio_bos_token": "", "audio_eos_token": ""}
    processor = transformers.Qwen2AudioProcessor(reader, own, chat_template=TEMPLATE, **tokens)
    torch.manual_seed(5)
    return save(transformers.Qwen2AudioForConditionalGeneration(config), processor, path / "hearing")


@pytest.fixture(scope="module", params=[save_llava, save_audio], ids=["image", "sound"])
def reads(request: Any, tmp_path_factory: Any) -> Iterator[Running]:
    """A server of a model that reads images, and one of a model that hears."""
    running = Running(request.param(tmp_path_factory.mktemp("media")))
    yield running
    running.end()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: Any) -> Iterator[Running]:
    running = Running(save_llava(tmp_path_factory.mktemp("images")))
    yield running
    running.end()


def image(seed: int, kind: str = "PNG", size: tuple[int, int] = (16, 12)) -> bytes:
    pixels, file = np.random.default_rng(seed).integers(0, 255, (*size[::-1], 3), np.uint8), io.BytesIO()
    images.fromarray(pixels).save(file, kind)
    return file.getvalue()


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def sound(seed: int, seconds: float = 0.5) -> bytes:
    samples, file = np.random.default_rng(seed).normal(0, 0.1, int(RATE * seconds)).astype(np.float32), io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


def part(running: Running, seed: int) -> dict[str, Any]:
    if running.name == "seeing":
        return {"type": "image_url", "image_url": {"url": url(image(seed)), "detail": "low"}}
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound(seed)).decode(), "format": "wav"}}


def read_by_processor(running: Running, seed: int) -> dict[str, Any]:
    if running.name == "seeing":
        return {"type": "image", "image": images.open(io.BytesIO(image(seed)))}
    return {"type": "audio", "audio": soundfile.read(io.BytesIO(sound(seed)), dtype="float32")[0]}


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def expected(running: Running, *chat: Any, **options: Any) -> str:
    """The text of `model.generate` for a chat in the form of the processor."""
    served = running.models.wait()
    processor = transformers.AutoProcessor.from_pretrained(Path(served.model.name_or_path))
    messages = [{"role": "user", "content": list(chat)}]
    inputs = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, **options}
    tokens = served.model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :]
    return str(served.tokenizer.decode(tokens, skip_special_tokens=True))


def asked(running: Running, *content: Any, **options: Any) -> Any:
    chat: Any = [{"role": "user", "content": list(content)}]
    options = {"temperature": 0, "max_tokens": 20, "model": running.name, **options}
    return running.client.chat.completions.create(messages=chat, **options)


def test_a_chat_with_media_is_answered_as_by_generate_beside_others(reads):
    given = [(part(reads, seed), read_by_processor(reads, seed)) for seed in range(3)]
    wanted = [expected(reads, said("look "), own, said(" what?")) for _, own in given]
    assert len({*wanted}) > 1
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda each: asked(reads, said("look "), each[0], said(" what?")), given))
        text = pool.submit(reads.ask, "abc").result().choices[0].message.content
    assert [each.choices[0].message.content for each in answers] == wanted
    assert text == expected(reads, said("abc"), max_new_tokens=30)


def test_a_stream_seeds_and_choices_of_a_chat_with_media_are_exact(reads):
    content = [part(reads, 1), said("what?"), part(reads, 2)]
    chunks = asked(reads, *content, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == expected(reads, read_by_processor(reads, 1), said("what?"), read_by_processor(reads, 2))
    drawn = asked(reads, *content, temperature=1, seed=4, n=2)
    for i, choice in enumerate(drawn.choices):
        again = asked(reads, *content, temperature=1, seed=4 + i)
        assert choice.message.content == again.choices[0].message.content
    logs = asked(reads, *content, logprobs=True, top_logprobs=2).choices[0]
    assert len(logs.logprobs.content) == 20 and len(logs.logprobs.content[0].top_logprobs) == 2


def test_images_come_in_the_words_of_every_api(seeing):
    wanted = expected(seeing, said("what?"), read_by_processor(seeing, 1))
    parts = [{"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": url(image(1))}]
    body: dict[str, Any] = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 20, "temperature": 0}
    answer = seeing.raw("POST", "/v1/responses", body)[1]
    assert answer["output"][0]["content"][0]["text"] == wanted
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(image(1)).decode()}
    chat = [{"role": "user", "content": [said("what?"), {"type": "image", "source": source}]}]
    body = {"messages": chat, "max_tokens": 20, "temperature": 0}
    answer = seeing.raw("POST", "/v1/messages", body)[1]
    assert answer["content"][0]["text"] == wanted
    tokens = seeing.raw("POST", "/v1/messages/count_tokens", {"messages": chat})[1]["input_tokens"]
    assert tokens == answer["usage"]["input_tokens"]
    assert seeing.raw("GET", "/props")[1]["modalities"] == {"vision": True, "audio": False}


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF"])
def test_images_of_several_formats_are_read(seeing, kind):
    asked(seeing, {"type": "image_url", "image_url": {"url": url(image(1, kind), kind.lower())}})


BAD = {
    "http": ("http://localhost/a.png", "must be a data URL with base64, since nothing is fetched"),
    "file": ("file:///etc/passwd", "must be a data URL with base64, since nothing is fetched"),
    "base64": ("data:image/png;base64,@@", "must be base64"),
    "text": (url(b"no image"), "must be an image in one of the formats PNG"),
    "cut": (url(image(1, size=(300, 300))[:2000]), "must be an image in one of the formats PNG"),
    "format": (url(image(1, "BMP")), "must be an image in one of the formats PNG"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_an_image_is_refused(seeing, case):
    given, told = BAD[case]
    content = [{"type": "image_url", "image_url": {"url": given}}]
    assert f"messages.content.image_url: {told}" in seeing.refused(messages=[{"role": "user", "content": content}])


def test_pixels_of_a_request_are_limited_together_before_they_are_decoded(seeing, monkeypatch):
    monkeypatch.setattr("lookahead.serving.media._MOST_PIXELS", 400)
    one = part(seeing, 1)
    asked(seeing, one, one)
    told = seeing.refused(messages=[{"role": "user", "content": [one, one, one]}])
    assert "images have at most 400 pixels together" in told


def test_seconds_of_a_request_are_limited_together(reads, monkeypatch):
    if reads.name == "seeing":
        assert "input_audio: the model takes no sound" in reads.refused(
            messages=[
                {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}
            ]
        )
        return
    monkeypatch.setattr("lookahead.serving.media._MOST_S", 1.2)
    one = part(reads, 1)
    assert "the sound: has" in reads.refused(messages=[{"role": "user", "content": [one, one, one]}])
    broken = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}}
    assert "cannot be read as sound" in reads.refused(messages=[{"role": "user", "content": [broken]}])
    seen = {"type": "image_url", "image_url": {"url": url(image(1))}}
    assert "image_url: the model takes no images" in reads.refused(messages=[{"role": "user", "content": [seen]}])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens: cuts texts alone"),
        ({"prompt_logprobs": 1}, "prompt_logprobs: are those of texts alone"),
        ({"chat_template_kwargs": {"processor_kwargs": {}}}, "chat_template_kwargs.processor_kwargs: cannot be set"),
    ],
)
def test_what_cannot_be_done_beside_images_is_refused_by_name(seeing, fields, told):
    content = [part(seeing, 1), said("what?")]
    assert told in seeing.refused(messages=[{"role": "user", "content": content}], **fields)


def test_a_text_cannot_pretend_to_be_an_image(seeing):
    for content in ([said("a <media> b")], [part(seeing, 1), said("<media>")]):
        assert "must not have the model's token '<media>'" in seeing.refused(
            messages=[{"role": "user", "content": content}]
        )


def test_a_model_of_text_refuses_images_and_sounds_by_name(server):
    for given in (
        {"type": "image_url", "image_url": {"url": url(image(1))}},
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
    ):
        told = server.refused(messages=[{"role": "user", "content": [said("what?"), given]}])
        assert told == f"messages.content.{given['type']}: the model reads text only"


def test_a_client_that_leaves_ends_the_answer_about_an_image(seeing):
    stream = asked(seeing, part(seeing, 1), stream=True, max_tokens=400, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    wait_until_idle(seeing)
    assert asked(seeing, part(seeing, 1)).choices[0].message.content == expected(seeing, read_by_processor(seeing, 1))
