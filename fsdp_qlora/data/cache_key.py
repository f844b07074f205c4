"""The key of a dataset's rows in the cache: all that they depend on."""

import dataclasses

from fsdp_qlora.config.objectives import OBJECTIVES, TEXTS
from fsdp_qlora.data.batches.cache import tokenizer_identity
from fsdp_qlora.data.columns import COLUMNS
from fsdp_qlora.data.dataset_text import DatasetText
from fsdp_qlora.data.sources.source import Source


def cache_key(text: DatasetText, source: Source, samples: int | None) -> list[object]:
    """All that tokenized rows depend on, as JSON. samples: rows that are read, None for all."""
    options = text.options.text
    key: list[object] = [
        source.identity,
        source.start,
        source.stop,
        samples,
        text.requested.renames,
        dataclasses.astuple(text.template),
        options.dataset_format,
        text.options.context_length,
        text.learn,
        tokenizer_identity(text.tokenizer),
        text.tokenizer.chat_template,
    ]
    # Entries are added only where they matter, so that a new option leaves the keys of other
    # runs, and their cached rows, as they were.
    if options.image_processor:
        # Relative paths of images are of the dataset's folder.
        key += [*options.image_processor.identity, source.folder_of(source.parts[0].name)]
    kind = options.row_kind
    if kind != TEXTS:
        key += [kind.name, COLUMNS["prompt"], options.max_completion_length]
        if options.image_processor:
            # Earlier versions left out rows with images.
            key.append("with images")
    if kind.is_sampled and OBJECTIVES[options.objective].distills:
        key.append("with a teacher's prompts")
    if options.rating_threshold is not None:
        key.append(f"rated {options.rating_threshold}")
    if options.tools is not None:
        key.append(dict(options.tools))
    return key
