"""Rollouts by a server that takes LoRA adapters at run time.

A server has OpenAI's completions API and takes LoRA adapters at run time, as vLLM. Before each
generation the adapter is written to a folder that both see, and loaded under a name of its own: the
run, the version and a hash of its weights. Requests ask for that name, and an answer under another
one ends the run. So nothing is learned from other weights, whichever process dies in between.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fsdp_qlora.data.batches.row_images import RowImages
from fsdp_qlora.distributed.process_group import raise_on_all_ranks
from fsdp_qlora.distributed.ranks import Ranks, derive_seed
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.model.adapters.peft_folder import WEIGHTS
from fsdp_qlora.training.episodes.played_episode import Episode
from fsdp_qlora.training.generation.sampling import Completion, SamplingOptions, Stops
from fsdp_qlora.training.rl.client import Server
from fsdp_qlora.training.rl.engine import PromptTokens
from fsdp_qlora.training.rl.server_answers import ServerAnswers
from fsdp_qlora.training.rl.server_requests import ImageSender, SentPrompt
from fsdp_qlora.utils.errors import RolloutError, TrainingError
from fsdp_qlora.utils.files import record_of


def completions_of(text: str) -> list[Completion]:
    """The completions of the JSON that `ServerEngine.ask` returns."""
    return [Completion(*values) for values in json.loads(text)]


@dataclass(eq=False)
class ServerEngine:
    """Has a server answer prompts, as `Engine` says."""

    server: Server
    save: Callable[[Path], object]
    """Saves the adapter into a folder; called on every rank."""
    prefix: Path
    """Begins the paths of these folders, with the run's name."""
    ranks: Ranks
    control: Control
    stops: Stops
    options: SamplingOptions
    vocab_size: int
    image_sender: ImageSender | None = None
    """Prepares prompts with images, if the model takes any."""

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        generation: int,
        version: int,
        images: Sequence[RowImages] | None = None,
    ) -> list[Completion]:
        """Save the adapter, and have the server answer with it."""
        self.publish(version)
        asked = PromptTokens.of(prompts, images)
        answers = partial(self.ask, version, asked, generation)
        return completions_of(self.server.answer_of(answers, self.control, self.ranks, version))

    def play(self, episodes: Sequence[Episode], generation: int, version: int) -> None:
        """Save the adapter, and have the server write the turns of episodes as a `TurnEngine`.

        Each episode goes on by itself.
        """
        self.publish(version)
        turns = partial(self._turns, version, episodes, generation)
        self.server.answer_of(turns, self.control, self.ranks, version)

    def publish(self, version: int, versions_needed: Callable[[], set[int]] = set) -> None:
        """Save the adapter for the server, and delete older ones. Called on every rank.

        versions_needed: gives those that stay besides the newest one; called on rank 0.
        """
        folder = self._folder(version)
        with raise_on_all_ranks(TrainingError, self.ranks.device):
            if self.ranks.is_rank_0:
                folders = sorted(folder.parent.glob("*"), key=lambda path: path.stat().st_mtime)
                needed = {self._folder(needed) for needed in versions_needed()}
                # The server may still read the newest one.
                for old in folders[:-1]:
                    if old not in needed:
                        shutil.rmtree(old, ignore_errors=True)
            self.save(folder)

    def _folder(self, version: int) -> Path:
        return self.prefix.with_name(f"{self.prefix.name}-v{version}")

    def name_of(self, version: int) -> str:
        """The name of a saved adapter on the server; empty if its folder cannot be read.

        It has a hash, so that a server cannot answer by other weights of the same version, such as
        those of a run that was resumed from an earlier checkpoint.
        """
        folder = self._folder(version)
        try:
            return f"{folder.name}-{record_of(folder / WEIGHTS).sha256[:12]}"
        except OSError:
            return ""

    def ask(self, version: int, prompts: PromptTokens, generation: int) -> str:
        """Ask for all answers of a saved adapter. Called in a thread of rank 0.

        Returns:
            JSON for `completions_of`.
        """
        name, load = self._loaded(version)
        asked = self._asking(self.options.max_new_tokens)

        # The seed follows from the prompt's place: an answer that is asked for again, after a fault
        # or by a resumed run, has the same one.
        def answer(place: int) -> Completion:
            seed = derive_seed("rollouts", self.options.seed, generation, place)
            return asked.ask(asked.request(name, self._sent(prompts, place), seed), load)

        return json.dumps(self.server.all_answers(len(prompts.ids), answer))

    def _sent(self, prompts: PromptTokens, place: int) -> SentPrompt:
        """A prompt as the server gets it."""
        images = prompts.images[place]
        if not len(images):
            return SentPrompt(prompts.ids[place])
        assert self.image_sender is not None, "prompts have images, and nothing prepares them"
        return self.image_sender.sent(prompts.ids[place], images)

    def _turns(self, version: int, episodes: Sequence[Episode], generation: int) -> str:
        """Play all episodes. Returns no text."""
        name, load = self._loaded(version)

        def play(place: int) -> None:
            episode = episodes[place]
            episode.begin()
            while not episode.is_over:
                parts = ("rollouts", self.options.seed, generation, place)
                seed = derive_seed(*parts, *([episode.turn] if episode.turn else []))
                asked = self._asking(episode.room)
                request = asked.request(name, SentPrompt(episode.token_ids), seed)
                # Each turn has the patience of an answer: an episode may last longer.
                episode.take(self.server.patiently(partial(asked.ask, request, load)))

        self.server.all_answers(len(episodes), play)
        return ""

    def _asking(self, most: int) -> ServerAnswers:
        """Asks for answers of `most` tokens at most."""
        texts = [self.stops.text] if self.stops.text else []
        options = dataclasses.replace(self.options, max_new_tokens=most)
        return ServerAnswers(self.server, self.stops, texts, options, self.vocab_size)

    def _loaded(self, version: int) -> tuple[str, Callable[[], None]]:
        """Have the server load a saved adapter. Returns its name, and what loads it again."""
        name = self.name_of(version)
        if not name:
            raise RolloutError(f"The adapter in {self._folder(version)} cannot be read.")
        load = partial(self.server.load_newest, name, self._folder(version))
        self.server.patiently(load)
        return name, load
