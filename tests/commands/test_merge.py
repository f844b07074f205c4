"""Merged models compute what the base and its adapter compute under PEFT, or what was trained on a
quantized base.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from fsdp_qlora.__main__ import main
from fsdp_qlora.export import card
from fsdp_qlora.export import merge as merging
from fsdp_qlora.utils import safetensors_files
from tests.helpers.metrics import read_metrics
from tests.helpers.models import PROBE
from tests.helpers.reference import LINEARS
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import ROOT, flags, train_ok
from tests.parity.test_experts import FAMILIES

EXPERTS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
FUSED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# What PEFT is given -> the base it is for.
KINDS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "lora": ("qwen2", {}, {"lora_alpha": 12}),
    "rslora with patterns": (
        "llama",
        {},
        {
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 8},
            "alpha_pattern": {"v_proj": 3},
        },
    ),
    "dora": ("qwen2", {}, {"use_dora": True, "bias": "all"}),
    "modules_to_save": ("llama", {}, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "modules_to_save of tied embeddings": (
        "llama",
        {"tie_word_embeddings": True},
        {"modules_to_save": ["embed_tokens"]},
    ),
    "lora of a tied head": (
        "llama",
        {"tie_word_embeddings": True},
        {"target_modules": ["lm_head", "q_proj"]},
    ),
    "tied embeddings": ("qwen2", {"tie_word_embeddings": True}, {}),
    "lora of embeddings": ("llama", {}, {"target_modules": ["embed_tokens", "o_proj"]}),
    "weights stored as [in, out]": (
        "gpt2",
        {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, "hidden_size": 64},
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    ),
    "experts": ("mixtral", FAMILIES["mixtral"], EXPERTS),
    "transposed experts": ("gpt_oss", FAMILIES["gpt_oss"], EXPERTS),
    "queries, keys and values in one tensor": (
        "sarvam_moe",
        FUSED,
        {"target_modules": ["q_proj", "v_proj"]},
    ),
}
# older versions know fewer
KINDS = {kind: row for kind, row in KINDS.items() if row[0] in CONFIG_MAPPING}


def make_adapter(base: Path, folder: Path, **options: object) -> Path:
    """An adapter that PEFT saves, all its values random."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(
        **{"r": 4, "target_modules": list(LINEARS), "task_type": "CAUSAL_LM", **options}
    )
    torch.manual_seed(1)  # PEFT draws too
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * (0.3 if "magnitude" in name else 0.1))
    adapted.save_pretrained(folder)
    return folder


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=PROBE).logits
    return logits


def peft_logits(base: Path, adapter: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return logits_of(PeftModel.from_pretrained(model, adapter))


def section(card: str, title: str) -> str:
    return card.partition(f"## {title}\n")[2].partition("\n## ")[0]


def merge(*argv: object) -> int:
    return main(["merge", *map(str, argv)])


@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_model_computes_what_peft_does(kind, models, tmp_path, monkeypatch):
    family, sizes, options = KINDS[kind]
    base = models(family, **sizes)
    adapter = make_adapter(base, tmp_path / "adapter", **options)
    out = tmp_path / "out"
    monkeypatch.setattr(merging, "_PIECE", 300)  # several pieces of every weight
    assert merge(adapter, "--output_dir", out, "--model_name", base) == 0
    expected = peft_logits(base, adapter)
    of_base = logits_of(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    assert (expected - of_base).abs().max() > 0.1
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    torch.testing.assert_close(logits_of(merged), expected, atol=1e-5, rtol=1e-5)
    before = load_file(base / "model.safetensors")
    after = load_file(out / "model.safetensors")
    more = {"lm_head.weight"} if "tied" in kind and kind != "tied embeddings" else set()
    assert after.keys() == before.keys() | more
    assert all(after[name].shape == value.shape for name, value in before.items())
    card = (out / "README.md").read_text()
    assert f"# Model made from {base.name}\n" in card
    assert f"- `lora_rank`: {options.get('r', 4)}\n" in card
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (out, base)]
    assert tokenizers[0]("sort the list") == tokenizers[1]("sort the list")


def test_a_model_in_several_files_is_merged_in_sixteen_bits(models, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(safetensors_files, "_FILE_BYTES", 50_000)
    base = models("llama")
    split = tmp_path / "split"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(split, max_shard_size="100KB")
    adapter = make_adapter(split, tmp_path / "adapter")
    out = tmp_path / "out"
    # the base that the adapter names
    assert merge("--adapter", adapter, "--out", out, "--dtype", "bf16") == 0
    index = [
        json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        for path in (split, out)
    ]
    assert index[0].keys() == index[1].keys() and len(set(index[1].values())) > 1
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    merged = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert merged.dtype == torch.bfloat16
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    whole = adapted.merge_and_unload()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(merged.state_dict()[name], value.bfloat16(), atol=0, rtol=2**-7)
    said = "".join(capsys.readouterr())
    assert f"Read back: {len(LINEARS)} weights of model.layers.1 are base + adapter" in said
    plain = AutoModelForCausalLM.from_pretrained(base).state_dict()
    rows = merged.state_dict().items()
    updates = [(whole.state_dict()[name] - plain[name]).flatten() for name, _ in rows]
    found = [(value.float() - plain[name]).flatten() for name, value in rows]
    update = torch.cat([each for each in updates if each.any()]).double()
    left = torch.cat([own for own, each in zip(found, updates, strict=True) if each.any()]).double()
    share = 100 * float(left @ update / (update @ update))
    assert f"Rounded to bfloat16: {share:.1f}% of the adapter's update is left" in said


def test_a_merge_whose_files_are_not_its_weights_is_no_result(
    models, tmp_path, monkeypatch, capsys
):
    base = models("llama")
    adapter = make_adapter(base, tmp_path / "adapter")
    write = merging._write_weights

    def write_damaged(merged: merging.MergedModel, folder: Path) -> None:
        write(merged, folder)
        path = folder / "model.safetensors"
        tensors = load_file(path)
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += 0.01
        save_file(tensors, path, metadata={"format": "pt"})

    monkeypatch.setattr(merging, "_write_weights", write_damaged)
    assert merge(adapter, "--out", tmp_path / "out", "--model_name", base) == 2
    said = "".join(capsys.readouterr())
    assert "model.layers.1.mlp.up_proj.weight is not the base with the adapter" in said
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("tied", "saved"), [(False, None), (False, ["lm_head"]), (True, ["embed_tokens", "lm_head"])]
)
def test_embeddings_that_peft_saved_with_new_tokens_are_merged(tied, saved, models, tmp_path):
    base = models("llama", tie_word_embeddings=tied)
    adapter = tmp_path / "adapter"
    out = tmp_path / "out"
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(328)
    options = {"target_modules": ["q_proj"], "modules_to_save": saved, "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(model, LoraConfig(r=4, **options))
    for parameter in adapted.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter) * parameter.requires_grad
    nn.init.normal_(adapted.base_model.model.model.layers[0].self_attn.q_proj.lora_B.default.weight)
    adapted.save_pretrained(adapter, save_embedding_layers=True)
    assert merge("--adapter", adapter, "--out", out, "--model_name", base) == 0
    merged = AutoModelForCausalLM.from_pretrained(out)
    assert merged.config.vocab_size == 328
    torch.testing.assert_close(logits_of(merged), logits_of(adapted), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"train_type": "qlora", "init_lora_weights": "loftq", "use_rslora": True},
        {"train_type": "hqq_dora", "n_bits": 3},
    ],
)
def test_a_merge_into_the_dequantized_base_has_the_loss_of_the_run(
    options, models, tmp_path, capsys
):
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(8))
    held_out = make_rows(6, seed=1)
    evaluated = write_rows(tmp_path / "held_out.jsonl", held_out)
    run = tmp_path / "run"
    out = tmp_path / "out"
    common = {"model_name": models("llama"), "dataset": rows, "precision": "fp32", "lr": 1e-2}
    common |= {"num_epochs": 3, "batch_size": 2, "eval_dataset": evaluated}
    train_ok(2, run, **common, **options)
    assert merge("--adapter", run, "--out", out, "--base", "dequantized") == 0
    record = json.loads((out / "training.json").read_text())
    card, trained = ((folder / "README.md").read_text() for folder in (out, run))
    for part in ("Prompt format", "Settings", "Versions"):
        assert f"## {part}\n{section(trained, part)}" in card
    assert record["merged"]["into"] == "dequantized" and "library_name: transformers" in card
    assert f"trained with fsdp_qlora as `{options['train_type']}` to step" in card
    capsys.readouterr()
    evaluate = flags(adapter=out, dataset=evaluated, precision="fp32")
    assert main(["evaluate", *evaluate, "--json"]) == 0
    [loss] = (found["loss"] for found in json.loads(capsys.readouterr().out).values())
    assert loss == pytest.approx(read_metrics(run, "eval_loss")[-1], abs=2e-5)


@pytest.mark.parametrize(("name", "is_loadable"), [("owner/name", True), ("folder", False)])
def test_a_record_without_the_bases_origin_is_read_by_its_name(name, is_loadable):
    earlier = {**card._UNKNOWN, "base": {"name": name}}
    merged = {"adapter": "run", "kind": "lora", "into": "original"}
    written = card.merged_documents(earlier, card.BaseName("other", is_on_hub=False), {}, merged)
    assert (f"base_model: {name}" in written["README.md"]) == is_loadable
    assert "other" not in written["training.json"]


def test_the_card_shows_the_names_of_a_strangers_record_as_text():
    odd = "x`\n# [a](http://b) <i>"
    earlier = {
        **card._UNKNOWN,
        "base": {"name": odd},
        "step": 1,
        "settings": {"train_type": odd, "lr": odd},
        "data": [{"name": odd, "rows": 1, "format": odd}],
        "parent": {"name": odd, "run_id": odd},
        "versions": {odd: odd},
    }
    merged = {"adapter": odd, "kind": "lora", "into": "original"}
    text = card.merged_documents(earlier, card.BaseName("", is_on_hub=False), {}, merged)[
        "README.md"
    ]
    shown = r"x\` # \[a\](http://b) \<i\>"
    body = text.split("\n---\n", 1)[1]
    assert body.count(shown) >= 9 and "[a](" not in body.replace(shown, "") and "\n# [" not in body


def test_merge_refuses_unsupported_runs_by_name(models, tmp_path, capsys):
    base = models("llama")
    out = tmp_path / "out"
    adapter = make_adapter(base, tmp_path / "adapter")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "theirs").touch()
    for argv, words in {
        ("--adapter", base): "it is a whole model",
        ("--adapter", adapter, "--base", "dequantized"): "was not trained on a quantized base",
        ("--adapter", adapter, "--out", tmp_path / "full"): "full exists already and is not empty",
        ("--adapter", adapter, "--model_name", models("qwen2", num_hidden_layers=1)): "does not "
        "fit this base",
        ("--adapter", adapter, "--ot", "x"): "Unknown option --ot",
    }.items():
        assert merge("--model_name", base, "--out", out, *argv) == 2, words
        assert words in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["theirs"]


def test_a_killed_merge_leaves_nothing_that_looks_finished(models, tmp_path):
    adapter = make_adapter(models("llama"), tmp_path / "adapter")
    out = tmp_path / "out"
    code = (
        "import time, sys\nfrom fsdp_qlora.utils.safetensors_files import PackedFiles\n"
        "PackedFiles.write = lambda *args: time.sleep(60)\n"
        "from fsdp_qlora.__main__ import main\nmain(sys.argv[1:])"
    )
    argv = ["merge", *flags(adapter=adapter, out=out)]
    with subprocess.Popen([sys.executable, "-c", code, *argv], cwd=ROOT, env=os.environ) as process:
        while not list(tmp_path.glob("out.*/*.safetensors")):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    (left,) = tmp_path.glob("out*")
    assert left.suffix == ".partial" and not (left / "config.json").exists()
    assert merge("--adapter", adapter, "--out", out) == 0 and (out / "config.json").exists()
