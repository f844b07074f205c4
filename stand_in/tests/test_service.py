"""A service on GPUs: passes, steps and samples have the numbers of the same service on the CPU."""

import os
from collections.abc import Sequence

import numpy as np
import pytest

from stand_in.environment import Process, free_port, run
from tests.helpers.run import flags

tinker = pytest.importorskip("tinker", reason="the extra serve is not installed")
from tests.service import harness  # noqa: E402


def used(client: tinker.ServiceClient, model: str, teacher: str) -> list[list[float]]:
    """Losses of three steps of two passes each; log-probabilities of a prompt under the last
    weights, and a teacher.
    """
    trainer = client.create_lora_training_client(model, rank=4, seed=1).result()
    data = harness.datums(6)
    losses = list[float]()
    for _ in range(3):
        passes = [trainer.forward_backward(part, "cross_entropy") for part in (data[:2], data[2:])]
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        losses += [each.result().metrics["loss:sum"] for each in passes]
    samplers = [
        trainer.save_weights_and_get_sampling_client(),
        client.create_sampling_client(base_model=teacher),
    ]
    prompt = tinker.ModelInput.from_ints([5, 6, 7, 8])
    scored = list[list[float]]()
    for sampler in (each.result() for each in samplers):
        drawn = sampler.sample(prompt, 4, tinker.SamplingParams(max_tokens=4, seed=1)).result()
        assert [len(each.tokens) for each in drawn.sequences]
        scored.append(sampler.compute_logprobs(prompt).result()[1:])
    return [losses, *scored]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"train_type": "lora"}, {"train_type": "qlora", "use_cpu_offload": True}]
)
def test_a_service_in_bf16_on_two_gpus_has_the_numbers_of_a_cpu(options, models, tmp_path):
    model = str(models())
    teacher = str(models("llama", num_hidden_layers=3))
    port = free_port()
    found = list[list[list[float]]]()
    usual = {
        "precision": "bf16",
        "lora_rank": 8,
        "context_length": 128,
        "quant_cache": "off",
        **options,
    }
    usual["teacher"] = teacher
    on_cpu = harness.Service(models(), tmp_path / "on_cpu", 1, **usual)
    try:
        expected = used(on_cpu.client(), model, teacher)
    finally:
        on_cpu.end()

    def use(processes: Sequence[Process]) -> None:
        if (
            not found
            and os.path.exists(tmp_path / "rank0.log")
            and "Serving" in (tmp_path / "rank0.log").read_text()
        ):
            with tinker.ServiceClient(
                base_url=f"http://127.0.0.1:{port}", api_key=harness.KEY
            ) as client:
                found.append(used(client, model, teacher))
            for process in processes:
                process.kill()

    words = flags(model_name=model, folder=tmp_path / "folder", port=port, **usual)
    settings = {"PHANTOM_VALUES": 1, "PHANTOM_CC": 86, "TINKER_API_KEY": harness.KEY}
    run(
        ["-m", "fsdp_qlora", "serve", *words],
        tmp_path,
        ranks=2,
        settings=settings,
        while_running=use,
    )
    for ours, theirs in zip(found[0], expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-2, atol=2e-2)
