"""A small server with the routes and words of vLLM's that --rollout_url needs: for tests, where
vLLM is not.

An answer depends on the adapter's bytes, the prompt and the seed alone, also after the server was
killed.
"""

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

Choose = Callable[[str, dict[str, Any]], tuple[list[int], list[float]]]
Fault = Callable[[str, dict[str, Any]], tuple[int, Any] | None]


class LoraServer(ThreadingHTTPServer):
    """Answers with `choose`, which gets the adapter's folder, empty for the base, and a request;
    returns token ids and log-probabilities.

    faults: each may answer a path and a body itself, with a status and content: JSON, bytes as they
    are, an iterator of all that is sent, the place of a redirect, or None, which cuts the
    connection. asked: the paths and bodies of all requests. adapters: name -> folder.

    In a with statement a thread of this process answers.
    """

    daemon_threads = True
    request_queue_size = 256
    allow_reuse_address = True

    def __init__(self, base: str, choose: Choose, end: int, port: int = 0) -> None:
        super().__init__(("localhost", port), _Handler)
        self.base = base
        self.choose = choose
        self.end = end
        self.lock = threading.Lock()
        self.adapters: dict[str, str] = {}
        self.faults: list[Fault] = []
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://localhost:{self.server_address[1]}"

    def respond(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append((path, body))
        for fault in self.faults:
            if found := fault(path, body):
                return found
        return getattr(self, path.rpartition("/")[2])(body)  # type: ignore[no-any-return]

    def models(self, body: dict[str, Any]) -> tuple[int, Any]:
        cards = [{"id": self.base, "parent": None}]
        return 200, {"data": cards + [{"id": name, "parent": self.base} for name in self.adapters]}

    def load_lora_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        name = body.get("lora_name")
        path = body.get("lora_path")
        if not name or not path or name in self.adapters:
            return 400, error("the request is wrong, or the adapter is there")
        if not (Path(path) / "adapter_config.json").is_file():
            return 404, error("No adapter found for <path>")
        self.adapters[name] = path
        return 200, "Success"

    def unload_lora_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        found = self.adapters.pop(body["lora_name"], None)
        return (200, "Success") if found else (404, error("it cannot be found"))

    def completions(self, body: dict[str, Any]) -> tuple[int, Any]:
        folders = {self.base: "", **self.adapters}
        if body["model"] not in folders:
            return 404, error(f"The model `{body['model']}` does not exist.")
        with self.lock:
            tokens, logps = self.choose(folders[body["model"]], body)
        choice = {
            "token_ids": tokens,
            "finish_reason": "stop" if tokens[-1] == self.end else "length",
        }
        choice["logprobs"] = None if body["logprobs"] is None else {"token_logprobs": logps}
        return 200, {"model": body["model"], "choices": [choice]}


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


class _Handler(BaseHTTPRequestHandler):
    server: LoraServer

    def do_GET(self) -> None:
        self._respond({})

    def do_POST(self) -> None:
        self._respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _respond(self, body: dict[str, Any]) -> None:
        status, content = self.server.respond(self.path, body)
        if content is None:
            self.connection.close()
            return
        if isinstance(content, Iterator):
            with contextlib.suppress(OSError):
                for piece in content:
                    self.wfile.write(piece)
            return
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        if 300 <= status < 400:
            self.send_header("Location", content)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class Sampler:
    """Samples from a model with PEFT's adapters, loaded from their folders."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.end = int(AutoTokenizer.from_pretrained(folder).eos_token_id)
        self._loaded = ""

    def __call__(self, adapter: str, request: dict[str, Any]) -> tuple[list[int], list[float]]:
        from peft import PeftModel

        if adapter != self._loaded:
            base = self.model.unload() if self._loaded else self.model
            self.model = PeftModel.from_pretrained(base, adapter).eval() if adapter else base
            self._loaded = adapter
        return self.sample(request)

    def sample(self, request: dict[str, Any]) -> tuple[list[int], list[float]]:
        import torch

        source = torch.Generator().manual_seed(request["seed"])
        tokens: list[int] = []
        logps: list[float] = []
        while len(tokens) < request["max_tokens"] and self.end not in tokens:
            with torch.no_grad():
                logits = (
                    self.model(input_ids=torch.tensor([request["prompt"] + tokens]))
                    .logits[0, -1]
                    .float()
                )
            drawn = (logits / request["temperature"]).log_softmax(dim=-1)
            tokens.append(int(torch.multinomial(drawn.exp(), 1, generator=source)))
            logps.append(float(drawn[tokens[-1]]))
        return tokens, logps


def main(folder: str, name: str, port: str) -> None:
    import torch

    torch.set_num_threads(1)
    sampler = Sampler(folder)
    LoraServer(name, sampler, sampler.end, int(port)).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
