"""A large dataset of the hub is read file by file, each of which is on the disk for its time."""

import errno
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from fsdp_qlora.data.sources import hub_files
from fsdp_qlora.data.sources.reading import Reading
from fsdp_qlora.utils.errors import UserError
from tests.loading.test_hub import COMMIT, Hub, output_of

NAME = "owner/set"
ROWS = [{"instruction": f"Say {n}.", "output": f"{n}" * (1 + n % 5)} for n in range(60)]


class DatasetHub(Hub):
    """A hub with one dataset."""

    def answer(self, request: Any) -> None:
        path = request.path.partition("?")[0]
        length = int(request.headers.get("Content-Length") or 0)
        body = request.rfile.read(length).decode()
        files = [
            {"path": name, "rfilename": name, "type": "file", "size": len(content)}
            | {"oid": self.hash(name)}
            for name, content in self.files.items()
        ]
        if path.startswith(f"/api/datasets/{NAME}/paths-info/"):
            asked = json.loads(body)["paths"] if body.startswith("{") else []
            found = [file for file in files if file["path"] in asked]
            self.send(request, 200, json.dumps(found).encode(), {})
        elif path.startswith(f"/api/datasets/{NAME}/tree/"):
            below = path.partition(COMMIT)[2].strip("/")
            found = [file for file in files if str(file["path"]).startswith(below)]
            folders = {str(Path(name).parent) for name in self.files} - {".", below}
            found += [{"type": "directory", "path": name, "oid": "0"} for name in folders]
            self.send(request, 200, json.dumps(found).encode(), {})
        elif path.startswith(f"/api/datasets/{NAME}"):
            about = {"id": NAME, "sha": COMMIT, "siblings": files, "tags": [], "private": False}
            self.send(request, 200, json.dumps(about).encode(), {})
        elif path.startswith(f"/datasets/{NAME}/resolve/"):
            name = path.partition("/resolve/")[2].partition("/")[2]
            if name not in self.files:
                self.send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"})
                return
            self.requests[name] += request.command == "GET"
            about = {"ETag": f'"{self.hash(name)}"', "X-Repo-Commit": COMMIT}
            self.send(request, 200, self.files[name], about)
        else:
            self.send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})


def in_parquet(rows: list[dict[str, Any]]) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream)
    return stream.getvalue()


def in_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


KINDS = {
    "parquet": in_parquet,
    "jsonl": in_lines,
    "jsonl.gz": lambda rows: gzip.compress(in_lines(rows), mtime=0),
}

READ = """
import json, logging, os, sys
from pathlib import Path
from fsdp_qlora.data.sources import hub_files
from fsdp_qlora.data.sources.source import find_source, place_after
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
hub_files.LARGE = int(sys.argv[1])
if sys.argv[2] == "identity":
    print("READ", json.dumps(find_source(sys.argv.pop()).identity))
    sys.exit()
cache = Path(os.environ["FSDP_QLORA_CACHE"])
for words in sys.argv[2:]:
    dataset, _, place = words.partition(" ")
    source = find_source(dataset)
    most = 0
    rows = []
    after = {}
    if place:
        *_, last = source.entries(int(place))
        source = find_source(dataset)
        after = {"after": place_after(last, int(place))}
        print("AGAIN", flush=True)
    for entry in source.entries(**after):
        rows.append([entry.file.offset + entry.row_number, entry.row])
        here = [path for path in cache.rglob("*") if path.suffix in (".parquet", ".jsonl", ".gz")]
        most = max(most, len(here))
    print("READ", json.dumps([most, len(source.parts), source.identity, rows]), flush=True)
"""


@pytest.fixture
def hub() -> Iterator[DatasetHub]:
    hub = DatasetHub({})
    yield hub
    hub.server.shutdown()


def read(hub: DatasetHub, folder: Path, threshold: int, *datasets: str) -> tuple[list[Any], str]:
    """What a process reads: (files at once, parts, identity, rows) of each dataset."""
    folder.mkdir(exist_ok=True)
    cache = str(folder / "cache")
    said = output_of(hub, folder, READ, str(threshold), *datasets, FSDP_QLORA_CACHE=cache)
    lines = [line for line in said.splitlines() if line.startswith("READ ")]
    assert len(lines) == len(datasets), said
    return [json.loads(line.removeprefix("READ ")) for line in lines], said


@pytest.mark.parametrize(
    "kind", ["parquet", *(pytest.param(kind, marks=pytest.mark.slow) for kind in [*KINDS][1:])]
)
def test_files_give_the_rows_of_the_whole_dataset_one_at_a_time(kind, hub, tmp_path):
    names = [f"data/train-{number}.{kind}" for number in range(3)]
    hub.files = {
        name: KINDS[kind](ROWS[20 * number : 20 * number + 20]) for number, name in enumerate(names)
    }
    hub.files[f"data/test-0.{kind}"] = KINDS[kind](ROWS[:5])
    datasets = (NAME, f"{NAME}[25:30]", f"{NAME}[:5]")
    [whole, middle, first], said = read(hub, tmp_path / "a", 10, *datasets)
    numbered = [[number, row] for number, row in enumerate(ROWS, start=1)]
    assert whole[:2] == [1, 3] and whole[3] == numbered and "3 files of the split train" in said
    assert middle[3] == numbered[25:30] and first[3] == numbered[:5]
    assert [hub.requests[name] for name in names] == [3, 2, 1]
    assert not hub.requests[f"data/test-0.{kind}"]
    assert len({whole[2], middle[2], first[2]}) == 1
    [prepared], said = read(hub, tmp_path / "b", 10**9, NAME)
    assert prepared[1] == 1 and prepared[3] == numbered and prepared[2] != whole[2], said
    # What `datasets` has prepared is used.
    [again], _ = read(hub, tmp_path / "b", 10, NAME)
    assert again[2] == prepared[2]


def test_only_a_file_that_is_downloaded_needs_room(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub_files, "free_disk", lambda folder: 5)
    (tmp_path / "kept.jsonl").write_bytes(in_lines(ROWS))
    kept = {"kept.jsonl": str(tmp_path / "kept.jsonl")}
    monkeypatch.setattr(
        hub_files, "try_to_load_from_cache", lambda _, name, **given: kept.get(name)
    )

    def fill(*_: Any, **given: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub_files, "hf_hub_download", fill)
    sizes = {"kept.jsonl": 9, "large.jsonl": 9, "small.jsonl": 4}
    first, large, small = hub_files.HubFiles(NAME, "train", COMMIT, sizes).parts()
    assert len([*first.read(Reading())]) == 1 + len(ROWS)
    for part in (large, small):  # the disk has less than it says: another program fills it
        with pytest.raises(UserError, match=f"{part.name} has . B, and .* has 5 B free. Free some"):
            next(iter(part.read(Reading())))


def test_reading_goes_on_without_the_files_before(hub, tmp_path):
    names = [f"train-{number}.parquet" for number in range(3)]
    hub.files = {
        name: in_parquet(ROWS[20 * number : 20 * number + 20]) for number, name in enumerate(names)
    }
    [rest], said = read(hub, tmp_path, 10, f"{NAME} 47")
    assert [number for number, _ in rest[3]] == list(range(48, 61)), said
    assert [hub.requests[name] for name in names] == [1, 1, 2]
    left = [path for path in (tmp_path / "cache" / "downloads").rglob("*") if path.is_dir()]
    assert not left
    # A later start finds its tokens by this, also without the hub.
    hub.files = {}
    cache = {"FSDP_QLORA_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    said = output_of(hub, tmp_path, READ, "10", "identity", NAME, **cache)
    assert f'READ "{rest[2]}"' in said
