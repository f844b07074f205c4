"""The cache of quantized weights: the same run from it, on any number of ranks, and what happens
when it breaks.
"""

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bitsandbytes.functional as bnb
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_qlora.sharding.loading.load_weights import match_tensors
from fsdp_qlora.sharding.loading.quant_cache import cache_key
from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from fsdp_qlora.utils.files import file_identity
from tests.helpers.metrics import read_metrics
from tests.helpers.models import Models
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import all_slow_but, flags, on_ranks, train_ok
from tests.parity.test_experts import FAMILIES

Run = Callable[..., tuple[str, list[float]]]
# Ranks share blocks unequally, tensors have several checksums, and the ranks' parts meet inside of
# one.
SHAPE = {"hidden_size": 60, "head_dim": 10, "num_attention_heads": 6, "intermediate_size": 500}
NAME = "model.layers.1.mlp.down_proj.weight"
FROM_CACHE = "come from the cache"
KEPT = "Quantized weights were saved for the next start"


class Runs:
    """Runs on the same rows; those without a cache, and caches that others copy, are made once."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        self.rows = write_rows(folder / "rows.jsonl", make_rows(6))
        self.common = {"model_name": model, "dataset": self.rows, "verbose": True}
        self.common |= {"lr": 1e-3, "precision": "fp32", "lora_rank": 4}
        self._losses: dict[str, list[float]] = {}
        self._caches: dict[str, Path] = {}

    def train(self, ranks: int, output_dir: Path, **options: object) -> tuple[str, list[float]]:
        return train_ok(ranks, output_dir, **{**self.common, **options}), read_metrics(output_dir)

    def without(self, ranks: int, **options: object) -> list[float]:
        """The losses without a cache."""
        key = f"{ranks} {options}"
        if key not in self._losses:
            output_dir = self.folder / f"without{len(self._losses)}"
            output, self._losses[key] = self.train(ranks, output_dir, **options, quant_cache="off")
            assert FROM_CACHE not in output and KEPT not in output
            assert len(set(self._losses[key])) > 1
        return self._losses[key]

    def cache(self, **options: object) -> Path:
        """A cache that a run on 2 ranks has written."""
        if (key := str(options)) not in self._caches:
            self._caches[key] = self.folder / f"cache{len(self._caches)}"
            output_dir = self.folder / f"writer{len(self._caches)}"
            output, losses = self.train(2, output_dir, **options, quant_cache=self._caches[key])
            assert KEPT in output and FROM_CACHE not in output
            assert names(self._caches[key]) == ["entry"]
            self._losses.setdefault(f"2 {options}", losses)
        return self._caches[key]


@pytest.fixture(scope="module")
def runs(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(models("llama", **SHAPE), tmp_path_factory.mktemp("runs"))


@pytest.fixture
def run(runs: Runs, tmp_path: Path) -> Run:
    """run(ranks, **options) -> what it printed, its losses; the cache is tmp_path/cache."""
    number = iter(range(99))

    def run(ranks: int, **options: object) -> tuple[str, list[float]]:
        options = {"quant_cache": tmp_path / "cache", **options}
        return runs.train(ranks, tmp_path / f"out{next(number)}", **options)

    return run


def names(cache: Path) -> list[str]:
    """What a cache holds: "entry", and the ends of the names of everything else but locks."""
    found = [path.name for path in cache.iterdir() if path.suffix != ".lock"]
    return sorted(name.partition(".")[2] or "entry" for name in found)


def entry(cache: Path) -> Path:
    (found,) = (path for path in cache.iterdir() if "." not in path.name)
    return found


# Weights that do not fill HQQ's groups, and whose rows int8 fills up to whole elements of fp32 (not
# of bf16).
UNEVEN = {**SHAPE, "intermediate_size": 498}
# Family, its sizes, the run's options, and on how many ranks the entry is read.
CASES: dict[str, tuple[str, dict[str, int], dict[str, object], list[int]]] = {
    "nf4": ("llama", SHAPE, {}, [1, 2, 3]),
    "nf4, absmax in fp32": ("llama", SHAPE, {"double_quant": False}, [3]),
    "hqq": ("llama", UNEVEN, {"train_type": "hqq_lora", "n_bits": 3}, [3]),
    "int8": ("llama", UNEVEN, {"train_type": "int8_lora"}, [3]),
    "mixtral": ("mixtral", FAMILIES["mixtral"], {}, [1]),
    "gpt_oss": ("gpt_oss", FAMILIES["gpt_oss"], {}, [1]),
}


def options_of(case: str, models: Models) -> dict[str, object]:
    family, sizes, options, _ = CASES[case]
    return {**options, "model_name": models(family, **sizes)}


@pytest.mark.parametrize("case", all_slow_but("nf4", CASES))
def test_a_cache_written_on_2_ranks_gives_the_same_losses_on_any_number(
    case, runs, run, models, tmp_path
):
    options = options_of(case, models)
    shutil.copytree(runs.cache(**options), tmp_path / "cache")
    for ranks in CASES[case][-1]:
        output, cached = run(ranks, **options)
        assert FROM_CACHE in output and "bit-identical to its weight quantized whole" in output
        assert KEPT not in output and cached == runs.without(ranks, **options)


@pytest.mark.parametrize("case", ["nf4", "nf4, absmax in fp32"])
def test_a_cache_entry_equals_bitsandbytes_own_quantization(case, runs, models):
    options = options_of(case, models)
    stored = load_file(entry(runs.cache(**options)) / "model.safetensors")
    weight = load_file(options["model_name"] / "model.safetensors")[NAME]  # type: ignore[operator]
    of_weight = [name for name in stored if name.startswith(f"{NAME}.")]
    parts = {name.removeprefix(f"{NAME}."): stored[name] for name in of_weight}
    state = bnb.QuantState.from_dict(parts, torch.device("cpu"))
    double_quant = "double_quant" not in options
    codes, expected = bnb.quantize_4bit(
        weight, blocksize=64, compress_statistics=double_quant, quant_type="nf4"
    )
    assert torch.equal(stored[NAME], codes)
    assert torch.equal(bnb.dequantize_4bit(codes, state), bnb.dequantize_4bit(codes, expected))


@pytest.mark.parametrize(
    ("case", "other", "is_same"),
    [
        ("hqq", {"n_bits": 2}, False),
        ("int8", {"precision": "bf16"}, False),
        ("int8", {"int8_threshold": 0}, True),
    ],
)
def test_the_cache_key_covers_everything_that_changes_the_bytes(
    case, other, is_same, runs, run, models, tmp_path
):
    options = options_of(case, models)
    shutil.copytree(runs.cache(**options), tmp_path / "cache")
    output, _ = run(1, **{**options, **other})
    assert (FROM_CACHE in output) == is_same
    assert names(tmp_path / "cache") == ["entry"] * (1 if is_same else 2)


def test_the_cache_key_covers_every_file_of_merged_experts(models, tmp_path):
    folder = models("mixtral", **FAMILIES["mixtral"])
    weight_files = WeightFiles(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    origins = weight_files.origins(match_tensors(model, weight_files).sources[experts])
    assert len(origins) == 2 * FAMILIES["mixtral"]["num_local_experts"]
    assert set(origins) <= weight_files.files.keys()


def _flip(file: Path) -> None:
    """Change one bit in the middle of a tensor's second half."""
    header_bytes = int.from_bytes(file.read_bytes()[:8], "little")
    start, stop = json.loads(file.read_bytes()[8 : 8 + header_bytes])[NAME]["data_offsets"]
    content = bytearray(file.read_bytes())
    content[8 + header_bytes + start + (stop - start) * 3 // 4] ^= 1
    file.write_bytes(content)


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


# What is damaged -> how, what is said, and options of the run.
DAMAGES: dict[str, tuple[Callable[[Path], None], str, dict[str, object]]] = {
    "a bit": (_flip, f"model.safetensors: bytes 8192 to 12288 of {NAME} have changed", {}),
    # Found by the second rank alone; the lengths of rows are then taken from gathered blocks.
    "a bit, before collectives": (_flip, f" of {NAME} have changed", {"train_type": "bnb_dora"}),
    "the end": (_truncate, "model.safetensors is not a readable safetensors file", {}),
    "checksums": (
        lambda file: (text := file.with_name("checksums.json")).write_text(
            text.read_text().replace('"chunk": 4096', '"chunk": 0')
        ),
        "checksums.json has changed",
        {},
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_cache_entry_is_rebuilt_in_the_same_run(what, runs, run, tmp_path):
    damage, words, options = DAMAGES[what]
    shutil.copytree(runs.cache(), tmp_path / "cache")
    file = entry(tmp_path / "cache") / "model.safetensors"
    before = file.read_bytes()
    damage(file)
    output, losses = run(2, **options)
    assert "is damaged (" in output and words in output
    assert KEPT in output and FROM_CACHE not in output
    assert losses == runs.without(2, **options) and names(tmp_path / "cache") == ["entry"]
    assert file.read_bytes() == before


def _train_and_fail(argv: list[str], how: str) -> int:
    """A run in which files cannot be as long as the cache,
    or whose last rank is killed half-way.
    """
    import train
    from fsdp_qlora.utils.safetensors_files import PackedFiles

    write = PackedFiles.write
    count = iter(range(10_000))
    is_last = int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"])

    def fail(self: PackedFiles, name: str, start: int, values: torch.Tensor) -> None:
        if is_last and next(count) == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, name, start, values)

    if how == "file size limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    else:
        PackedFiles.write = fail  # type: ignore[method-assign]
    return train.main(argv)


def failing_run(how: str, runs: Runs, tmp_path: Path, *, ranks: int = 2) -> tuple[list[int], str]:
    options = {"quant_cache": tmp_path / "cache", "save_model": False, "resume": "auto:replace"}
    argv = flags(**runs.common, output_dir=tmp_path / "failing", **options)
    return on_ranks(ranks, _train_and_fail, (argv, how), tmp_path / "failing_logs")


def test_a_killed_writer_leaves_no_readable_cache_entry(runs, run, tmp_path):
    statuses, _ = failing_run("kill", runs, tmp_path, ranks=1)
    assert statuses == [-signal.SIGKILL] and names(tmp_path / "cache") == ["writing"]
    # of the last rank: the first lives to clear up
    statuses, _ = failing_run("kill", runs, tmp_path)
    assert -signal.SIGKILL in statuses and names(tmp_path / "cache") == []
    failing_run("kill", runs, tmp_path, ranks=1)
    for key in ("dead", "alive"):  # of other models
        (tmp_path / "cache" / f"{key}.writing").mkdir()
    with FileLock(tmp_path / "cache" / "alive.lock"):
        output, losses = run(1)
    assert KEPT in output and FROM_CACHE not in output and losses == runs.without(1)
    assert names(tmp_path / "cache") == ["entry", "writing"]
    assert (tmp_path / "cache" / "alive.writing").is_dir()


def test_training_continues_if_the_cache_cannot_be_written(runs, tmp_path):
    statuses, output = failing_run("file size limit", runs, tmp_path)
    assert statuses == [0, 0] and output.count("No quantized cache is") == 1, output
    said = "cache cannot be written (File too large); give another folder with --quant_cache"
    assert said in output
    assert names(tmp_path / "cache") == []
    assert read_metrics(tmp_path / "failing") == runs.without(2)


def test_simultaneous_runs_write_one_cache_entry(runs, run, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        (_, first), (_, second) = pool.map(run, [1, 1])
    assert first == second == runs.without(1) and names(tmp_path / "cache") == ["entry"]


def test_a_cache_entry_that_another_run_writes_is_left_alone(runs, run, tmp_path):
    folder = tmp_path / "cache" / entry(runs.cache()).name
    folder.parent.mkdir()
    with FileLock(f"{folder}.lock"):
        output, _ = run(1)
    assert "No quantized cache is written: another run is writing it." in output
    assert not folder.exists()


def test_files_are_identified_by_content_or_blob_name(tmp_path):
    file = tmp_path / "model.safetensors"
    blob = tmp_path / "blobs" / "5f3a"
    save_file({"x": torch.zeros(10_000)}, file)
    about = file.stat()
    before = file_identity(file, samples=64)
    assert file_identity(file.rename(tmp_path / "other").rename(file), samples=64) == before
    save_file({"x": torch.full([10_000], 0.5)}, file)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert file.stat().st_size == about.st_size and file_identity(file, samples=64) != before
    save_file({"x": torch.zeros(10_000)}, file)
    assert file_identity(file, samples=64) != before  # written again: another time
    blob.parent.mkdir()
    file.rename(blob)
    file.symlink_to(blob)
    assert file_identity(file, samples=64) == ["model.safetensors", about.st_size, "5f3a"]


def test_ranks_with_different_devices_share_one_cache_entry():
    keys = ["A B", "B A", "A A", "A", "B"]
    mixed, same, equal, one, other = (cache_key({}, None, {}, devices.split()) for devices in keys)  # type: ignore[arg-type]
    assert mixed == same and equal == one and len({mixed, one, other}) == 3


OFFLOAD = pytest.param({"use_cpu_offload": True}, marks=pytest.mark.nightly)


@pytest.mark.parametrize("options", [{"sharding_strategy": "ddp"}, {"precision": "bf16"}, OFFLOAD])
def test_sharding_and_offloading_use_the_same_cache_entry(options, runs, run, tmp_path):
    output, losses = run(2, **options)
    made = entry(runs.cache())
    written = entry(tmp_path / "cache")
    assert KEPT in output and written.name == made.name
    assert (written / "model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()
    output, again = run(2, **options)
    assert FROM_CACHE in output and again == losses
