"""Every door that opens a file which a row or an option names refuses what is no file, without
waiting for it.
"""

import ast
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fsdp_qlora
from fsdp_qlora.config.cli import parse_options
from fsdp_qlora.data.content import BadRow
from fsdp_qlora.data.sources.source import find_source
from fsdp_qlora.data.text.image_store import keep_all
from fsdp_qlora.data.text.templates import find_template
from fsdp_qlora.model.adapters.peft_folder import read_config
from fsdp_qlora.training.generation.prompt_format import read_questions
from fsdp_qlora.training.rl.rollout_file import truncate_rollouts
from fsdp_qlora.utils.errors import TrainingError, UserError
from fsdp_qlora.utils.files import open_named, record_of
from fsdp_qlora.utils.hub import find_model_folder
from fsdp_qlora.utils.user_files import run_file

pytestmark = pytest.mark.quick
# Door -> how it opens a path.
DOORS: dict[str, Callable[[Path], object]] = {
    "an image of a row": lambda path: keep_all([path]),
    "a file of rewards": run_file,
    "rollouts.jsonl": lambda path: truncate_rollouts(path, step=1),
    "a prompt template": lambda path: find_template(str(path)),
    "--prompts": read_questions,
    "--config": lambda path: parse_options(["--config", str(path)]),
    "a file that is hashed": record_of,
    "the function for all doors": open_named,
}
# Door -> a file of a folder that it reads.
FOLDERS: dict[Callable[[Path], object], tuple[str, ...]] = {
    lambda folder: find_model_folder(str(folder), with_weights=True): (
        "config.json",
        "tokenizer.json",
    ),
    read_config: ("adapter_config.json", "README.md"),
    lambda folder: find_source(str(folder)): ("state.json", "dataset_info.json"),
}
REFUSALS = (OSError, BadRow, TrainingError, UserError)
KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("door", DOORS)
def test_a_door_refuses_what_is_no_file(door, kind, tmp_path):
    KINDS[kind](path := tmp_path / "named.png")
    with pytest.raises(REFUSALS, match=r"it is|is no image|a directory|symbolic"):
        DOORS[door](path)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_folder_with_a_pipe_is_refused_before_a_library_reads_it(kind, tmp_path):
    for number, (door, names) in enumerate(FOLDERS.items()):
        (folder := tmp_path / str(number)).mkdir()
        for name in (*names[:1], "a.arrow"):
            (folder / name).write_text("{}")
        KINDS[kind](folder / names[1])
        with pytest.raises(UserError, match=f"{names[1]} is a pipe, a device or a socket"):
            door(folder)


def test_a_link_or_a_long_file_is_refused_where_that_is_asked(tmp_path):
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "link").symlink_to("a")
    with open_named(tmp_path / "link", most_bytes=3) as file:
        assert file.read() == b"123"
    with pytest.raises(OSError, match="it is a link"):
        open_named(tmp_path / "link", follow=False)
    with pytest.raises(OSError, match="more than"):
        open_named(tmp_path / "a", most_bytes=2)


# --- no other door ---

# Calls that open a file, of the library, of Python's and of the packages that it uses.
OPENING = re.compile(
    "open|read_text|read_bytes|open_code|FileIO|fromfile|memmap|genfromtxt|loadtxt|OSFile|memory_map|ParquetFile|mmap|"
    "read_table|load_file|safe_open|from_pretrained|load_from_disk|load_dataset|get_processor_dict|load_image|ZipFile|"
    "copytree|copyfile|copy2"
)
SELF = "open_named itself, or what it has opened"
CHECKED = "refuse_pipes or is_file has looked before, as the library opens it by its name"
PACKAGE = "comes with the package"
KERNEL = "of the kernel"
OWN = "a run or a cache has written it, or writes it now"
# Reason -> the functions that open something otherwise than by open_named.
OTHERWISE = {
    SELF: """
        utils.files:open_named.opener utils.files:open_named data.sources.tables:_open_parquet
        data.text.image_store:_decode sharding.loading.weight_files:WeightFiles._read_into
        sharding.loading.weight_files:_read_header utils.safetensors_files:tensor_names
    """,
    CHECKED: """
        checkpoint.train_state:_open_file utils.verified_files:read_verified
        data.sources.source:saved_source data.text.image_processor:ImageProcessor._processor
        data.text.image_processor:ImageProcessor.model_ids export.changes:open_adapter
        export.as_trained:ModelAsTrained.forms
        export.merge:write_merged export.model_folder:new_model_folder
        export.save_results:write_sidecar model.adapters.peft_folder:read_header
        model.architecture.tokenizer:_as_in_file model.architecture.config:load_config
        model.architecture.tokenizer:load_tokenizer run.open_model:load_trained
        sharding.loading.first_adapters:fill_from
    """,
    "a dataset of the hub": "data.sources.source:hub_source",
    PACKAGE: """
        commands.tools:configs config.other_names: config.text:describe_config export.card:_card
        planning.gpus: observability.page.report:make_page planning.known_models:
    """,
    KERNEL: """
        distributed.supervision.clock:limit_memory
        distributed.supervision.launch:_torchrun_has_nproc utils.machine:_cgroup_free
        training.rl.rewards:work training.environments.host:work
        utils.redact:_RedactedStream._dropped_if_lost
        sharding.loading.weight_files:_buffer run.trial_process:_key
    """,
    OWN: """
        checkpoint.run_folder:_open_locked checkpoint.mirror:_write_small_files
        observability.metric_log:copy_records
        distributed.supervision.restarts:record_exit distributed.supervision.restarts:forward_exit
        distributed.supervision.watchdog:Watchdog._end_hanging
        observability.metric_log:JsonlSink.__init__ utils.files:flush
        utils.safetensors_files:PackedFiles.create utils.safetensors_files:PackedFiles.write
        utils.safetensors_files:write_tensors service.adapter_store:AdapterStore._read
        service.adapter_store:AdapterStore.load export.save_results:copy_for_server
        service.access:_draw_key service.records:_make_private data.prompt_file:PromptFile.__init__
    """,
    "the user's own token, where the hub's client reads it": "utils.redact:_secrets",
}


def opening(node: ast.AST, place: str) -> Iterator[str]:
    """The functions below a node that open a file by a call of `OPENING`."""
    for child in ast.iter_child_nodes(node):
        is_named = isinstance(child, ast.FunctionDef | ast.ClassDef)
        inner = f"{place}{'' if place.endswith(':') else '.'}{child.name}" if is_named else place
        called = child.func if isinstance(child, ast.Call) else None
        if OPENING.fullmatch(getattr(called, "attr", getattr(called, "id", ""))):
            yield inner
        yield from opening(child, inner)


def test_no_other_function_opens_a_file():
    root = Path(str(fsdp_qlora.__file__)).parent
    found = {
        place
        for path in root.rglob("*.py")
        for place in opening(
            ast.parse(path.read_text()),
            ".".join(path.relative_to(root).with_suffix("").parts) + ":",
        )
    }
    # Sink.open and Environments.open open no file
    others = ("observability.sinks:", "training.environments.pool:", "training.episodes.")
    sinks = {place for place in found if place.startswith(others)}
    assert found - sinks == {place for places in OTHERWISE.values() for place in places.split()}
