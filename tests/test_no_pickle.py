"""Nothing that can run code from a file or from another rank: the sources are searched for it."""

import ast

import pytest

from tests.helpers.run import ROOT

pytestmark = pytest.mark.quick

SOURCES = sorted(
    path
    for folder in ("fsdp_qlora", "scripts", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
SOURCES += [ROOT / "train.py"]
MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "torch.distributed.checkpoint",
}
# torch's collectives of objects pickle them, and so do the loaders.
NAMES = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "broadcast_object", "loads_pickle", "read_pickle"),
}


def offences(source: str) -> list[str]:
    """What a module uses of the above, with lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        found += [
            f"{line}: {module}"
            for module in modules
            if any(f"{module}.".startswith(f"{m}.") for m in MODULES)
        ]
        name = (
            node.attr
            if isinstance(node, ast.Attribute)
            else node.id
            if isinstance(node, ast.Name)
            else ""
        )
        imported = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        found += [f"{line}: {one}" for one in (name, *imported) if one in NAMES]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            call = f"{node.value.id}.{node.attr}"
            if call in ("torch.load", "torch.save", "np.load") or call.startswith("dcp."):
                found.append(f"{line}: {call}")
    return found


def test_no_source_pickles_or_unpickles():
    assert len(SOURCES) > 50
    assert {path: found for path in SOURCES if (found := offences(path.read_text()))} == {}


def test_pickle_search_finds_pickling_code():
    lines = [
        "import pickle",
        "from torch.distributed import checkpoint as dcp",
        "torch.load(f)",
        "dist.gather_object(a)",
    ]
    assert [offence.split(": ")[0] for offence in offences("\n".join(lines))] == [
        "1",
        "2",
        "3",
        "4",
    ]
