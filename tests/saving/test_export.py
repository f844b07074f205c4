"""What is saved, and that nothing of it is lost or half there."""

import errno
import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp_qlora.__main__ import main
from fsdp_qlora.checkpoint import checkpoint
from fsdp_qlora.export import whole_model
from fsdp_qlora.export.values import LiveValues
from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from fsdp_qlora.utils import safetensors_files
from fsdp_qlora.utils.errors import TrainingError, UserError
from fsdp_qlora.utils.safetensors_files import PackedFiles
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, on_ranks, run_ranks, train_ok
from tests.parity.test_experts import FAMILIES
from tests.saving.test_checkpoint import make


def test_a_tokenizer_with_several_chat_templates_is_saved_whole(models, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(models(), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(folder)
    options = {
        "model_name": folder,
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(4)),
        "max_steps": 1,
    }
    train_ok(2, tmp_path / "out", **options)
    train_ok(2, tmp_path / "out", **options, resume="auto:replace")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template
    assert (tmp_path / "out" / "adapter_config.json").is_file() and not (
        tmp_path / "out" / ".saving"
    ).exists()


def test_full_training_keeps_the_generation_config_of_its_base(models, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(models(), folder)
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [1, 5], "temperature": 0.7, "do_sample": true}'
    )
    options = {
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(4)),
        "max_steps": 1,
        "train_type": "full",
    }
    train_ok(2, tmp_path / "out", model_name=folder, **options)
    saved, base = (path / "generation_config.json" for path in (tmp_path / "out", folder))
    assert saved.read_bytes() == base.read_bytes()


def test_a_run_that_cannot_start_leaves_the_earlier_result(models, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", make_rows(4))
    train_ok(1, tmp_path / "out", model_name=models(), dataset=data, max_steps=1)
    earlier = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    broken = tmp_path / "broken"
    shutil.copytree(models(), broken)
    state = load_file(broken / "model.safetensors")
    state["model.norm.weight"][3] = torch.nan
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    argv = flags(
        model_name=broken, dataset=data, output_dir=tmp_path / "out", resume="auto:replace"
    )
    statuses, output = run_ranks(1, argv, tmp_path / "logs")
    assert statuses == [2] and "model.norm.weight has values that are not finite" in output
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == earlier


def test_two_files_with_the_same_tensor_are_refused(models, tmp_path):
    state = load_file(models() / "model.safetensors")
    for name in ("a.safetensors", "b.safetensors"):
        save_file(state, tmp_path / name)
    with pytest.raises(UserError, match=r"both have tensor"):
        WeightFiles(tmp_path)
    shutil.copyfile(tmp_path / "a.safetensors", tmp_path / "model.safetensors")
    assert {path.name for path in WeightFiles(tmp_path).files.values()} == {"model.safetensors"}


def _train_differently(argvs: list[list[str]]) -> int:
    import os

    import train

    return train.main(argvs[int(os.environ["RANK"])])


@pytest.mark.parametrize("what", ["options", "rows"])
def test_ranks_that_disagree_are_stopped_before_training(what, models, tmp_path):
    rows = [write_rows(tmp_path / f"{rank}.jsonl", make_rows(4, seed=rank)) for rank in range(2)]
    argvs = [
        flags(
            model_name=models(),
            dataset=rows[rank if what == "rows" else 0],
            lr=1e-3 * (1 + rank * (what == "options")),
            output_dir=tmp_path / "out",
        )
        for rank in range(2)
    ]
    statuses, output = on_ranks(2, _train_differently, (argvs,), tmp_path / "logs")
    assert statuses == [2, 2]
    assert output.count(f"do not agree on the {what}: rank 1 differ") == 2


class NotedValues(LiveValues):
    """Notes which values are gathered, in which order."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__(keeps=keeps)
        self.gathered: list[int] = []

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        self.gathered.append(id(tensor))
        return super().whole(tensor)


@pytest.mark.parametrize("new_blocks", [False, True])
def test_a_whole_model_is_saved_when_old_checkpoints_make_room(
    new_blocks, models, tmp_path, monkeypatch
):
    folder = models()
    output = tmp_path / "out"
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." in name)
    for step in (1, 2, 3):
        make(output / "checkpoints", step)
    monkeypatch.setattr(safetensors_files, "_FILE_BYTES", 100_000)
    write = PackedFiles.write

    def save(values: NotedValues) -> None:
        options = {"base": WeightFiles(folder) if new_blocks else None, "dtype": torch.float32}
        companions = AutoTokenizer.from_pretrained(folder).save_pretrained
        whole_model.save_model(model, model.config, companions, output, values=values, **options)  # type: ignore[arg-type]

    def write_while_there_is_room(*args: object, **kwargs: object) -> None:
        if len(checkpoint.published(output / "checkpoints")) > room_from:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(PackedFiles, "write", write_while_there_is_room)
    room_from = 1
    first = NotedValues(keeps=True)
    save(first)
    saved = {
        name: tensor
        for path in output.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    expected = load_file(folder / "model.safetensors")
    assert saved.keys() == expected.keys() and all(
        torch.equal(saved[name], expected[name]) for name in expected
    )
    assert list(checkpoint.published(output / "checkpoints")) == [3]
    room_from = 0
    second = NotedValues(keeps=True)
    with pytest.raises(
        TrainingError,
        match=r"No space left.*the same command saves it without training again",
    ):
        save(second)
    # Gathering is collective: it goes on where nothing more can be written.
    assert second.gathered == first.gathered != [] and not list(output.glob(".saving*"))
    assert list(checkpoint.published(output / "checkpoints")) == [3]


@pytest.mark.parametrize(
    "family", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.nightly)]
)
def test_vllm_gets_each_expert_under_its_name_in_the_files(family, models, tmp_path):
    base = models(family, **FAMILIES[family])
    options = {
        "model_name": base,
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(4)),
        "train_type": "lora",
    }
    options |= {
        "lora_target_parameters": "experts.gate_up_proj,experts.down_proj",
        "lr": 1e-2,
        "lora_rank": 4,
    }
    run = tmp_path / "run"
    train_ok(
        1,
        **options,
        output_dir=run,
        max_steps=3,
        batch_size=2,
        context_length=256,
        precision="fp32",
    )
    served = tmp_path / "served"
    merged = tmp_path / "merged"
    assert main(["export", str(run), "--for", "vllm", "--out", str(served)]) == 0
    assert main(["merge", "--adapter", str(run), "--out", str(merged), "--dtype", "fp32"]) == 0
    config = json.loads((served / "adapter_config.json").read_text())
    adapter, before, after = (
        {
            name: tensor
            for file in folder.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        for folder in (served, base, merged)
    )
    experts = [name for name in before if re.search(r"experts[.]\d+[.]", name)]
    assert len(experts) == 2 * 4 * 3 and config["target_parameters"] is None
    assert {name.split(".")[-2] for name in experts} <= set(config["target_modules"])
    assert len(adapter) == 2 * (len(experts) + 2 * 4)  # with the attention's
    changed = 0
    for name in experts:
        key = f"base_model.model.{name.removesuffix('.weight')}"
        update = adapter[f"{key}.lora_B.weight"] @ adapter[f"{key}.lora_A.weight"]
        torch.testing.assert_close(
            update * config["lora_alpha"] / config["r"],
            after[name] - before[name],
            atol=1e-6,
            rtol=0,
        )
        changed += bool(update.norm() > 1e-3)
    assert changed > len(experts) / 2


@pytest.mark.parametrize(
    "name", ["down_proj", pytest.param("gate_up_proj", marks=pytest.mark.slow)]
)
def test_vllm_gets_adapters_of_both_tensors_of_fused_experts(name, models, tmp_path):
    base = models("gpt_oss", **FAMILIES["gpt_oss"])
    run = tmp_path / "run"
    train_ok(
        1,
        model_name=base,
        dataset=write_rows(tmp_path / "rows.jsonl", make_rows(4)),
        train_type="lora",
        lora_target_parameters=f"experts.{name}",
        lr=1e-2,
        lora_rank=4,
        output_dir=run,
        max_steps=3,
        batch_size=2,
        precision="fp32",
    )
    served = tmp_path / "served"
    merged = tmp_path / "merged"
    assert main(["export", str(run), "--for", "vllm", "--out", str(served)]) == 0
    assert main(["merge", "--adapter", str(run), "--out", str(merged), "--dtype", "fp32"]) == 0
    adapter = load_file(served / "adapter_model.safetensors")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, merged))
    config = json.loads((served / "adapter_config.json").read_text())
    experts = "model.layers.0.mlp.experts"
    # As vLLM reads them (`_stack_moe_lora_weights`): the inner adapter is that of gate and up.
    for parameter, wrapper in (("gate_up_proj", f"{experts}.base_layer"), ("down_proj", experts)):
        lora_A, lora_B = (
            adapter[f"base_model.model.{wrapper}.lora_{factor}.weight"] for factor in "AB"
        )
        lora_A = lora_A.reshape(4, -1, lora_A.shape[1])
        lora_B = lora_B.reshape(len(lora_B), -1, 4).permute(2, 0, 1)
        update = (lora_B @ lora_A).mT * config["lora_alpha"] / config["r"]
        changed = after[f"{experts}.{parameter}"] - before[f"{experts}.{parameter}"]
        torch.testing.assert_close(update, changed, atol=1e-6, rtol=0)
        assert bool(changed.norm() > 1e-3) == (parameter == name)
