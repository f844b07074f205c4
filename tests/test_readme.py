"""The README and the docs say what the code does: their commands run, their links lead somewhere,
their names exist.
"""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks import planned_memory
from fsdp_qlora import __main__ as beside
from fsdp_qlora.config.options import option_types
from fsdp_qlora.config.other_names import OLDER, OTHER_NAMES
from fsdp_qlora.planning.known_models import KNOWN_MODELS
from scripts import update_docs
from tests.episodes.runs import make_counting_agent
from tests.helpers.models import Models, make_model
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import ROOT, flags, on_ranks, train_ok

DOCUMENTS = [
    ROOT / name
    for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
]
DOCUMENTS += [*sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS += [ROOT / "examples/README.md", ROOT / "dev/log.md"]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

# Flags in the documents that are not options of train.py.
OTHER_FLAGS = {
    *("folder", "host", "port", "api_key", "max_models"),  # serve
    *("max-restarts", "nnodes", "signals-to-handle", "local_addr"),  # torchrun
    *("rdzv_backend", "rdzv_conf", "rdzv_endpoint", "rdzv_id", "standalone"),
    *("out", "format", "expansion_rate", "best", "for", "version", "json", "image"),  # our commands
    *(
        "gpu",
        "gpu_memory_gib",
        "num_gpus",
        "host_ram_gib",
        "million_tokens",
        "explain",
        "compare",
        "sort",
        "plot",
    ),
    "price_per_hour",
    *("base", "dtype", "outfile", "outtype"),  # merge and llama.cpp
    *("prompt", "prompts", "temperature", "top_p", "max_new_tokens"),  # generate
    *("tasks", "limit", "num_fewshot"),  # evaluate
    *(
        "enable-lora",
        "enable-tower-connector-lora",
        "enable-scale-out",
        "limit-mm-per-prompt",
        "max-logprobs",
        "max-lora-rank",
        "max-loras",
        "max-model-len",
        "gpu-memory-utilization",
        "tensor-parallel-size",
    ),  # vllm
    *("served-model-name", "quantization", "logprobs-mode", "lora-modules"),
    *("model-path", "lora-paths", "lora-target-modules", "lora", "model", "quantize"),  # servers
    *("logdir", "shm-size", "ipc", "build-arg", "gpus"),  # tensorboard, docker
    # torchrun, run_forever.sh, SLURM, SkyPilot
    *("node_rank", "once", "nodes", "gpus-per-node", "env"),
    # benchmarks, the tests, plan
    *("report", "minutes", "part", "parts", "nightly", "shape", "probe", "ways", "fa4"),
    *("config", "help", "dry_run"),
}


def commands(text: str) -> list[str]:
    """The lines of all ```bash blocks, without comments, nohup and a final &."""
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = [
        line.strip()
        for block in blocks
        for line in re.sub(
            r"\\\n +|^nohup | &$",
            "",
            block,
            flags=re.M,
        ).splitlines()
    ]
    return [line for line in lines if line and not line.startswith("#")]


COMMANDS = [line for path in DOCUMENTS for line in commands(path.read_text())]
COMMANDS += [
    line
    for path in CONFIGS
    for line in re.findall(
        r"^# +(fsdp-qlora .*)",
        path.read_text(),
        re.MULTILINE,
    )
]


def arguments_of_train(line: str) -> list[str] | None:
    """What training is given by a command that starts it, also through torchrun; None for other
    commands.
    """
    words = shlex.split(line)
    if "torchrun" in words:  # also where scripts/run_forever.sh starts it
        words = words[words.index("torchrun") :]
    if words[:2] in (["python", "train.py"], ["fsdp-qlora", "train"], ["fsdp-qlora", "teach"]):
        return words[2:]
    if words[:1] != ["torchrun"]:
        return None
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(words[1:])
    script = parsed.training_script
    arguments = list(parsed.training_script_args)
    if parsed.module:
        assert [script, *arguments[:1]] == ["fsdp_qlora", "train"], line
        return arguments[1:]
    assert script == "train.py", line
    return arguments


PLANNED = {line: argv for line in COMMANDS if (argv := arguments_of_train(line)) is not None}


def plan_all(argvs: list[list[str]]) -> int:
    import train

    return next((status for argv in argvs if (status := train.main(argv))), 0)


def test_every_train_command_plans_a_run_of_a_tiny_model(models: Models, tmp_path: Path) -> None:
    mixture = models("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96)
    tiny = models()
    expanded = tmp_path / "expanded"
    assert beside.main(["expand", str(tiny), *flags(out=expanded, expansion_rate=0.5)]) == 0
    quantized = tmp_path / "quantized"
    assert beside.main(["quantize", str(tiny), *flags(out=quantized, format="nvfp4")]) == 0
    rows = write_rows(tmp_path / "rows.jsonl", made := make_rows(200))
    pairs = [
        {"prompt": row["instruction"], "chosen": row["output"], "rejected": "red" + row["output"]}
        for row in made
    ]
    pairs = [{**pair, "answer": "7"} for pair in pairs]  # for --rewards number
    taught = write_rows(
        tmp_path / "taught.jsonl", [{**row, "teacher_prompt": "sort"} for row in made]
    )
    adapter = tmp_path / "adapter"
    get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny),
        LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"),
    ).save_pretrained(adapter)
    agent = make_counting_agent(tmp_path / "agent")
    game = tmp_path / "game.py"
    page = (ROOT / "docs/environments.md").read_text()
    [code] = re.findall(r"```python\n(# game.py\n.*?)```", page, re.DOTALL)
    game.write_text(code)
    turns = [{"prompt": [{"role": "user", "content": "Play."}], "target": n} for n in range(200)]
    in_environment = {
        "model_name": agent,
        "dataset": write_rows(tmp_path / "turns.jsonl", turns),
        "environment": f"{game}:Game",
        "max_completion_length": 128,
    }
    argvs = []
    for argv in PLANNED.values():
        # The last of two flags wins: the model, the rows and the folder that a reader has are
        # replaced.
        stand_ins = {
            "model_name": mixture
            if "--lora_target_parameters" in argv
            else expanded
            if "expanded" in argv
            else quantized
            if "--merge_aware" in argv
            else tiny,
            "dataset": write_rows(tmp_path / "pairs.jsonl", pairs)
            if "--objective" in argv
            else rows,
            **({"dataset": taught} if {"distill", "distill_on_policy"} & {*argv} else {}),
            **({"teacher": tiny} if "--teacher" in argv else {}),
            **(
                {"max_completion_length": 32}
                if {"distill_on_policy", "--eval_rewards"} & {*argv}
                else {}
            ),
            "context_length": 256,
            "output_dir": tmp_path / "output",
            "dry_run": True,
            **({"adapter": adapter} if "--adapter" in argv else {}),
            **({"eval_dataset": rows} if "--eval_dataset" in argv else {}),
            **(in_environment if "--environment" in argv else {}),
        }
        argvs.append([*argv, *flags(**stand_ins)])
    assert len(argvs) >= 10
    statuses, output = on_ranks(1, plan_all, (argvs,), tmp_path / "logs")
    assert statuses == [0], output[-4000:]
    assert output.count("Steps: ") == len(argvs)


def test_every_command_beside_training_runs_on_a_tiny_model(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("name a river\n"))  # of a chat
    for name in ("output", "output_2"):  # runs
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    lines = [
        shlex.split(line)
        for line in COMMANDS
        if line not in PLANNED and line.startswith("fsdp-qlora ")
    ]
    assert lines
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(12))
    train_ok(1, tmp_path / "run", model_name=models(), dataset=rows, max_steps=1, eval_fraction=0.1)
    for number, (_, command, *words) in enumerate(lines):
        if command in ("merge", "generate", "evaluate"):
            # As in training's commands, the folders and files that a reader has are replaced.
            merged = tmp_path / "merged"
            out = tmp_path / f"{number}.out"
            stand_ins = {
                "dataset": rows,
                "model_name": models(),
                "prompts": rows,
            }
            stand_ins["out"] = merged if command == "merge" and not merged.exists() else out
            words[0] = words[0] if words[0].startswith("--") else str(tmp_path / "run")
            words += flags(
                **{name: value for name, value in stand_ins.items() if f"--{name}" in words}
            )
            words += flags(max_new_tokens=2) if command == "generate" else []
            words += flags(nproc_per_node=1) if command in ("generate", "evaluate") else []
        elif command in ("quantize", "expand", "export"):  # MODEL --out DIR
            source = tmp_path / "run" if command == "export" else models()
            words[0] = str(source)
            words[words.index("--out") + 1] = str(tmp_path / str(number))
        if command == "serve":
            words += flags(model_name=models(), dry_run=True)
        if command == "expand":
            words += flags(expansion_rate=0.5)  # of two blocks
        words = words[: words.index(">")] if ">" in words else words  # the shell's
        assert beside.main([command, *words]) == 0, (command, words)


def test_the_files_that_commands_name_are_there() -> None:
    words = {word for line in COMMANDS if line not in PLANNED for word in shlex.split(line)}
    named = {
        word
        for word in words
        if re.match(r"(scripts|benchmarks|tests|docs|requirements)[/.]", word)
    }
    assert len(named) > 5 and [name for name in named if not (ROOT / name).exists()] == []


def test_documented_code_loads_an_adapter(models: Models, tmp_path: Path) -> None:
    (example,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/after_training.md").read_text(), re.M | re.S
    )
    model = AutoModelForCausalLM.from_pretrained(models())
    get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM")).save_pretrained(
        tmp_path / "output"
    )
    names: dict[str, object] = {}
    exec(example.replace('"output"', repr(str(tmp_path / "output"))), names)
    assert hasattr(names["model"], "peft_config")


def test_scripts_are_correct_shell() -> None:
    for script in (ROOT / "scripts").glob("*.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_every_place_that_names_pythons_names_those_of_pyproject() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    limits = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", settings["project"]["requires-python"])
    assert limits is not None
    lowest = int(limits[1])
    highest = int(limits[2]) - 1
    for name in ("README.md", "CONTRIBUTING.md"):
        assert set(re.findall(r"Python (3\.\d+ to 3\.\d+)", (ROOT / name).read_text())) == {
            f"3.{lowest} to 3.{highest}"
        }
    assert settings["tool"]["ruff"]["target-version"] == f"py3{lowest}"
    torch = re.search(r":-torch==(\d+\.\d+)", (ROOT / "scripts/setup_env.sh").read_text())
    assert (
        torch is not None
        and f"an environment with torch {torch[1]} " in (ROOT / "README.md").read_text()
    )
    printed = subprocess.run(
        ["bash", "-c", ". scripts/python_span.sh; python_span"], cwd=ROOT, capture_output=True
    )
    assert printed.stdout.decode().split() == [f"3.{minor}" for minor in range(lowest, highest + 1)]


@pytest.mark.parametrize(
    ("other", "status", "said"), [("python3.13", 0, "python3.13\n"), ("python4", 1, "")]
)
def test_setup_passes_over_a_python3_outside_the_span(
    other: str, status: int, said: str, tmp_path: Path
) -> None:
    for name in ("bash", "dirname", "sed"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    versions = {"python3": "(3, 10, 4)", other: "(3, 13, 0)"}
    for name, version in versions.items():
        start = f'exec "{sys.executable}" -c "import sys; sys.version_info = {version}; $code" "$@"'
        (tmp_path / name).write_text(f'#!{tmp_path}/bash\ncode="$2"; shift 2\n{start}\n')
        (tmp_path / name).chmod(0o755)
    command = ["bash", "-c", ". scripts/python_span.sh; find_python"]
    done = subprocess.run(
        command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (status, said)
    assert status == 0 or re.match(r"No Python 3\.11 to 3\.1\d .* Install one", done.stderr)


def test_the_lock_has_every_dependency_with_hashes() -> None:
    lock = re.split(r"\n(?=\S)", (ROOT / "requirements.lock").read_text())
    locked = {entry.partition("==")[0].lower() for entry in lock if "--hash=sha256:" in entry}
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[<>=]", name)[0].lower().replace("_", "-") for name in wanted}
    assert names <= {name.replace("_", "-") for name in locked}


def test_the_quickstart_runs_from_its_first_command_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/quickstart.md").read_text()
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "demo" / "model")  # in the place of the one that the page downloads
    for name, rows in re.findall(r"`(\w+\.jsonl)`:\n\n```json\n(.*?)^```", page, re.M | re.S):
        (tmp_path / name).write_text(rows)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 10
    lines = [shlex.split(line)[1:] for line in commands(page) if line.startswith("fsdp-qlora ")]
    assert {words[0] for words in lines} == {"train", "generate", "evaluate", "merge"}
    for words in lines:
        words += flags(num_epochs=1) if words[0] == "train" else []
        words += flags(max_new_tokens=2) if words[0] == "generate" else []
        if words[0] in ("generate", "evaluate"):
            words += flags(nproc_per_node=1)
        assert beside.main(words) == 0, words
    assert (tmp_path / "output/adapter_model.safetensors").exists()
    assert (tmp_path / "merged/model.safetensors").exists()


def test_papers_are_those_that_the_library_cites() -> None:
    page = (ROOT / "docs/papers.md").read_text()
    cited = r"([A-Z][\w']+)(?: et al\.)?\s+((?:19|20)\d\d)\b"
    rows = re.findall(rf"^\|.*?\| {cited}.*\| `([\w/]+\.py)` \|$", page, re.MULTILINE)
    assert len(rows) > 30
    sources = {path: path.read_text() for path in (ROOT / "fsdp_qlora").rglob("*.py")}
    for author, year, file in rows:
        found = re.findall(cited, sources[ROOT / "fsdp_qlora" / file])
        assert (author, year) in found, (author, year, file)
    papers = {
        (author, year)
        for text in sources.values()
        for author, year in re.findall(r"([A-Z][\w']+) et al\.\s+((?:19|20)\d\d)\b", text)
    }
    assert papers - {(author, year) for author, year, _ in rows} == set()


@pytest.mark.slow
def test_the_demo_runs_from_its_first_line_to_its_last(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("scripts", "configs", "fsdp_qlora", "train.py", "pyproject.toml"):
        (clone / name).symlink_to(ROOT / name)
    # a folder that is complete is kept
    make_model(clone / "demo" / "model", max_position_embeddings=1024)
    bin_folder = tmp_path / "venv" / "bin"
    bin_folder.mkdir(parents=True)
    for name, words in {"python": "", "torchrun": "-m torch.distributed.run"}.items():
        (bin_folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (bin_folder / name).chmod(0o755)
    state = f"cat {clone}/pyproject.toml {clone}/scripts/setup_env.sh | cksum; echo {clone}"
    stamp = subprocess.run(["bash", "-c", state], check=True, capture_output=True).stdout
    (bin_folder.parent / ".fsdp_qlora_installed").write_bytes(stamp)  # so nothing is installed
    environment = os.environ | {
        "FSDP_QLORA_VENV": str(bin_folder.parent),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        "bash",
        str(clone / "scripts/demo.sh"),
        *flags(context_length=1024, max_steps=8, lr=1e-2),
    ]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Adapter loaded by PEFT" in done.stdout
    assert done.stdout.rstrip().endswith("the adapter is in demo/output")


def test_the_table_of_planned_memory_is_that_of_its_file() -> None:
    rows = json.loads(planned_memory.RESULTS.read_text())["rows"]
    assert "\n".join(planned_memory.table(rows)) in (ROOT / "docs/memory.md").read_text()


def test_the_page_on_memory_counts_the_known_models() -> None:
    # others have the sizes of these
    sizes = [model for model in KNOWN_MODELS.values() if "model_type" in model]
    page = (ROOT / "docs/memory.md").read_text()
    assert re.findall(r"(\d+)\smodels\sthat\sthe\sprogram\sknows\sunder\s(\d+)\snames", page) == [
        (str(len(sizes)), str(len(KNOWN_MODELS)))
    ]


def test_settings_of_other_programs_are_named_as_the_messages_name_them() -> None:
    page = (ROOT / "docs/from_other_tools.md").read_text()
    for line in re.findall(r"^\| `.*", page, re.MULTILINE):
        ours, _, *theirs = (re.findall(r"`(\w+)`", cell) for cell in line.strip("|").split("|"))
        assert set(ours) <= option_types().keys(), line
        named = {name for cell in theirs for name in cell} - set(ours) - {"fsdp_config"}
        here = {name: OTHER_NAMES.get(name, "") for name in named}
        assert [
            name for name, now in here.items() if now not in ours and OLDER[now].option not in ours
        ] == [], line


def test_the_page_and_the_types_of_options_are_those_of_the_code() -> None:
    assert update_docs.main(["--check"]) == 0, "python scripts/update_docs.py"


def test_the_page_for_contributors_names_every_folder_of_the_package() -> None:
    folders = {
        path.parent.name
        for path in (ROOT / "fsdp_qlora").rglob("*")
        if path.suffix in (".py", ".yaml")
    }
    assert len(folders) > 20
    assert folders - set(re.findall(r"\w+", (ROOT / "docs/how_it_works.md").read_text())) == set()


def test_every_path_that_contributors_are_shown_exists() -> None:
    page = (ROOT / "docs/how_it_works.md").read_text() + (ROOT / "SECURITY.md").read_text()
    paths = set(re.findall(r"`(\w[\w/]*/\w*(?:\.py)?)`", page))
    there = {
        path for path in paths for start in (ROOT, ROOT / "fsdp_qlora") if (start / path).exists()
    }
    assert len(paths) > 40 and paths - there == set()


def test_the_table_of_promises_names_every_folder_of_tests() -> None:
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders == set(
        re.findall(
            r"`tests/(\w+)` \|$",
            (ROOT / "CONTRIBUTING.md").read_text(),
            re.MULTILINE,
        )
    )


def anchors(path: Path) -> set[str]:
    """A document's headings as GitHub makes anchors of them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_paragraphs_are_filled_and_none_begins_a_list_by_accident() -> None:
    """A number with a period at the start of a line begins a list."""
    for path in DOCUMENTS:
        in_code = False
        before = ""
        for number, line in enumerate(path.read_text().splitlines(), 1):
            place = f"{path.name}:{number}"
            in_code ^= line.startswith("```")
            is_item = re.match(r"\d+\. ", line)
            continues = before.strip() and not re.match(r"\s*(\d+\.|[-*]) |  ", before)
            assert in_code or not (is_item and continues), place
            is_text = not line.startswith(("|", "    ", "#")) and " " in line.strip()
            assert in_code or not is_text or len(line) <= 120, place
            before = line


def test_headings_begin_with_their_subject() -> None:
    pages = [*DOCUMENTS, ROOT / "benchmarks/README.md", ROOT / "stand_in/README.md"]
    titles = [
        title
        for page in pages
        for title in re.findall(
            r"^#+ (.+)$",
            page.read_text(),
            re.MULTILINE,
        )
    ]
    assert [title for title in titles if re.match(r"(As of|Of|Those|What)\b", title)] == []


def links(path: Path) -> Iterator[tuple[Path, str]]:
    """The files and anchors that a document links to."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not target.startswith("https://"):
            name, _, anchor = target.partition("#")
            yield ((path.parent / name).resolve() if name else path), anchor


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_file_and_flag_of_a_document_exists(path: Path) -> None:
    for target, anchor in links(path):
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), f"{target}#{anchor}"
    text = path.read_text()
    folders = r"(?:scripts|configs|benchmarks|examples|fsdp_qlora|tests|docs)/"
    named = set(re.findall(rf"(?<![\w/.~-]){folders}[\w./]*\w", text))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    # for developers, and with options that were removed
    if path.name not in ("CONTRIBUTING.md", "AGENTS.md", "log.md"):
        lines = [line for line in text.splitlines() if not line.startswith(("pip ", "ruff "))]
        given = set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", "\n".join(lines)))
        assert sorted(given - option_types().keys() - OLDER.keys() - OTHER_FLAGS) == []
