"""The options of rows that their model decides: the processor of images, and the prompts."""

import dataclasses
import logging
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data.options import DataOptions
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.data.text.image_processor import ImageProcessor
from fsdp_qlora.data.text.rendering import CHAT, describe_default, describe_lack
from fsdp_qlora.model.architecture.tokenizer import is_made_for_chats

log = logging.getLogger("fsdp_qlora")


class LearningModel(NamedTuple):
    """The model that learns from rows, as far as their text depends on it."""

    name: str
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    takes_images: bool = True
    """Whether it has parts for images, if its folder has a processor for them."""


def options_for(options: DataOptions, model: LearningModel, *, keeps_template: bool) -> DataOptions:
    """The options with what the model decides: the processor of images, and the default prompts.

    By default instructions are filled into the chat template of a model made for chats.

    Args:
        options: as they are given, without an image processor.
        keeps_template: whether this run has begun, or its adapter was trained, with prompts of a
            plain template, and keeps them.
    """
    image_processor = ImageProcessor.find(model.folder, model.name)
    text = dataclasses.replace(
        options.text, image_processor=image_processor if model.takes_images else None
    )
    is_default = text.prompt_template is None and not keeps_template
    if is_default and is_made_for_chats(model.folder, model.tokenizer):
        text = dataclasses.replace(text, prompt_template=CHAT)
    return dataclasses.replace(options, text=text)


def say_prompts(
    data: RunData, tokenizer: PreTrainedTokenizerBase, after_answer: str, *, is_default: bool
) -> None:
    """Say how prompts and answers are written; how answers end is noted in the run's provenance.

    Args:
        after_answer: as for `RunData.ends`.
        is_default: no template was asked for.
    """
    prompt = data.provenance["prompt"]
    ends = data.ends(tokenizer, after_answer)
    if ends:
        prompt["ends"] = ends
        log.info(
            "Answers end with %s, not with the tokenizer's %s: generation_config.json will name "
            "both.",
            " or ".join(ends),
            tokenizer.eos_token,
        )
    default = describe_default(data.reports[0].dataset_format, prompt)
    if default and is_default and tokenizer.chat_template:
        log.info("%s", default)
    lack = describe_lack(prompt, tokenizer)
    if lack:
        log.warning("%s", lack)
