"""What a client calls things: nothing outside the folder, and weights that are saved anew are the
new ones.
"""

from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from fsdp_qlora.service.names import folder_below, has_form
from fsdp_qlora.utils.errors import UserError
from tests.service.harness import KEY, Service, datums, on_two_ranks

STEP = types.AdamParams(learning_rate=1e-2)
PROMPT = types.ModelInput.from_ints([5, 6, 7, 8])
HEX = "0123456789abcdef" * 2
MODEL = f"{HEX}:train:0"


def around(service: Service) -> dict[str, float]:
    """The files around the service's folder, and what it has on its first level."""
    places = [*service.folder.parent.rglob("*"), *service.folder.iterdir()]
    known = (service.log, service.folder)
    return {
        str(path): path.stat().st_mtime
        for path in places
        if path not in known
        and not path.name.startswith("service.db")
        and path.parent.name != "folder"
        if service.folder not in path.parents
    }


@on_two_ranks
def test_a_model_of_the_clients_own_name_is_never_a_folder(service, tmp_path):
    other = tmp_path / "home"
    (other / "weights" / "thesis").mkdir(parents=True)
    (other / "weights" / "thesis" / "chapter").write_text("of another user")
    client = service.trainer()
    path = client.save_state("own").result().path
    session = client.holder.get_session_id()
    wanted: list[Any] = [
        str(other),
        f"../{other.name}",
        "../../..",
        "a/../../b",
        ".",
        "",
        "x\ny",
        "\ud800",
        7,
        None,
        f"{HEX}:train:0",
        f"{session}:train:0/../../x",
        f"{session}:train:" + "9" * 40,
        f"{session}:sample:0",
        session,
        f"{session}:train:١",
    ]
    before = around(service)
    for model in wanted:
        for kind, seq, body in (
            ("load_weights", 0, {"path": path, "optimizer": True}),
            ("save_weights", 1, {"path": "thesis"}),
            ("optim_step", 1, {"adam_params": {}}),
        ):
            asked = {"model_id": model, "seq_id": seq, **body}
            assert "error" in service.outcome(kind, asked), (kind, model)
    assert around(service) == before
    assert (other / "weights" / "thesis" / "chapter").read_text() == "of another user"
    assert [each.name for each in other.rglob("*")] == ["weights", "thesis", "chapter"]


@on_two_ranks
def test_a_session_that_is_not_known_makes_no_model(service):
    def create(session: Any, number: Any) -> Any:
        body = {"base_model": service.model, "lora_config": {"rank": 2}}
        which = {"session_id": session, "model_seq_id": number}
        return service.outcome("create_model", {**body, **which})

    for session in (HEX, "../x", "", None, "\udfff", 3):
        assert "session" in create(session, 0)["error"]
    own = service.trainer().holder.get_session_id()
    for number in (-1, 10**30, "0", 1.5, None, True):
        assert "error" in create(own, number), number


@on_two_ranks
@pytest.mark.parametrize("again", ["deleted", "overwritten"])
def test_a_name_saved_anew_is_sampled_from_its_new_weights(service, again):
    client = service.trainer(seed=4)
    rest = tinker.RestClient(base_url=service.url, api_key=KEY)

    def save(name: str) -> str:
        if again == "overwritten":
            return str(client.save_state(name, overwrite=True).result().path)
        return str(client.save_weights_for_sampler(name).result().path)

    def logprobs(path: str) -> list[float | None]:
        sampler = service.client().create_sampling_client(model_path=path).result()
        found: list[float | None] = sampler.compute_logprobs(PROMPT).result()[1:]
        return found

    first = logprobs(save("best"))
    client.forward_backward(datums(3, 1), "cross_entropy")
    client.optim_step(STEP).result()
    if again == "deleted":
        rest.delete_checkpoint(client.model_id, "sampler_weights/best").result()
    anew = logprobs(save("best"))
    beside = logprobs(save("beside"))
    assert anew == beside
    assert not np.allclose(anew, first, atol=1e-4)  # type: ignore[arg-type]


@on_two_ranks
def test_halves_of_surrogates_are_answered_as_other_texts(service):
    half = "\ud800"
    sampler = {"session_id": half, "sampling_session_seq_id": 0, "base_model": service.model}
    for kind, body in (
        ("get_info", {"model_id": half}),
        ("session_heartbeat", {"session_id": half}),
        ("retrieve_future", {"request_id": half}),
        ("weights_info", {"tinker_path": half}),
        ("create_sampling_session", sampler),
        ("asample", {"sampling_session_id": half, "seq_id": 0}),
    ):
        status, answer = service.ask(kind, body)
        assert status in (400, 404) and "error" in answer, (kind, status)
    service.ask("cancel_future", {"request_id": half})
    assert service.create_session(user_metadata={"of": half}, display_name="a")[0] == 400
    assert service.ask("training_runs?limit=1000", b"", "GET")[0] == 200
    assert "Traceback" not in service.log.read_text()


@pytest.mark.quick
def test_a_folder_is_below_the_services_whatever_its_parts_are(tmp_path):
    root = tmp_path / "service"
    root.mkdir()
    assert folder_below(root, MODEL, "live", "3") == root / f"{HEX}_train_0" / "live" / "3"
    for model, name in (("..", "x"), ("/tmp", "x"), (MODEL, "../../../x"), (MODEL, "/etc")):
        with pytest.raises(UserError):
            folder_below(root, model, "weights", name)
    (root / f"{HEX}_train_0").symlink_to(tmp_path)
    with pytest.raises(UserError):
        folder_below(root, MODEL, "weights", "x")


FORMS = {
    "session": [HEX],
    "model": [MODEL],
    "sampler": [f"{HEX}:sample:3", f"{HEX}:sample:0-12", f"direct:{HEX}"],
    "request": [f"{MODEL}:4", f"{HEX}:sample:3:5"],
    "checkpoint": [
        f"tinker://{MODEL}/weights/a.b-c_d",
        f"tinker://{MODEL}/sampler_weights/{'x' * 128}",
    ],
}


@pytest.mark.quick
@pytest.mark.parametrize("kind", FORMS)
def test_names_have_one_form_each(kind):
    for name in FORMS[kind]:
        assert has_form(kind, name)
        changed = (f"{name}\n", f" {name}", f"x{name}", f"{name}/", name.replace("0", "٠"))
        for wrong in (*changed, name[:16], [name], 0):
            assert not has_form(kind, wrong), wrong
