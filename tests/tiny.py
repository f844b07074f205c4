"""Tiny models, tokenizers and data made in code, and runs of train.py on several ranks."""

import contextlib
import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from stand_in.environment import free_port

ROOT = Path(__file__).resolve().parent.parent

WORDS = [
    "sort",
    "list",
    "name",
    "river",
    "number",
    "colour",
    "blue",
    "red",
    "green",
    "seven",
    "water",
    "mountain",
    "answer",
    "question",
    "please",
    "write",
]
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 319,  # many models have one, and a number that few rows do not reach
}


PROBE = torch.arange(2, 50).view(2, 24)  # token ids on which logits are compared


def make_tokenizer(folder: Path) -> None:
    """Byte-level BPE with <s> in front of every text, an </s>, and no pad token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


def make_model(folder: Path, model_type: str = "llama", **overrides: object) -> Path:
    """A random model of the given family in fp32 with its tokenizer, as a user would have it on
    disk.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, "initializer_range": 0.1, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero at first, which would hide a forgotten bias
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the tensors of a model folder: `edit` adds, replaces or removes some."""
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Alpaca rows of uneven lengths."""
    generator = torch.Generator().manual_seed(seed)

    def words(most: int) -> str:
        length = int(torch.randint(1, most, (1,), generator=generator))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator))

    return [
        {"instruction": words(6), "input": words(5) if i % 3 == 0 else "", "output": words(12)}
        for i in range(count)
    ]


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def read_metrics(output_dir: Path, key: str = "loss") -> list[float]:
    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [record[key] for record in records if key in record]


def all_slow_but(quick: str, cases: Iterable[str], nightly: Iterable[str] = ()) -> list[Any]:
    """The cases of a test, all but one for --slow alone, and some for --nightly alone."""
    import pytest  # not in every rank

    tiers: dict[str, Any] = {quick: []} | {case: pytest.mark.nightly for case in nightly}
    return [pytest.param(case, marks=tiers.get(case, pytest.mark.slow)) for case in cases]


def flags(**options: object) -> list[str]:
    """Options as a command line: flags(batch_size=2) -> ["--batch_size", "2"]."""
    return [
        word
        for name, value in options.items()
        for word in (f"--{name}", str(value).lower() if isinstance(value, bool) else str(value))
    ]


def _worker(
    target: Callable[..., int],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    port: int,
    log: str,
) -> None:
    """One rank in a process of its own, as torchrun would start it, its output going to a file,
    libraries' too.
    """
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    status = 1
    with (
        open(log, "w", buffering=1) as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            status = target(*args)
        except BaseException:
            traceback.print_exc()
    os._exit(status)


def on_ranks(
    world_size: int, target: Callable[..., int], args: tuple[Any, ...], folder: Path
) -> tuple[list[int], str]:
    """Call target(*args) -> exit status on `world_size` ranks in forked processes: no import is
    paid again.

    Returns:
        The ranks' exit statuses and all their output. When one fails the others are ended, as
        torchrun does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    port = free_port()
    logs = [str(folder / f"rank{rank}.log") for rank in range(world_size)]
    processes = [
        context.Process(
            target=_worker, args=(target, args, rank, world_size, port, logs[rank]), daemon=True
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        for process in processes:
            process.join(0.05)
        if any(process.exitcode for process in processes):
            for seconds, end in ((5, "terminate"), (60, "kill")):
                for process in processes:
                    process.join(seconds)
                    getattr(process, end)()
    statuses = [process.exitcode if process.exitcode is not None else -1 for process in processes]
    return statuses, "\n".join(Path(log).read_text() for log in logs if Path(log).exists())


def _train(argv: list[str], logits_file: Path | None) -> int:
    import train
    from fsdp_qlora.export import save_results as saving
    from fsdp_qlora.export.values import LiveValues

    if logits_file is not None:
        save = saving.save_adapter

        def save_with_logits(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            # a checkpoint's, saved by rank 0 alone
            if not isinstance(kwargs["values"], LiveValues):
                save(model, *args, **kwargs)
                return
            model.eval()
            with torch.no_grad():
                logits = model(input_ids=PROBE, use_cache=False).logits
            if kwargs["values"].keeps:
                save_file({"logits": logits.clone()}, logits_file)
            save(model, *args, **kwargs)

        saving.save_adapter = save_with_logits
    return train.main(argv)


def run_ranks(
    world_size: int, argv: list[str], folder: Path, logits_file: Path | None = None
) -> tuple[list[int], str]:
    """Run train.py's main on `world_size` ranks; the trained model's logits of PROBE go to
    `logits_file`.
    """
    return on_ranks(world_size, _train, (argv, logits_file), folder)


def train_ok(
    world_size: int, output_dir: Path, *, logits_file: Path | None = None, **options: object
) -> str:
    """A run that must succeed; returns its output. It quantizes by itself unless a cache is asked
    for.
    """
    usual = {"quant_cache": "off"} | ({} if "config" in options else {"context_length": 512})
    argv = flags(output_dir=output_dir, log_to="stdout", **{**usual, **options})
    statuses, output = run_ranks(
        world_size, argv, output_dir.parent / f"{output_dir.name}_logs", logits_file
    )
    assert statuses == [0] * world_size, f"{output[-6000:]}\nexit statuses {statuses}"
    return output


TEKKEN_WORDS = (  # the pattern of its tekken.json
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# of `spelled_tokenizer`
MERGES = [("h", "i"), ("g", "o"), ("{blank}", "o"), ("{blank}o", "n"), ("n", "o"), ("s", "o")]


def spelled_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens can be told by hand: letters, and `hi`, `go`, ` on`, `no`, `so`.

    Args:
        kind: "byte_level" (GPT-2's, Llama 3's, Qwen's), "sentencepiece" (Llama 2's, Mistral's of
            2023) or "tekken" (Mistral's later ones), in which a word may begin with a sign, as
            `:go` does.
    """
    blank = "▁" if kind == "sentencepiece" else "Ġ"
    merges = [(a.format(blank=blank), b) for a, b in MERGES]
    merges += [(":", "go")] if kind == "tekken" else []
    is_bytes = kind != "sentencepiece"
    letters = (
        pre_tokenizers.ByteLevel.alphabet()
        if is_bytes
        else [blank, "\n", *map(chr, range(33, 127))]
    )
    tokens = ["<s>", "</s>", *sorted(letters), *(a + b for a, b in merges)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    if is_bytes:
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "tekken")
        words = pre_tokenizers.Split(Regex(TEKKEN_WORDS), "isolated")
        backend.pre_tokenizer = (
            pre_tokenizers.Sequence([words, plain]) if kind == "tekken" else plain
        )
        backend.decoder = decoders.ByteLevel()
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(
        ["<s>", "</s>", *(["[INST]", "[/INST]"] if kind == "tekken" else [])]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
