"""A model's processor of images, from transformers.

It writes the places of images into a text, and makes the pixels for a model.
"""

import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from fsdp_qlora.data.content import BadRow, Segment
from fsdp_qlora.data.text.image_places import with_placeholders
from fsdp_qlora.data.text.image_store import load
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import read_json, record_of
from fsdp_qlora.utils.text import first_line

# The files of which transformers' processors read their settings; a model of text has neither.
_FILES = ("processor_config.json", "preprocessor_config.json")
NO_FILES = f"has neither {_FILES[0]} nor {_FILES[1]}"
"""Why the folder of a model for images has no processor, as the end of a sentence."""
NO_ANSWERS = (
    "the tokens of a prompt with images see later ones of it in this model, and answers to such "
    "prompts cannot be sampled here"
)
"""Why there are no answers to prompts with images, as the end of a sentence."""
_TOKENS = ("input_ids", "attention_mask")
_TYPES = "token_type_ids"
_LABELS = "labels"
_TRIED = (224, 224)  # pixels of an image that tells what the processor gives
_USUAL = (1024, 1024)


class ImageProcessor:
    """The processor of a model folder, loaded when the first row shows an image.

    Threads may share it.

    Args:
        load: gives an image by its name, as Pillow's in RGB.
    """

    def __init__(self, folder: Path, name: str, load: Callable[[bytes], Any] = load) -> None:
        self.folder = folder
        self.name = name
        self._load = load
        # The processor's fast tokenizer may raise "Already borrowed" where two threads call it.
        self._lock = threading.RLock()

    @classmethod
    def find(
        cls, folder: Path, name: str, load: Callable[[bytes], Any] = load
    ) -> "ImageProcessor | None":
        """None if the folder of the model `name` has no such processor, as with a model of text."""
        return cls(folder, name, load) if _files(folder) else None

    @property
    def identity(self) -> list[str]:
        """Hashes of the files that the tokens of images depend on."""
        return [record_of(path).sha256 for path in _files(self.folder)]

    @cached_property
    def _processor(self) -> Any:
        """transformers' processor without its parts for video and sound.

        Those may need libraries that images do not.

        Raises:
            UserError: there is none, or it cannot be read.
        """
        try:
            kind: Any = PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(self.folder))]
            # A class that does not check its parts, so that those for video and sound may be None.
            alone: Any = type(
                kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None}
            )
            kinds = {"image_processor": AutoImageProcessor, "tokenizer": AutoTokenizer}
            parts = {name: part.from_pretrained(self.folder) for name, part in kinds.items()}
            settings, _ = kind.get_processor_dict(self.folder)
            return alone.from_args_and_dict(
                [parts.get(name) for name in kind.get_attributes()], settings
            )
        except Exception as error:  # transformers raises many kinds
            raise UserError(
                f"model_name {self.name}: its processor of images cannot be used "
                f"({first_line(error)}). Images need Pillow: pip install 'fsdp_qlora[images]'; "
                "with old releases of transformers torchvision, too."
            ) from error

    @cached_property
    def _names(self) -> tuple[list[str], list[str]]:
        """Names of the processor's outputs besides tokens: for each token, and for each image."""
        from PIL import Image as Pillow

        # Processors do not say which outputs they have, so one is tried.
        outputs = self._call(self._processor.image_token, [Pillow.new("RGB", _TRIED)])
        outputs.pop("text_replacement_offsets")
        types = self.kinds_of(outputs["input_ids"])
        if self.tells_answers:
            outputs.pop(_LABELS, None)  # rows have their own
            types = torch.zeros_like(types)  # a prompt alone
        shape = types.shape
        of_tokens = [
            name
            for name, value in outputs.items()
            if value.shape[:2] == shape and name not in _TOKENS
        ]
        # `model_inputs` makes these for the rows of a micro-batch, which the processor never sees
        # as a whole: it can make only the one that it knows.
        unknown = [name for name in of_tokens if not torch.equal(outputs[name], types)]
        if unknown:
            raise UserError(
                f"model_name {self.name}: its processor describes every token of a row with images "
                f"by {unknown[0]}, which is not known here; rows of text can be trained."
            )
        return of_tokens, [name for name in outputs if name not in (*of_tokens, *_TOKENS)]

    @cached_property
    def tells_answers(self) -> bool:
        """Whether types of tokens are 0 in a prompt and 1 in its answer, and not of images.

        Tokens of such a prompt see each other in both directions.
        """
        from PIL import Image as Pillow

        # Such a processor takes the answer by this name.
        if "suffix" not in inspect.signature(self._processor.__call__).parameters:
            return False
        images = [Pillow.new("RGB", _TRIED)]
        outputs = self._call(self._processor.image_token, images, suffix=["."])
        if _TYPES not in outputs:
            return False
        [types] = outputs[_TYPES].tolist()
        of_images = outputs[_TYPES][self.kinds_of(outputs["input_ids"]) == 1]
        return types == sorted(types) and {*types} == {0, 1} and not bool(of_images.any())

    @cached_property
    def example(self) -> dict[str, torch.Tensor]:
        """The processor's outputs for an image of a usual size."""
        from PIL import Image as Pillow

        return self._of_images([Pillow.new("RGB", _USUAL)])

    def kinds_of(self, input_ids: torch.Tensor) -> torch.Tensor:
        """1 for tokens that stand for images and 0 for others, int64 [B, T]."""
        return torch.tensor(self._processor.create_mm_token_type_ids(input_ids.tolist()))

    def _call(self, text: str, images: Sequence[Any], **options: Any) -> dict[str, Any]:
        """The processor's outputs for one text."""
        options |= {"return_text_replacement_offsets": True, "return_tensors": "pt"}
        with self._lock:
            return dict(self._processor(text=[text], images=[[*images]], **options))

    def expand(
        self, row: Sequence[Segment], images: Sequence[Any]
    ) -> tuple[list[Segment], int, int, int]:
        """Write out the tokens that stand for images, which are never learned.

        Returns:
            The segments, how many of the images they show, how many numbers the processor makes of
            these, and how many of `image_ids` it writes for them.
        Raises:
            BadRow: the text shows more images, or the processor refuses one.
        """
        text = "".join(segment.text for segment in row)
        token = self._processor.image_token
        count = text.count(token)
        if count > len(images):
            raise BadRow(f"the chat template shows {count} of the row's {len(images)} images")
        if not count:
            return [*row], 0, 0, 0
        try:
            outputs = self._call(text, images[:count])
        except Exception as error:  # such as of an image that is too narrow
            raise BadRow(f"the model's processor refuses an image ({first_line(error)})") from error
        written = _written(outputs)
        num_values = sum(outputs[name].numel() for name in self._names[1])
        tokens = self._processor.tokenizer.convert_ids_to_tokens([*self.image_ids])
        num_tokens = sum(text.count(shown) for text in written for shown in filter(None, tokens))
        return [*_replace(row, token, iter(written))], count, num_values, num_tokens

    def tokens_for(self, images: Sequence[Any]) -> tuple[list[list[int]], int]:
        """The tokens that stand for each image, and how many numbers the processor makes of all.

        Raises BadRow: the processor refuses an image, or the model's prompts are not causal.
        """
        if self.tells_answers:
            raise BadRow(NO_ANSWERS)
        places = [Segment(self._processor.image_token, learned=False)] * len(images)
        segments, _, num_values, _ = self.expand(places, images)
        # What is written for an image is between two empty texts.
        written = [segment.text for segment in segments if segment.text]
        with self._lock:
            ids = self._processor.tokenizer(written, add_special_tokens=False)["input_ids"]
        return ids, num_values

    def with_placeholders(self, ids: Sequence[int], images: Sequence[Any]) -> list[int]:
        """The tokens of a prompt with one token for each image, as before `expand`.

        Args:
            ids: with all tokens of the images.
        Raises:
            ValueError: they do not show these images.
        """
        token = self._processor.image_token
        with self._lock:
            written = _written(self._call(token * len(images), images))
            return with_placeholders(ids, written, token, self._processor.tokenizer)

    @cached_property
    def model_ids(self) -> tuple[int, ...]:
        """The tokens at which the model looks for an image, a video or sound."""
        try:
            config = AutoConfig.from_pretrained(self.folder, trust_remote_code=False).to_dict()
        except (OSError, ValueError):  # of the code that comes with a model
            config = read_json(self.folder / "config.json")
        return tuple({*_media_ids(config)})

    @property
    def image_ids(self) -> tuple[int, ...]:
        """The tokens that stand for images."""
        return tuple({*self._processor.image_token_ids, *self.model_ids})

    def outputs_of(self, names: Iterable[bytes]) -> dict[str, torch.Tensor]:
        """The processor's outputs for the images of a row, by their names in the store."""
        return self._of_images([*map(self._load, names)])

    def _of_images(self, images: Sequence[Any]) -> dict[str, torch.Tensor]:
        outputs = self._call(self._processor.image_token * len(images), images)
        # llama4's makes pixels in bfloat16; a model casts float32 to what it computes in.
        return {
            name: outputs[name].float() if outputs[name].is_floating_point() else outputs[name]
            for name in self._names[1]
        }

    def model_inputs(
        self,
        outputs: Sequence[Mapping[str, torch.Tensor]],
        input_ids: torch.Tensor,
        taken: Mapping[str, inspect.Parameter],
        is_prompt: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """The arguments of a model for the images of rows.

        What is of other sizes for other rows is padded with zeros, as processors do it.

        Args:
            outputs: from `outputs_of`, for each row that has images.
            input_ids: of all rows, int64 [B, T].
            taken: the parameters of the model's forward pass, which gets no other arguments.
            is_prompt: whether a token sees its row's other such tokens in both directions, bool
                [B, T]; read if the processor tells prompts from answers.
        """
        of_tokens, of_images = self._names
        types = self.kinds_of(input_ids)
        if self.tells_answers:
            if is_prompt is None:
                raise ValueError("this model must be told which tokens are of the prompt")
            types = (~is_prompt).long()
        inputs = {
            name: _concatenate([output[name] for output in outputs])
            for name in of_images
            if name in taken
        }
        return inputs | {name: types for name in of_tokens if name in taken}


def _written(outputs: Mapping[str, Any]) -> list[str]:
    """The text that the processor puts in place of each image token, from transformers."""
    return [place["replacement"] for place in outputs["text_replacement_offsets"][0]]


def _files(folder: Path) -> list[Path]:
    return [folder / name for name in _FILES if (folder / name).is_file()]


def _media_ids(config: Mapping[str, Any]) -> Iterator[int]:
    """The values of image_token_id and its like, in a configuration and its parts."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _media_ids(value)
        elif isinstance(value, int) and re.fullmatch("(image|video|audio)_token_(id|index)", name):
            yield value


def _replace(row: Iterable[Segment], token: str, written: Iterator[str]) -> Iterator[Segment]:
    """The segments with what is written out for each `token`."""
    for segment in row:
        for index, text in enumerate(segment.text.split(token)):
            if index:
                yield Segment(next(written), learned=False)
            yield Segment(text, segment.learned)


def _concatenate(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One after the other, filled up with zeros to the largest of them."""
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        # F.pad wants (before, after) of each dim from the last one on; the first dim is not padded.
        sides: list[int] = []
        for most, size in zip(reversed(shape), reversed(tensor.shape), strict=False):
            sides += [0, most - size]
        padded.append(F.pad(tensor, sides))
    return torch.cat(padded)
