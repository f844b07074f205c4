"""The cache of quantized weights: the same run from it, on any number of ranks, and what happens when it breaks."""

import errno
import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import bitsandbytes.functional as bnb
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_qlora.loading import quant_cache
from fsdp_qlora.loading.load_weights import match_tensors
from fsdp_qlora.loading.weight_files import WeightFiles, Weights
from fsdp_qlora.ranks.distributed import Ranks
from fsdp_qlora.storage.files import file_identity
from tests.parity.test_experts import FAMILIES
from tests.tiny import flags, make_rows, on_ranks, read_metrics, train_ok, write_rows

Models = Callable[..., Path]
# Ranks share blocks unequally, tensors have several checksums, and the ranks' parts meet inside of one.
SHAPE = {"hidden_size": 60, "head_dim": 10, "num_attention_heads": 6, "intermediate_size": 500}
NAME = "model.layers.1.mlp.down_proj.weight"
FROM_CACHE, KEPT = "come from the cache", "Quantized weights are saved for the next start"


class Runs:
    """Runs on the same rows; those without a cache, and caches that others copy, are made once."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder, self.rows = folder, write_rows(folder / "rows.jsonl", make_rows(6))
        self.common = {"model_name": model, "dataset": self.rows, "lr": 1e-3, "precision": "fp32", "lora_rank": 4}
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
            assert FROM_CACHE not in output and KEPT not in output and len(set(self._losses[key])) > 1
        return self._losses[key]

    def cache(self, **options: object) -> Path:
        """A cache that a run on 2 ranks has written."""
        if (key := str(options)) not in self._caches:
            self._caches[key] = self.folder / f"cache{len(self._caches)}"
            output_dir = self.folder / f"writer{len(self._caches)}"
            output, losses = self.train(2, output_dir, **options, quant_cache=self._caches[key])
            assert KEPT in output and FROM_CACHE not in output and names(self._caches[key]) == ["entry"]
            self._losses.setdefault(f"2 {options}", losses)
        return self._caches[key]


@pytest.fixture(scope="module")
def runs(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(models("llama", **SHAPE), tmp_path_factory.mktemp("runs"))


@pytest.fixture
def run(runs: Runs, tmp_path: Path) -> Callable[..., tuple[str, list[float]]]:
    """run(ranks, **options) -> what it printed, its losses; the cache is tmp_path/cache."""
    number = iter(range(99))

    def run(ranks: int, **options: object) -> tuple[str, list[float]]:
        return runs.train(ranks, tmp_path / f"out{next(number)}", **{"quant_cache": tmp_path / "cache", **options})

    return run


def names(cache: Path) -> list[str]:
    """What a cache holds: "entry", and the ends of the names of everything else but locks."""
    found = [path.name.partition(".")[2] or "entry" for path in cache.iterdir() if path.suffix != ".lock"]
    return sorted(found)


def entry(cache: Path) -> Path:
    (found,) = (path for path in cache.iterdir() if "." not in path.name)
    return found


@pytest.mark.parametrize(("double_quant", "all_ranks"), [(True, [1, 2, 3]), (False, [3])])
def test_a_cache_written_on_2_ranks_gives_the_same_losses_on_1_2_and_3(
    double_quant: bool,
    all_ranks: list[int],
    runs: Runs,
    run: Callable[..., tuple[str, list[float]]],
    models: Models,
    tmp_path: Path,
) -> None:
    options = {} if double_quant else {"double_quant": False}
    shutil.copytree(runs.cache(**options), tmp_path / "cache")
    for ranks in all_ranks:
        output, cached = run(ranks, **options)
        assert FROM_CACHE in output and "bit-identical to the same weight quantized whole" in output
        assert KEPT not in output and cached == runs.without(ranks, **options)
    # What is kept is what bitsandbytes makes of the whole weight, in its own format.
    stored, weights = (
        load_file(entry(tmp_path / "cache") / "model.safetensors"),
        load_file(models("llama", **SHAPE) / "model.safetensors"),
    )
    parts = {name.removeprefix(f"{NAME}."): value for name, value in stored.items() if name.startswith(f"{NAME}.")}
    state = bnb.QuantState.from_dict(parts, torch.device("cpu"))
    codes, expected_state = bnb.quantize_4bit(
        weights[NAME], blocksize=64, compress_statistics=double_quant, quant_type="nf4"
    )
    assert torch.equal(stored[NAME], codes)
    assert torch.equal(bnb.dequantize_4bit(codes, state), bnb.dequantize_4bit(codes, expected_state))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_come_from_the_cache_too(
    family: str, run: Callable[..., tuple[str, list[float]]], models: Models, tmp_path: Path
) -> None:
    folder = models(family, **FAMILIES[family])
    output, expected = run(2, model_name=folder)
    assert KEPT in output and len(set(expected)) > 1
    name = "model.layers.1.mlp.experts.down_proj"
    assert f"{name}.nested_absmax" in load_file(entry(tmp_path / "cache") / "model.safetensors")
    for ranks in (2, 1):
        output, losses = run(ranks, model_name=folder)
        assert FROM_CACHE in output and losses == (
            expected if ranks == 2 else run(1, model_name=folder, quant_cache="off")[1]
        )


def test_every_file_that_experts_are_read_from_is_part_of_an_entry_s_name(models: Models, tmp_path: Path) -> None:
    folder = models("mixtral", **FAMILIES["mixtral"])
    weight_files = WeightFiles(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    origins = weight_files.origins(match_tensors(model, weight_files).sources[experts])
    assert len(origins) == 2 * FAMILIES["mixtral"]["num_local_experts"] and set(origins) <= weight_files.files.keys()


@pytest.mark.parametrize(
    ("options", "all_ranks", "others"),
    [
        ({"train_type": "hqq_lora", "n_bits": 3}, [2, 1, 3], {"n_bits": 2}),
        ({"train_type": "int8_lora"}, [2, 3], {"precision": "bf16"}),
    ],
)
def test_hqq_and_int8_weights_come_from_the_cache_on_any_number_of_ranks(
    options: dict[str, object],
    all_ranks: list[int],
    others: dict[str, object],
    run: Callable[..., tuple[str, list[float]]],
    models: Models,
    tmp_path: Path,
) -> None:
    # A weight that does not fill its groups, and whose rows int8 fills up to whole elements of fp32 (not of bf16).
    options = {**options, "model_name": models("llama", **{**SHAPE, "intermediate_size": 498})}
    output, first = run(2, **options)
    assert KEPT in output and FROM_CACHE not in output
    folder = entry(tmp_path / "cache")
    for ranks in all_ranks:
        output, cached = run(ranks, **options)
        assert FROM_CACHE in output and KEPT not in output
        assert "bit-identical to the same weight quantized whole" in output
        expected = first if ranks == 2 else run(ranks, **options, quant_cache="off")[1]
        assert cached == expected and len(set(expected)) > 1
    _flip(folder / "model.safetensors")
    output, again = run(2, **options)
    assert f" of {NAME} have changed" in output and KEPT in output and again == first
    output, _ = run(1, **{**options, **others})
    assert KEPT in output and names(tmp_path / "cache") == ["entry", "entry"]
    if options["train_type"] == "int8_lora":  # which the threshold has nothing to do with
        assert FROM_CACHE in run(1, **options, int8_threshold=0)[0]


def _flip(file: Path) -> None:
    """Change one bit in the middle of a tensor's second half."""
    header_bytes = int.from_bytes(file.read_bytes()[:8], "little")
    start, stop = json.loads(file.read_bytes()[8 : 8 + header_bytes])[NAME]["data_offsets"]
    content = bytearray(file.read_bytes())
    content[8 + header_bytes + start + (stop - start) * 3 // 4] ^= 1
    file.write_bytes(content)


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "model.safetensors": (_flip, f"model.safetensors: bytes 8192 to 12288 of {NAME} have changed"),
    "model.safetensors cut": (_truncate, "model.safetensors is not a readable safetensors file"),
    "checksums.json": (
        lambda file: file.write_text(file.read_text().replace('"chunk": 4096', '"chunk": 0')),
        "checksums.json has changed",
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_named_and_the_entry_is_made_again_in_the_same_run(
    what: str, runs: Runs, run: Callable[..., tuple[str, list[float]]], tmp_path: Path
) -> None:
    damage, words = DAMAGES[what]
    shutil.copytree(runs.cache(), tmp_path / "cache")
    before = {path.name: path.read_bytes() for path in entry(tmp_path / "cache").iterdir()}
    damage(entry(tmp_path / "cache") / what.split()[0])
    output, losses = run(2)
    assert "is damaged (" in output and words in output and KEPT in output and FROM_CACHE not in output
    assert losses == runs.without(2) and names(tmp_path / "cache") == ["entry"]
    after = {path.name: path.read_bytes() for path in entry(tmp_path / "cache").iterdir()}
    assert after["model.safetensors"] == before["model.safetensors"]


def test_damage_that_one_rank_finds_stops_no_other_where_loading_ends_with_an_exchange(
    runs: Runs, run: Callable[..., tuple[str, list[float]]], tmp_path: Path
) -> None:
    shutil.copytree(runs.cache(), tmp_path / "cache")
    expected = runs.without(2, train_type="bnb_dora")  # whose lengths of rows are taken from gathered blocks
    _flip(entry(tmp_path / "cache") / "model.safetensors")  # in the second rank's part
    output, losses = run(2, train_type="bnb_dora")
    assert "is damaged (" in output and KEPT in output and losses == expected


def _train_and_fail(argv: list[str], how: str) -> int:
    """A run in which writing the cache goes wrong on its last rank, half-way."""
    import train
    from fsdp_qlora.storage.safetensors_files import PackedFiles

    write, count = PackedFiles.write, iter(range(10_000))
    is_last = int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"])

    def fail(self: PackedFiles, name: str, start: int, values: torch.Tensor) -> None:
        if is_last and next(count) == 20:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, name, start, values)

    if how == "file size limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    else:
        PackedFiles.write = fail  # type: ignore[method-assign]
    return train.main(argv)


def failing_run(how: str, runs: Runs, tmp_path: Path, *, ranks: int = 2) -> tuple[list[int], str]:
    options = {"quant_cache": tmp_path / "cache", "save_model": False, "overwrite_output_dir": True}
    argv = flags(**runs.common, output_dir=tmp_path / "failing", **options)
    return on_ranks(ranks, _train_and_fail, (argv, how), tmp_path / "failing_logs")


def test_a_kill_while_writing_leaves_nothing_that_a_later_start_reads(
    runs: Runs, run: Callable[..., tuple[str, list[float]]], tmp_path: Path
) -> None:
    statuses, _ = failing_run("kill", runs, tmp_path, ranks=1)
    assert statuses == [-signal.SIGKILL] and names(tmp_path / "cache") == ["writing"]
    statuses, _ = failing_run("kill", runs, tmp_path)  # of the last rank: the first lives to clear up
    assert -signal.SIGKILL in statuses and names(tmp_path / "cache") == []
    failing_run("kill", runs, tmp_path, ranks=1)
    output, losses = run(1)
    assert KEPT in output and FROM_CACHE not in output and names(tmp_path / "cache") == ["entry"]
    assert losses == runs.without(1)


def test_what_another_model_s_killed_run_left_is_removed_and_a_living_one_s_is_not(
    run: Callable[..., tuple[str, list[float]]], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    for key in ("dead", "alive"):
        (cache / f"{key}.writing").mkdir(parents=True)
    with FileLock(cache / "alive.lock"):
        run(1)
        assert [path.name for path in cache.glob("*.writing")] == ["alive.writing"]


@pytest.mark.parametrize(
    ("how", "words"), [("full disk", "No space left on device"), ("file size limit", "File too large")]
)
def test_training_goes_on_without_a_cache_when_the_disk_is_full(
    how: str, words: str, runs: Runs, tmp_path: Path
) -> None:
    statuses, output = failing_run(how, runs, tmp_path)
    assert statuses == [0, 0], output
    assert (
        output.count("No quantized cache is") == 1
        and f"cache cannot be written ({words}); give another folder with --quant_cache" in output
    )
    assert names(tmp_path / "cache") == []
    assert read_metrics(tmp_path / "failing") == runs.without(2)


def test_runs_that_start_together_leave_one_entry_and_are_all_right(
    runs: Runs, run: Callable[..., tuple[str, list[float]]], tmp_path: Path
) -> None:
    results: list[tuple[str, list[float]]] = []
    threads = [threading.Thread(target=lambda: results.append(run(1))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (_, first), (_, second) = results
    assert first == second == runs.without(1) and names(tmp_path / "cache") == ["entry"]


def test_a_run_does_not_write_what_another_one_is_writing(
    runs: Runs, run: Callable[..., tuple[str, list[float]]], tmp_path: Path
) -> None:
    folder = tmp_path / "cache" / entry(runs.cache()).name
    folder.parent.mkdir()
    with FileLock(f"{folder}.lock"):
        output, _ = run(1)
    assert "No quantized cache is written: another run is writing it." in output and not folder.exists()


def test_a_file_is_known_by_its_content_where_time_and_size_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(10_000)}, file)
    about, before = file.stat(), file_identity(file, samples=64)
    assert file_identity(file.rename(tmp_path / "other").rename(file), samples=64) == before
    save_file({"x": torch.full([10_000], 0.5)}, file)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert file.stat().st_size == about.st_size and file_identity(file, samples=64) != before
    save_file({"x": torch.zeros(10_000)}, file)
    assert file_identity(file, samples=64) != before  # written again: another time


def test_ranks_with_different_devices_look_for_one_entry_which_is_not_that_of_equal_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def key(rank: int, *devices: str) -> str:
        monkeypatch.setattr(quant_cache, "gather_texts", lambda text, device: list(devices))
        monkeypatch.setattr(quant_cache, "device_kernels", lambda device: devices[rank])
        ranks = Ranks(rank, rank, len(devices), len(devices), torch.device("cpu"))
        weights = Weights(None, {})  # type: ignore[arg-type]
        return quant_cache.QuantCache(tmp_path, {}, weights, ranks, None).key  # type: ignore[arg-type]

    mixed = {key(0, "A", "B"), key(1, "A", "B"), key(0, "B", "A")}
    assert len(mixed) == 1 and not mixed & {key(0, "A", "A"), key(0, "B")}
    assert key(0, "A", "A") == key(0, "A")


def test_a_file_of_the_hub_is_known_by_the_name_of_its_blob(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "commit"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "5f3a").write_bytes(b"content")
    (snapshot / "model.safetensors").symlink_to(blobs / "5f3a")
    assert file_identity(snapshot / "model.safetensors", samples=64) == ["model.safetensors", 7, "5f3a"]


@pytest.mark.parametrize("options", [{"sharding_strategy": "ddp"}, {"use_cpu_offload": True}, {"precision": "bf16"}])
def test_other_ways_to_hold_the_model_write_and_read_the_same_entry(
    options: dict[str, object], runs: Runs, run: Callable[..., tuple[str, list[float]]], tmp_path: Path
) -> None:
    output, losses = run(2, **options)
    made, written = entry(runs.cache()), entry(tmp_path / "cache")
    assert KEPT in output and written.name == made.name
    assert (written / "model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()
    output, again = run(2, **options)
    assert FROM_CACHE in output and again == losses
