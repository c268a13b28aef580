"""Writing the trained model as a HuggingFace folder, whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers import logging as transformers_logging

from lookahead.errors import TrainingError
from tools.train_extractor.rows import EOS_ID, PAD_ID


def check_writable(folder: Path) -> None:
    """Create the folder if need be and make sure files can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise TrainingError(f"cannot write to {folder}: {error.strerror or error}") from error


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save bf16 weights, configuration and tokenizer into `folder`.

    Files are written beside the folder's own and moved over them one by one, so a reader finds each
    file whole; other files in the folder stay.
    """
    check_writable(folder)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        partial = Path(temporary)
        model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=EOS_ID, pad_token_id=PAD_ID, bos_token_id=None
        )
        transformers_logging.disable_progress_bar()
        model.bfloat16().save_pretrained(partial)
        tokenizer.save_pretrained(partial, save_jinja_files=False)
        for file in sorted(partial.iterdir()):
            file.chmod(0o644)
            os.replace(file, folder / file.name)
