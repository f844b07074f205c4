from pathlib import Path

from tests.phantom import environment


def test_the_tests_of_the_cpu_run_on_a_machine_with_a_gpu(tmp_path: Path) -> None:
    # Their ranks are forked from a process that has imported bitsandbytes.
    test = "tests/layers/test_sharding.py::test_frozen_weights_that_a_rank_has_whole_are_not_kept_twice"
    (ended,) = environment.run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "1-", test], tmp_path, is_fresh=True
    )
    assert ended.status == 0, ended.output[-3000:]
