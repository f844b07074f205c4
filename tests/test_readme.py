"""The README and the docs say what the code does."""

from scripts import update_docs
from tests.tiny import ROOT


def test_the_page_of_options_is_that_of_the_code() -> None:
    assert update_docs.main(["--check"]) == 0, "python scripts/update_docs.py"


def test_every_file_that_the_readme_names_is_there() -> None:
    text = (ROOT / "README.md").read_text()
    words = {word.strip("`().,;:") for word in text.split()}
    named = {word for word in words if word.startswith(("scripts/", "configs/", "benchmarks/", "fsdp_qlora/"))}
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]
