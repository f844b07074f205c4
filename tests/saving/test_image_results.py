"""A whole model for images that a run has trained, and the best one, load as their base does."""

from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from tests.helpers.run import train_ok
from tests.parity.test_image_rows import make_family
from tests.parity.test_images import picture, qwen3_vl

OPTIONS: dict[str, Any] = {
    "train_type": "full",
    "precision": "fp32",
    "lr": 1e-3,
    "num_epochs": 2,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "eval_steps": 1,
    "save_every": 1,
}
PROMPT = "<s>user:\n<|vision_start|><|image_pad|>so\nassistant:\n"


def _said(folder: Any) -> torch.Tensor:
    """The logits of a model as transformers loads it with its processor, for an image."""
    model, loading = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    inputs = qwen3_vl(folder)(text=[PROMPT], images=[[picture(40, 30, 3)]], return_tensors="pt")
    with torch.no_grad():
        return model(**inputs).logits


def test_a_whole_model_for_images_and_the_best_one_load_as_the_base(tmp_path):
    (tmp_path / "base").mkdir()
    base = make_family(tmp_path / "base", "qwen3_vl")
    out = tmp_path / "out"
    given = {"model_name": base, "dataset": base / "rows.jsonl"}
    train_ok(2, out, **OPTIONS, **given, eval_dataset=base / "held_out.jsonl")
    for folder in (out, out / "best"):
        for name in ("preprocessor_config.json", "processor_config.json"):
            assert (folder / name).read_bytes() == (base / name).read_bytes()
    expected = _said(base)
    trained = _said(out)
    assert trained.shape == expected.shape and not torch.equal(trained, expected)
    assert torch.isfinite(_said(out / "best")).all()
    before = load_file(base / "model.safetensors")
    for folder in (out, out / "best"):
        [after] = map(load_file, folder.glob("*.safetensors"))
        assert after.keys() == before.keys()
        changed = {name for name, value in after.items() if not value.equal(before[name])}
        # The parts for images do not train.
        assert changed and not any("visual" in name for name in changed)
