"""GGUF files hold what transformers reads back: the same weights, tokens and answers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from fsdp_qlora.__main__ import main
from tests.commands.test_merge import make_adapter, merge
from tests.parity.test_multimodal import make_multimodal
from tests.tiny import PROBE, make_tokenizer

Models = Callable[..., Path]


def convert(*argv: object) -> int:
    return main(["gguf", *map(str, argv)])


def greedy(model: torch.nn.Module) -> torch.Tensor:
    return model.eval().generate(input_ids=PROBE, max_new_tokens=12, do_sample=False, pad_token_id=1)


# Some sizes are what transformers assumes of a GGUF file that does not say them.
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 256, "sliding_window": 8, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 128}),
        ("gemma2", GEMMA),
        ("gemma3_text", GEMMA),
    ],
)
def test_a_merged_model_read_back_answers_the_same(
    family: str, sizes: dict[str, object], models: Models, tmp_path: Path
) -> None:
    base, merged = models(family, **sizes), tmp_path / "merged"
    assert merge("--adapter", make_adapter(base, tmp_path / "adapter"), "--out", merged) == 0
    model, tokenizer = AutoModelForCausalLM.from_pretrained(merged), AutoTokenizer.from_pretrained(merged)
    for kind, tolerance in (("f32", 1e-5), ("f16", 2e-2), ("q8_0", 0.5)):
        assert convert("--model", merged, "--out", tmp_path / f"{kind}.gguf", "--type", kind) == 0
        back = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=f"{kind}.gguf", dtype=torch.float32)
        name = gguf.GGUFReader(tmp_path / f"{kind}.gguf").get_field("general.name")
        assert name is not None and name.contents() == base.name
        with torch.no_grad():
            torch.testing.assert_close(back(PROBE).logits, model(PROBE).logits, atol=tolerance, rtol=0)
        if kind != "q8_0":
            assert torch.equal(greedy(back), greedy(model))
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="f16.gguf")
    text = "sort the  list of 27 rivers, please"
    assert read(text, add_special_tokens=False)["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    fields = gguf.GGUFReader(tmp_path / "q8_0.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2" and fields["tokenizer.ggml.add_bos_token"].contents()
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 1


@pytest.mark.parametrize("family", ["gemma3", pytest.param("mistral3", marks=pytest.mark.slow)])
def test_of_a_model_for_images_the_text_part_is_written(family: str, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = make_multimodal(tmp_path / "whole", family)
    model = AutoModelForImageTextToText.from_pretrained(whole, dtype=torch.float32).eval()
    text = AutoModelForCausalLM.from_config(model.config.get_text_config(), dtype=torch.float32)
    text.model, text.lm_head = model.get_decoder(), model.get_output_embeddings()
    text.save_pretrained(tmp_path / "text")
    make_tokenizer(tmp_path / "text")
    tensors, keys = [], []
    for folder in (whole, tmp_path / "text"):
        assert convert("--model", folder, "--out", tmp_path / f"{folder.name}.gguf", "--type", "f32") == 0
        found = gguf.GGUFReader(tmp_path / f"{folder.name}.gguf")
        tensors.append({each.name: each.data.tobytes() for each in found.tensors})
        keys.append({name: field.contents() for name, field in found.fields.items() if name != "general.name"})
    assert tensors[0] == tensors[1] and len(tensors[0]) > 20
    assert keys[0] == keys[1]


def test_norms_of_gemma_are_stored_as_they_multiply(models: Models, tmp_path: Path) -> None:
    base = models("gemma", head_dim=32, tie_word_embeddings=True)  # transformers does not read its GGUF files
    assert convert("--model", base, "--out", tmp_path / "gemma.gguf", "--type", "f32") == 0
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "gemma.gguf").tensors}
    tensors = load_file(base / "model.safetensors")
    assert len(stored) == len(tensors) and "output.weight" not in stored
    np.testing.assert_array_equal(stored["output_norm.weight"], tensors["model.norm.weight"] + 1)
    np.testing.assert_array_equal(stored["blk.1.attn_q.weight"], tensors["model.layers.1.self_attn.q_proj.weight"])


@pytest.mark.parametrize("puts_space_first", [True, False])
def test_a_tokenizer_of_sentencepiece_read_back_gives_the_same_tokens(
    puts_space_first: bool, models: Models, tmp_path: Path
) -> None:
    base = shutil.copytree(models("llama"), tmp_path / "base")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend("▁")] * puts_space_first + [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = BpeTrainer(vocab_size=300, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator(["sort the list of all the rivers and the other lists"] * 3, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < 3]  # no bytes, as in Llama 2
    (base / "tokenizer.json").write_text(json.dumps(content))
    assert convert("--model", base, "--out", tmp_path / "model.gguf") == 0
    mine = AutoTokenizer.from_pretrained(base)
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert (
        gguf.GGUFReader(tmp_path / "model.gguf").fields["tokenizer.ggml.add_space_prefix"].contents()
        is puts_space_first
    )
    for text in ("sort the list of rivers", "the  other é lists"):
        # transformers puts a space first in either case
        wanted = mine(" " * (not puts_space_first) + text, add_special_tokens=False)["input_ids"]
        assert read(text, add_special_tokens=False)["input_ids"] == wanted and len(wanted) < len(text)


@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True, "rank_pattern": {"k_proj": 2}, "alpha_pattern": {"o_proj": 3}}]
)
def test_an_adapters_file_added_to_the_bases_is_the_merged_one(
    options: dict[str, object], models: Models, tmp_path: Path
) -> None:
    base, merged = models("llama"), tmp_path / "merged"
    adapter = make_adapter(base, tmp_path / "adapter", **options)
    assert merge("--adapter", adapter, "--out", merged) == 0
    for name, folder in (("base", base), ("merged", merged)):
        assert convert("--model", folder, "--out", tmp_path / f"{name}.gguf", "--type", "f32") == 0
    assert convert("--adapter", adapter, "--base", base, "--out", tmp_path / "lora.gguf") == 0
    before, after, lora = (gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in ("base", "merged", "lora"))
    alpha = lora.fields["adapter.lora.alpha"].contents()
    parts = {tensor.name: tensor.data for tensor in lora.tensors}
    assert len(parts) == 2 * 14 and lora.fields["general.architecture"].contents() == "llama"
    wanted = {tensor.name: tensor.data for tensor in after.tensors}
    for tensor in before.tensors:
        values = tensor.data
        if f"{tensor.name}.lora_a" in parts:
            lora_a, lora_b = parts[f"{tensor.name}.lora_a"], parts[f"{tensor.name}.lora_b"]
            values = (
                values + alpha / len(lora_a) * lora_b @ lora_a
            )  # as llama.cpp's llama_adapter_lora_weight::get_scale
        np.testing.assert_allclose(values, wanted[tensor.name], atol=1e-6)


def test_types_of_llama_cpp_are_made_by_its_package(models: Models, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    base = models("llama", hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64)
    assert convert("--model", base, "--out", tmp_path / "q4.gguf", "--type", "q4_k_m") == 0
    kinds = {tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "q4.gguf").tensors}
    assert kinds == {gguf.GGMLQuantizationType[name] for name in ("F32", "Q4_K", "Q6_K")}
    back = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="q4.gguf", dtype=torch.float32).state_dict()
    for name, weight in load_file(base / "model.safetensors").items():
        assert (back[name] - weight).norm() < 0.1 * weight.norm(), name
    assert convert("--model", base, "--out", tmp_path / "q4_z.gguf", "--type", "q4_k_z") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["q4.gguf"]


def test_what_cannot_be_converted_is_refused(
    models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, out = models("llama"), tmp_path / "out.gguf"
    dora = make_adapter(base, tmp_path / "dora", use_dora=True)
    (tmp_path / "theirs.gguf").touch()
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "config.json").write_bytes((base / "config.json").read_bytes())
    (odd / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    (odd / "tokenizer.json").write_text(json.dumps(tokenizer | {"pre_tokenizer": {"type": "Metaspace"}}))
    for argv, words in {
        ("--model", models("gpt2", n_embd=64, n_head=4, n_layer=2)): "Models of type gpt2 are not converted here",
        ("--adapter", dora, "--base", base, "--type", "q4_k_m"): "llama-quantize F16.gguf OUT.gguf q4_k_m",
        ("--model", odd): "its tokenizer is no BPE of a kind known here",
        ("--model", tmp_path / "absent"): "there is no such folder",
        ("--adapter", dora, "--base", base): "has DoRA, which llama.cpp does not apply",
        ("--adapter", dora): "--adapter needs --base",
        ("--model", base, "--out", tmp_path / "theirs.gguf"): "exists already",
        (): "Give --model DIR or --adapter DIR",
    }.items():
        assert convert("--out", out, *argv) == 2, words
        assert words in capsys.readouterr().err
    assert not out.exists() and not list(tmp_path.glob(".*"))
