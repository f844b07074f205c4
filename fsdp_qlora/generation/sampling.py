"""How the next token is chosen from a model's predictions."""

from dataclasses import dataclass

import torch

from fsdp_qlora.distributed import derive_seed


@dataclass(frozen=True)
class SamplingOptions:
    """temperature: 0 takes the most likely token. top_p: only the most likely tokens with this probability together
    are drawn from (Holtzman et al. 2020). seed: of the draws; a prompt's depend on it and its number alone."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def generator(self, number: int) -> torch.Generator:
        """The source of the draws for one prompt; torch's own is not touched."""
        return torch.Generator().manual_seed(derive_seed("generate", self.seed, number))

    def choose(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """A token from the logits [vocabulary] of the last position."""
        if self.temperature == 0:
            return int(logits.argmax())
        probabilities = (logits.float() / self.temperature).softmax(dim=-1).cpu()
        ordered, tokens = probabilities.sort(descending=True)
        before = ordered.cumsum(dim=0) - ordered
        ordered[before >= self.top_p] = 0.0  # the first stays
        return int(tokens[torch.multinomial(ordered, 1, generator=generator)])
