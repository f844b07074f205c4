"""The README says what the code does."""

from scripts import update_readme
from tests.tiny import ROOT


def test_the_option_tables_are_those_of_the_code() -> None:
    text = (ROOT / "README.md").read_text()
    assert update_readme.START + update_readme.option_tables() + update_readme.END in text


def test_every_file_that_the_readme_names_is_there() -> None:
    text = (ROOT / "README.md").read_text()
    words = {word.strip("`().,;:") for word in text.split()}
    named = {word for word in words if word.startswith(("scripts/", "configs/", "benchmarks/", "fsdp_qlora/"))}
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]
