"""How the rows of a dataset are found in its columns and become text, as the options say."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from transformers import PreTrainedTokenizerBase

from fsdp_qlora.config.learn import read_learn
from fsdp_qlora.data.options import DataOptions
from fsdp_qlora.data.text.chat_template import ChatTemplate, TemplateWorker
from fsdp_qlora.data.text.formats import Format
from fsdp_qlora.data.text.recognition import RequestedFormat, parse_columns
from fsdp_qlora.data.text.rendering import Renderer
from fsdp_qlora.data.text.template_kwargs import columns_of
from fsdp_qlora.data.text.templates import ChosenTemplate, find_template
from fsdp_qlora.data.text.turn_parts import has_end_of_reasoning


@dataclass(frozen=True)
class DatasetText:
    """The formats and templates that the options of a dataset name."""

    tokenizer: PreTrainedTokenizerBase
    options: DataOptions
    workers: Sequence[TemplateWorker]
    """Processes that fill chat templates."""

    @cached_property
    def template(self) -> ChosenTemplate:
        """The prompt template or the chat template of --prompt_template."""
        return find_template(self.options.text.prompt_template)

    @cached_property
    def requested(self) -> RequestedFormat:
        """The format and the names of columns that the options give."""
        text = self.options.text
        return RequestedFormat(text.requested_format, parse_columns(text.columns))

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.template.chat)

    def used_columns(self, columns: Sequence[str]) -> set[str]:
        """The columns that the rows' format or the chat template may use."""
        renames = self.requested.renames
        all_names = [renames.get(column, column) for column in columns]
        may_be = columns_of(columns, renames, self.chat_template.source, lambda: all_names)
        return self.requested.used(columns) | may_be.keys()

    def template_columns(
        self, row_format: Format, columns: Sequence[str], used: Collection[str] = ()
    ) -> dict[str, str]:
        """The columns that set variables of the chat template, as `columns_of` gives them.

        There are none if rows of this format cannot be chats.

        Args:
            used: columns that the format uses.
        """
        if not (row_format.may_be_chat or self.template.is_chat):
            return {}
        template = self.chat_template
        others = [column for column in columns if column not in used]
        ask = partial(template.variables, self.workers[0])
        return columns_of(others, self.requested.renames, template.source, ask)

    @cached_property
    def learn(self) -> str:
        """The words of --learn with its default, which depends on the chat template.

        They are as before there was a default where that changes nothing, so that the keys of
        cached rows stay, too.
        """
        asked = read_learn(self.options.text.learn)
        writes_blocks = has_end_of_reasoning(self.chat_template.source)
        return asked.resolved(writes_blocks=writes_blocks).text

    def renderer(self, row_format: Format, learn: str) -> Renderer:
        """Make the renderer of rows of this format. learn: as of `Renderer`."""
        return Renderer(
            self.tokenizer,
            self.template,
            learn,
            row_format.template,
            self.workers,
            self.options.text.image_processor,
        )
