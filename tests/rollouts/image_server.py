"""A small server with vLLM's route for tokens beside images: for tests, where vLLM is not.

It expands each image's token and computes its pixels by transformers' processor and model alone, so
that other images, pixels or places would give other tokens or log-probabilities.
"""

import io
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

from tests.rollouts.lora_server import LoraServer, Sampler, error

PNG = "data:image/png;base64,"


def shown(body: dict[str, Any]) -> list[Any]:
    """The images of a request, as Pillow's."""
    from PIL import Image

    urls = [part["url"] for part in body["content_parts"] if part["type"] == "image_url"]
    return [Image.open(io.BytesIO(b64decode(url.removeprefix(PNG)))) for url in urls]


class ImageServer(LoraServer):
    """`choose` also gets the images of a request, `images`, and may name the prompt's tokens by
    setting `prompt_token_ids` in it.
    """

    def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not body.get("token_ids"):
            return 400, error("token_ids: Field required")
        request = {**body["sampling_params"], "model": body["model"], "prompt": body["token_ids"]}
        request["images"] = shown(body)
        status, answer = self.completions(request)
        if status == 200:
            [choice] = answer["choices"]
            logps = choice["logprobs"]["token_logprobs"]
            choice["logprobs"] = {"content": [{"logprob": logp} for logp in logps]}
            answer["prompt_token_ids"] = request["prompt_token_ids"]
        return status, answer


class ImageSampler(Sampler):
    """Samples answers to prompts with images and to others.

    Log-probabilities are those before logit_bias, as vLLM's.
    """

    def __init__(self, folder: Path, family: str) -> None:
        from transformers import AutoModelForImageTextToText, AutoTokenizer

        from tests.parity.test_images import PROCESSORS

        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.end = int(self.tokenizer.eos_token_id)
        self.processor = PROCESSORS[family](folder)
        self._loaded = ""

    def sample(self, request: dict[str, Any]) -> tuple[list[int], list[float]]:
        import torch

        inputs = self._inputs(request["prompt"], request.get("images", []))
        ids = inputs.pop("input_ids")
        request["prompt_token_ids"] = ids[0].tolist()
        source = torch.Generator().manual_seed(request["seed"])
        tokens: list[int] = []
        logps: list[float] = []
        while len(tokens) < request["max_tokens"] and self.end not in tokens:
            with torch.no_grad():
                logits = self._logits(ids, inputs, tokens) / request["temperature"]
            biased = logits.clone()
            for token, bias in request.get("logit_bias", {}).items():
                biased[int(token)] += bias
            drawn = torch.multinomial(biased.softmax(dim=-1), 1, generator=source)
            tokens.append(int(drawn))
            logps.append(float(logits.log_softmax(dim=-1)[tokens[-1]]))
        return tokens, logps

    def _inputs(self, prompt: list[int], images: list[Any]) -> dict[str, Any]:
        """The processor's tokens and arguments."""
        import torch

        if not images:
            return {"input_ids": torch.tensor([prompt])}
        text = self.tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
        options: dict[str, Any] = {"add_special_tokens": False, "return_tensors": "pt"}
        inputs = dict(self.processor(text=[text], images=[images], **options))
        inputs.pop("attention_mask")
        return inputs

    def _logits(self, ids: Any, inputs: dict[str, Any], tokens: list[int]) -> Any:
        """The logits of the token after some, [V]."""
        import torch

        others = dict(inputs)
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in others:
                others[name] = torch.nn.functional.pad(others[name], (0, len(tokens)))
        whole = torch.cat([ids, torch.tensor([tokens], dtype=torch.long)], dim=1)
        return self.model(input_ids=whole, **others).logits[0, -1].float()


def main(folder: str, family: str, port: str) -> None:
    import torch

    torch.set_num_threads(1)
    sampler = ImageSampler(Path(folder), family)
    ImageServer("tiny", sampler, sampler.end, int(port)).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
