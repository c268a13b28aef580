"""Images and sounds in chats: they are part of a request, never fetched, and given to the model's processor."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from typing import Any

from lookahead.documents.sound_files import read_sound
from lookahead.errors import DocumentError, first_line
from lookahead.serving.api_errors import ApiError, invalid
from lookahead.serving.message_schemas import ImageUrl, MessagePart

_FORMATS = "PNG", "JPEG", "WEBP", "GIF"
_MOST_PIXELS = 1 << 25  # of all images of a request
_MOST_S = 1800.0  # seconds of all its sounds
_PLACES = "image_token", "audio_token", "video_token"


class MediaReader:
    """Reads chats with images and sounds by a processor of transformers.

    Args:
        processor: The processor.
    """

    def __init__(self, processor: Any) -> None:
        self.processor, self._sees = processor, hasattr(processor, "image_processor")
        self._rate: Any = getattr(getattr(processor, "feature_extractor", None), "sampling_rate", None)
        places = (getattr(processor, name, None) for name in _PLACES)
        self._places = [place for place in places if isinstance(place, str)]

    def inputs(
        self, messages: Sequence[dict[str, Any]], parts: Sequence[Sequence[MessagePart]], kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The inputs of the model for a chat: `input_ids`, int64 `[1, tokens]`, and those of its images and sounds.

        Args:
            messages: The messages in the form of templates.
            parts: The parts of the content of each.
            kwargs: Further variables of the template.
        """
        pixels, seconds, chat = _MOST_PIXELS, _MOST_S, list[dict[str, Any]]()
        for message, own in zip(messages, parts, strict=True):
            content = list[dict[str, Any]]()
            for part in own:
                if part.text is not None:
                    content.append({"type": "text", "text": self._checked(part.text)})
                elif part.input_audio is not None:
                    samples = self._sound(part, seconds)
                    seconds -= len(samples) / self._rate
                    content.append({"type": "audio", "audio": samples})
                else:
                    image = self._image(part, pixels)
                    pixels -= image.width * image.height
                    content.append({"type": "image", "image": image})
            chat.append({**message, "content": content})
        continues = messages[-1]["role"] == "assistant"
        variables = {"add_generation_prompt": not continues, "continue_final_message": continues, **kwargs}
        try:
            inputs = self.processor.apply_chat_template(
                chat, tokenize=True, return_dict=True, return_tensors="pt", **variables
            )
        except Exception as error:  # a template, or a processor, may raise anything
            raise invalid("messages", f"the model's processor does not take them: {first_line(error)}") from error
        return dict(inputs)

    def _checked(self, text: str) -> str:
        """A text without the tokens that stand for images and sounds."""
        for place in self._places:
            if place in text:
                raise invalid("messages.content.text", f"must not have the model's token {place!r}")
        return text

    def _image(self, part: MessagePart, most: int) -> Any:
        from PIL import Image, ImageOps

        field = f"messages.content.{part.type}"
        if not self._sees:
            raise invalid(field, "the model takes no images")
        url = part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url
        data = part.source.data if part.source is not None else _data_of(url or "", field)
        try:
            image = Image.open(io.BytesIO(_decoded(data, field)), formats=_FORMATS)
            if image.width * image.height > most:
                raise invalid(field, f"images have at most {_MOST_PIXELS} pixels together, this {image.size}")
            return ImageOps.exif_transpose(image).convert("RGB")
        except ApiError:
            raise
        except Exception as error:  # a decoder may raise anything
            raise invalid(field, f"must be an image in one of the formats {', '.join(_FORMATS)}") from error

    def _sound(self, part: MessagePart, most_s: float) -> Any:
        field = "messages.content.input_audio"
        if self._rate is None or part.input_audio is None:
            raise invalid(field, "the model takes no sound")
        try:
            return read_sound(io.BytesIO(_decoded(part.input_audio.data, field)), self._rate, most_s)
        except DocumentError as error:
            raise invalid(field, str(error)) from error


def _data_of(url: str, field: str) -> str:
    """The base64 text of a data URL."""
    head, _, data = url.partition(",")
    if not (head.startswith("data:") and head.endswith(";base64")):
        raise invalid(field, f"must be a data URL with base64, since nothing is fetched, got {url[:40]!r}")
    return data


def _decoded(data: str, field: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise invalid(field, "must be base64") from None
