"""Rendering: a row's content becomes text through a prompt template or a chat template."""

import dataclasses
from types import TracebackType

from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data.chat_template import ChatTemplate
from fsdp_qlora.data.examples import BadRow, Chat, Content, Fields, Preference, Rendered, Segment, Text, Tokens
from fsdp_qlora.data.prompts import ChosenTemplate, PromptTemplate, as_chat
from fsdp_qlora.errors import UserError


class Renderer:
    """Makes rows text in one way.

    Args:
        chosen: of --prompt_template.
        learn: "assistant", "last" or "all": which turns are learned.
        of_format: the prompt template of the dataset's format.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chosen: ChosenTemplate, learn: str, of_format: PromptTemplate
    ) -> None:
        self._chosen = chosen
        self._learn = learn
        self._prompt = chosen.prompt or of_format
        self._chat = ChatTemplate(tokenizer, chosen.chat)

    def __enter__(self) -> "Renderer":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._chat.__exit__(kind, error, trace)

    def render(self, content: Content) -> list[Rendered]:
        """The row as text or tokens; several where turns of a chat become rows of their own.

        Raises:
            BadRow: it cannot be rendered, or nothing of it is learned.
            UserError: no row can be rendered.
        """
        rendered = [row for row in self._render(content) if _learns(row)]
        if not rendered:
            raise BadRow("nothing to learn")
        return rendered

    def _render(self, content: Content) -> list[Rendered]:
        if isinstance(content, Preference):
            raise UserError(
                "These rows are preferences (chosen and rejected), and training on them is not supported yet. To train "
                "on the chosen answers alone, give --columns completion=chosen --dataset_format prompt_completion."
            )
        if isinstance(content, Fields) and self._chosen.is_chat:
            content = as_chat(content)
        if isinstance(content, Fields):
            return [Rendered(self._prompt.fill(content, learn=self._learn))]
        if isinstance(content, Chat):
            rows, notes = self._chat.fill(content, learn=self._learn)
            notes += (f"turns have fields that are not used: {', '.join(content.unused)}",) if content.unused else ()
            return [
                Rendered(segments, is_joint=True, is_templated=True, notes=() if number else notes)
                for number, segments in enumerate(rows)
            ]
        if isinstance(content, Text):
            return [Rendered(self._relearn(content), is_joint=True)]
        if isinstance(content, Tokens):
            return [Rendered(tokens=content)]
        return [Rendered(content)]

    def _relearn(self, text: Text) -> list[Segment]:
        """The segments of a text, learned as --learn says."""
        last = max((i for i, segment in enumerate(text.segments) if segment.learned and segment.text), default=0)

        def is_learned(i: int, segment: Segment) -> bool:
            return self._learn == "all" or (segment.learned and (self._learn != "last" or i == last))

        return [dataclasses.replace(segment, learned=is_learned(i, segment)) for i, segment in enumerate(text.segments)]


def _learns(row: Rendered) -> bool:
    if row.tokens:
        return any(row.tokens.learned)
    return any(segment.learned and segment.text for segment in row.segments)
