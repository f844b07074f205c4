"""A training loop as a user writes it, which a test may kill: python -m tests.service.loop URL
MODEL LOG STEPS

It saves its state after each second step, notes the path in LOG, and goes on from the last one that
is there.
"""

import json
import sys
from pathlib import Path

import tinker
from tinker import types

from tests.service.harness import KEY, datums

PARAMS = types.AdamParams(learning_rate=1e-3, eps=1e-8, grad_clip_norm=1.0)


def main(url: str, model: str, log: Path, steps: int) -> None:
    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    saved = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if saved:
        trainer = client.create_training_client_from_state_with_optimizer(
            saved[-1]["path"]
        ).result()
    else:
        trainer = client.create_lora_training_client(model, rank=4, seed=1).result()
    for step in range(saved[-1]["step"] if saved else 0, steps):
        futures = [
            trainer.forward_backward(datums(3, 2 * step + part), "cross_entropy")
            for part in range(2)
        ]
        trainer.optim_step(PARAMS).result()
        print(step, [future.result().metrics["loss:sum"] for future in futures], flush=True)
        sampler = trainer.save_weights_and_get_sampling_client().result()
        sampler.sample(
            types.ModelInput.from_ints([5, 6]), 2, types.SamplingParams(max_tokens=4, seed=step)
        ).result()
        if step % 2 or step == steps - 1:
            path = trainer.save_state(f"step-{step + 1}").result().path
            with log.open("a") as file:  # one write: a line is there as a whole or not at all
                file.write(json.dumps({"step": step + 1, "path": path}) + "\n")
    client.close("success").result()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
