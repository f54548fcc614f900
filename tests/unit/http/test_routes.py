"""Routes without inference, on the echo engine: what they tell of the model, and what they refuse."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import handler
from handler.core.errors import ServingError
from handler.core.values import Task
from handler.http import batch_routes
from handler.http.app import MountedApp
from handler.http.routes import ASSETS
from handler.serving.batches.store import BatchStore
from handler.serving.model import ServedModel
from tests.unit.http.mounted import Answer, call, in_app, own_environment
from tests.user_files import write_adapter

__all__ = ["own_environment"]


def model_of(app: MountedApp) -> ServedModel:
    model = app._model
    assert model is not None
    return model


def ill(app: MountedApp, reason: str = "") -> Any:
    """Patch the availability of the model: it is not healthy."""
    values: dict[str, Any] = {"healthy": False, "state": "restarting", "reason": reason}
    properties: dict[str, Any] = {name: mock.PropertyMock(return_value=value) for name, value in values.items()}
    return mock.patch.multiple(type(model_of(app).availability), **properties)


async def page(app: MountedApp, path: str, **headers: str) -> Answer:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return await call(app, path, headers=[(b"host", b"localhost"), *named])


# -- the model's state -------------------------------------------------------------------------------------------------


def test_the_state_is_the_same_on_every_route() -> None:
    async def story(app: MountedApp) -> None:
        metrics = await call(app, "/metrics")
        assert (metrics.status, b"# TYPE" in metrics.body) == (200, True)
        states = ("/ping", "/", "/health", "/v2/health/ready", "/v2/models/model/ready")
        assert [(await call(app, path)).status for path in states] == [200] * 5
        assert (await call(app, "/ping")).value == {"status": "Healthy", "state": "ready"}
        assert (await call(app, "/v2/repository/index", "POST")).value == [
            {"name": "model", "version": "1", "state": "READY"}
        ]
        with ill(app, "it died"):
            assert [(await call(app, path)).status for path in states] == [503] * 5
            assert (await call(app, "/v2/health/live")).status == 200
            assert (await call(app, "/ping")).value == {
                "status": "Unhealthy", "state": "restarting", "reason": "it died",
            }  # fmt: skip
            (state,) = (await call(app, "/v2/repository/index", "POST")).value
            assert (state["state"], state["reason"]) == ("UNAVAILABLE", "it died")
            (listed,) = (await call(app, "/models")).value["models"]
            assert listed["status"] == "PENDING"
        with ill(app):
            (state,) = (await call(app, "/v2/repository/index", "POST")).value
            assert state["reason"] == "restarting"
            assert "error" in (await call(app, "/")).value
            assert "reason" not in (await call(app, "/ping")).value

    in_app(story)


def test_replicas_are_counted_and_described_as_workers() -> None:
    async def story(app: MountedApp) -> None:
        replicas = [SimpleNamespace(ready=True), SimpleNamespace(ready=False)]
        with mock.patch.object(ServedModel, "replicas", mock.PropertyMock(return_value=replicas)):
            assert (await call(app, "/ping")).value["replicas"] == {"ready": 1, "total": 2}
            ((described,),) = [versions["models"] for versions in (await call(app, "/models/model")).value]
        (group,) = described["workerGroups"]
        assert [(worker["id"], worker["status"]) for worker in group["workers"]] == [(1, "READY"), (2, "PENDING")]
        assert (group["minWorkers"], group["maxWorkers"], described["status"]) == (2, 2, "READY")
        assert (described["loadedAtStartup"], group["device"]["deviceId"]) == (True, -1)
        ((described,),) = [versions["models"] for versions in (await call(app, "/models/model")).value]
        assert len(described["workerGroups"][0]["workers"]) == 1
        assert (await call(app, "/models/other")).status == 404

    in_app(story)


@pytest.mark.parametrize(("sequences", "megabytes"), [(1, 6), (16, 6), (17, 5), (50, 2), (100, 1), (500, 1)])
def test_batch_transform_sends_no_more_than_a_hundred_megabytes(sequences: int, megabytes: int) -> None:
    async def story(app: MountedApp) -> None:
        with mock.patch.object(ServedModel, "max_sequences", mock.PropertyMock(return_value=sequences)):
            answer = await call(app, "/execution-parameters")
        assert answer.value == {
            "MaxConcurrentTransforms": min(sequences, 100),
            "BatchStrategy": "SINGLE_RECORD",
            "MaxPayloadInMB": megabytes,
        }

    in_app(story)


def test_tgi_is_told_the_servers_limits() -> None:
    async def story(app: MountedApp) -> None:
        config = model_of(app).config
        value = (await call(app, "/info")).value
        assert (value["max_input_tokens"], value["max_total_tokens"]) == (255, 256)
        assert value["max_concurrent_requests"] == config.max_rolling_batch_size + config.job_queue_size
        assert (value["router"], value["version"]) == ("lmi-handler", handler.__version__)
        assert value["sha"] is None
        with mock.patch("handler.http.foreign_routes.__commit__", "0123abcd"):
            assert (await call(app, "/info")).value["sha"] == "0123abcd"
        for given, shown in ((100, 100), (900, 255)):
            model_of(app).config = dataclasses.replace(config, max_input_len=given)
            assert (await call(app, "/info")).value["max_input_tokens"] == shown

    in_app(story, "option.max_model_len=256")


def test_the_version_is_the_servers_own_unless_vllm_runs() -> None:
    async def story(app: MountedApp) -> None:
        assert (await call(app, "/version")).value == {"version": handler.__version__}
        model = model_of(app)
        assert model.info is not None
        with mock.patch.object(type(model.config), "engine", "vllm"):
            assert (await call(app, "/version")).value == {"version": model.info.version}
        assert (await call(app, "/load")).value == {"server_load": 0}

    in_app(story)


def test_a_tokenizers_configuration_is_shown_if_that_is_enabled() -> None:
    async def story(app: MountedApp) -> None:
        answer = await call(app, "/tokenizer_info")
        assert answer.status == 404
        assert "only with option.enable_tokenizer_info_endpoint=true" in answer.body.decode()
        model = model_of(app)
        context = model.context
        config = dataclasses.replace(context.config, enable_tokenizer_info_endpoint=True)
        for tokenizer, template, shown in (
            ({}, "t", None),
            ({"a": 1}, "t", {"tokenizer_class": "PreTrainedTokenizerFast", "a": 1, "chat_template": "t"}),
            ({"tokenizer_class": "own"}, "", {"tokenizer_class": "own"}),
        ):
            changed = dataclasses.replace(context, config=config, tokenizer_config=tokenizer, chat_template=template)
            with mock.patch.object(ServedModel, "context", mock.PropertyMock(return_value=changed)):
                answer = await call(app, "/tokenizer_info")
            assert (answer.status == 200) == (shown is not None)
            assert shown is None or answer.value == shown
            assert shown is not None or "the model has no tokenizer_config.json" in answer.body.decode()

    in_app(story)


# -- adapters by vLLM's routes -----------------------------------------------------------------------------------------


def test_adapters_of_vllms_routes_need_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(app: MountedApp) -> None:
        answer = await call(app, "/v1/load_lora_adapter", "POST", b"{}")
        assert answer.status == 404
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=true" in answer.body.decode()

    in_app(story)


def test_what_vllms_routes_for_adapters_refuse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "true")

    async def story(app: MountedApp) -> None:
        for body, told in (
            (b"[]", "the body must be a JSON object with 'lora_name'"),
            (b"{}", "'lora_name' must be a non-empty string"),
            (b'{"lora_name": ""}', "'lora_name' must be a non-empty string"),
            (b'{"lora_name": "a"}', "'lora_path' must be a non-empty string"),
            (b'{"lora_name": "a", "lora_path": "b", "is_3d_lora_weight": true}', "is not supported"),
            (b'{"lora_name": "a", "lora_path": "b", "load_inplace": 7}', "'load_inplace' must be true or false, not 7"),
            (b'{"lora_name": "model", "lora_path": "b"}', "conflicts with a served base model"),
            (b'{"lora_name": "a", "lora_path": "/nothing"}', "lora_path="),
            (b'{"lora_name": "a", "other": 1}', "unknown parameter 'other'; known: lora_name, lora_path"),
        ):
            answer = await call(app, "/v1/load_lora_adapter", "POST", body)
            assert answer.status >= 400, body
            assert told in answer.value["error"]["message"], body

    in_app(story, "option.enable_lora=true", "option.unknown_parameters=refuse")


def test_vllms_routes_load_replace_and_unload_an_adapter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "true")
    directory = write_adapter(tmp_path / "a")

    async def story(app: MountedApp) -> None:
        async def load(**more: Any) -> Answer:
            body = json.dumps({"lora_name": "mine", "lora_path": str(directory), **more}).encode()
            return await call(app, "/v1/load_lora_adapter", "POST", body)

        answer = await load(other=1, lora_int_id=7)
        assert (answer.status, answer.body) == (200, b"Success: LoRA adapter 'mine' added successfully.")
        assert answer.headers[b"x-lmi-ignored-parameters"] == b"other"
        for flags in ({}, {"load_inplace": None}, {"load_inplace": False}):
            assert (await load(**flags)).status == 400, "it is there"
        assert (await load(load_inplace="true", is_3d_lora_weight="no")).status == 200
        *_, listed = (await call(app, "/v1/models")).value["data"]
        assert (listed["id"], listed["root"], listed["parent"]) == ("mine", "mine", "model")
        answer = await call(app, "/v1/unload_lora_adapter", "POST", b'{"lora_name": "mine"}')
        assert (answer.status, answer.body) == (200, b"Success: LoRA adapter 'mine' removed successfully.")
        assert b"x-lmi-ignored-parameters" not in answer.headers
        assert b"mine" not in (await call(app, "/v1/models")).body
        assert (await load(load_inplace=True)).status == 200, "there is none to be replaced"

    in_app(story, "option.enable_lora=true", "option.adapters_root=/")


def test_an_adapter_that_java_registers_again_stays_as_it_is(tmp_path: Path) -> None:
    """A worker that restarts gets the calls of all adapters anew."""
    directory, other = (str(write_adapter(tmp_path / name)) for name in ("a", "b"))

    async def story(app: MountedApp) -> None:
        adapters = model_of(app).adapters
        first = await adapters.register("mine", directory, again=True)
        assert first.adapter.name == "mine"
        assert await adapters.register("mine", directory, again=True) is first
        for source, again in ((directory, False), (other, True)):
            with pytest.raises(ServingError, match="mine"):
                await adapters.register("mine", source, again=again)

    in_app(story, "option.enable_lora=true", "option.adapters_root=/")


def test_a_page_of_adapters_has_as_many_as_the_limit_and_the_next_begins_after_it(tmp_path: Path) -> None:
    directory = str(write_adapter(tmp_path / "a"))

    async def story(app: MountedApp) -> None:
        for name in ("a", "b"):
            added = await call(app, "/adapters", "POST", query_string=f"name={name}&src={directory}".encode())
            assert added.status == 200
        pages = [
            (await call(app, "/adapters", query_string=query)).value
            for query in (b"limit=0", b"limit=1", b"limit=1&next_page_token=1", b"limit=-1")
        ]
        names = [[entry["name"] for entry in page["adapters"]] for page in pages]
        assert names == [[], ["a"], ["b"], ["a", "b"]]
        assert [page.get("nextPageToken") for page in pages] == ["0", "1", None, None]

    in_app(story, "option.enable_lora=true", "option.adapters_root=/")


@pytest.mark.parametrize("path", ["/adapters", "/v1/load_lora_adapter"])
def test_calls_about_adapters_have_a_megabyte(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "true")

    async def story(app: MountedApp) -> None:
        for size, status in ((1 << 20, 400), ((1 << 20) + 1, 413)):
            body = b'{"name": "", "lora_name": "", "x": "' + b"x" * size
            answer = await call(app, path, "POST", body[: size - 2] + b'"}')
            assert (answer.status == 413) == (status == 413)

    in_app(story, "option.enable_lora=true", "option.adapters_root=/")


# -- pages -------------------------------------------------------------------------------------------------------------


def test_browsers_keep_a_page_that_has_not_changed() -> None:
    async def story(app: MountedApp) -> None:
        for path in ("/docs", sorted(ASSETS)[0]):
            first = await page(app, path)
            tag = first.headers[b"etag"]
            assert (first.status, first.headers[b"cache-control"]) == (200, b"no-cache")
            again = await page(app, path, if_none_match=tag.decode())
            assert (again.status, again.body) == (304, b"")
            assert again.headers[b"etag"] == tag
            assert again.headers[b"x-request-id"]
            assert again.headers[b"content-security-policy"]
            other = await page(app, path, if_none_match='"other"')
            assert (other.status, other.body) == (200, first.body)

    in_app(story)


def test_a_browser_gets_the_page_where_others_get_the_state() -> None:
    async def story(app: MountedApp) -> None:
        browser = await page(app, "/", accept="TEXT/HTML, */*")
        other = await page(app, "/", accept="*/*")
        assert browser.headers[b"content-type"].startswith(b"text/html")
        assert (other.status, other.body) == (200, b"")
        with ill(app):
            assert (await page(app, "/", accept="text/html")).status == 200
            other = await page(app, "/", accept="*/*")
        assert other.status == 503
        assert [answer.headers[b"vary"] for answer in (browser, other)] == [b"accept"] * 2

    in_app(story)


# -- models ------------------------------------------------------------------------------------------------------------


def test_models_are_described_for_each_kind_of_client() -> None:
    async def story(app: MountedApp) -> None:
        started = int(model_of(app).availability.started_at)
        listed, alias = (await call(app, "/v1/models")).value["data"]
        assert alias == {**listed, "id": "lmi"}, "a model without option.served_model_name is also served as lmi"
        assert alias == (await call(app, "/v1/models/lmi")).value
        assert listed == (await call(app, "/v1/models/model")).value
        assert (listed["id"], listed["created"], listed["max_model_len"]) == ("model", started, 256)
        assert (listed["parent"], listed["input_modalities"]) == (None, ["text", "image", "audio"])
        assert {"max_tokens", "temperature", "stop", "seed", "presence_penalty"} <= {*listed["supported_parameters"]}
        assert not {"no_repeat_ngram_size", "messages", "stream"} & {*listed["supported_parameters"]}
        answer = await page(app, "/v1/models", anthropic_version="2023-06-01")
        other, _ = answer.value["data"]
        assert answer.status == (await call(app, "/v1/models")).status == 200
        assert (other["id"], other["type"]) == ("model", "model")
        assert other == (await page(app, "/v1/models/model", anthropic_version="2023-06-01")).value
        assert "object" in listed
        assert "object" not in other
        refused = await page(app, "/v1/models/none", anthropic_version="2023-06-01")
        assert (refused.status, refused.value["type"]) == (404, "error")
        assert (await call(app, "/v1/models/none")).status == 404
        wrong = await call(
            app, "/v1/models", query_string=b"limit=x", headers=[(b"host", b"localhost"), (b"anthropic-version", b"1")]
        )
        assert wrong.status == 400

    in_app(story, "option.max_model_len=256")


def test_what_a_model_reads_is_told_by_its_task() -> None:
    async def story(app: MountedApp) -> None:
        context = model_of(app).context
        for task, read in (
            (Task.GENERATION, ["text", "image"]),
            (Task.TRANSCRIPTION, ["audio"]),
            (Task.EMBEDDING, ["text"]),
            (Task.RERANK, ["text"]),
        ):
            changed = dataclasses.replace(
                context, task=task, no_media={"image": ""}, unsupported={"frequency_penalty": "it has none"}
            )
            with mock.patch.object(ServedModel, "context", mock.PropertyMock(return_value=changed)):
                listed, *_ = (await call(app, "/v1/models")).value["data"]
            assert listed["input_modalities"] == read
            names = listed["supported_parameters"]
            assert "frequency_penalty" not in names
            assert ("presence_penalty" in names) is (task is Task.GENERATION)

    in_app(story)


# -- files and batches -------------------------------------------------------------------------------------------------


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n%b\r\n--b--\r\n'
)
MULTIPART = [(b"host", b"localhost"), (b"content-type", b"multipart/form-data; boundary=b")]


async def upload(app: MountedApp, data: bytes, **more: Any) -> Answer:
    return await call(app, "/v1/files", "POST", FORM % data, headers=MULTIPART, **more)


def test_a_file_comes_back_as_it_was_sent(tmp_path: Path) -> None:
    async def story(app: MountedApp) -> None:
        one = (await upload(app, b"x" * ((1 << 18) + 1))).value["id"]
        assert len((await call(app, f"/v1/files/{one}/content")).body) == (1 << 18) + 1, "the last part has one byte"
        data = bytes(range(256)) * 2000
        id = (await upload(app, data)).value["id"]
        answer = await call(app, f"/v1/files/{id}/content")
        assert (answer.status, answer.body) == (200, data)
        assert answer.headers[b"content-length"] == b"512000"
        await asyncio.sleep(0)
        assert not any("_disconnected" in repr(task) for task in asyncio.all_tasks()), "nobody waits any longer"
        head = await call(app, f"/v1/files/{id}/content", "HEAD")
        assert (head.status, head.body, head.headers[b"content-length"]) == (200, b"", b"512000")
        (stored,) = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size == len(data)]
        assert stored.stat().st_mode & 0o777 == 0o600
        assert (await call(app, f"/v1/files/{id}", "DELETE")).status == 200
        assert (await call(app, f"/v1/files/{id}/content")).status == 404

    in_app(story, f"option.batches_store={tmp_path}")


def test_a_file_has_a_limit_whether_its_length_is_told_or_not(tmp_path: Path) -> None:
    async def story(app: MountedApp) -> None:
        told = "'file' has more than 100 bytes (option.batches_max_file_bytes)"
        assert (await upload(app, b"x" * 100)).status == 200
        answer = await upload(app, b"x" * 101)
        assert (answer.status, answer.value["error"]["message"]) == (413, told)
        most = 100 + (1 << 16)
        for length, status in ((most + 1, 413), (most, 200)):
            sized = [*MULTIPART, (b"content-length", str(length).encode())]
            answer = await call(app, "/v1/files", "POST", FORM % b"x", headers=sized)
            assert answer.status == status

    in_app(story, f"option.batches_store={tmp_path}", "option.batches_max_file_bytes=100")


def test_a_form_has_a_limit_beside_its_file(tmp_path: Path) -> None:
    async def story(app: MountedApp) -> None:
        extra = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n%b\r\n' % (b"x" * (1 << 17))
        answer = await call(app, "/v1/files", "POST", extra + FORM % b"data", headers=MULTIPART)
        assert answer.status == 400
        assert "65536 bytes outside its file" in answer.body.decode()

    in_app(story, f"option.batches_store={tmp_path}")


def test_an_upload_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    async def story(app: MountedApp) -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.get_running_loop().create_future()

        server = {"type": "http", "http_version": "1.1", "server": ("127.0.0.1", 80), "query_string": b""}
        scope = {**server, "method": "POST", "path": "/v1/files", "headers": MULTIPART}
        await app(scope, receive, send)
        assert sent[0]["status"] == 408
        assert (b"connection", b"close") in sent[0]["headers"]
        assert b"the file did not arrive in time (option.client_timeout" in sent[1]["body"]

    in_app(story, f"option.batches_store={tmp_path}", "option.client_timeout=0.1")


def test_a_disk_that_takes_no_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    async def story(app: MountedApp) -> None:
        monkeypatch.setattr(batch_routes, "open", fail, raising=False)
        answer = await upload(app, b"x")
        assert answer.status == 503
        assert "the file cannot be written" in answer.value["error"]["message"]
        assert (await call(app, "/v1/files")).value["data"] == []

    in_app(story, f"option.batches_store={tmp_path}")


def test_only_so_many_calls_wait_for_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_list = threading.Event()
    begun: list[int] = []
    list_files = BatchStore.files

    def files(*arguments: Any) -> Any:
        begun.append(1)
        may_list.wait()
        return list_files(*arguments)

    monkeypatch.setattr(BatchStore, "files", files)

    async def story(app: MountedApp) -> None:
        waiting = [asyncio.ensure_future(call(app, "/v1/files")) for _ in range(64)]
        try:
            while len(begun) < 64:
                await asyncio.wait(waiting, timeout=0.01)
            refused = await call(app, "/v1/files")
        finally:
            may_list.set()
        assert refused.status == 429
        message = refused.value["error"]["message"]
        assert message == "64 requests for files and batches are already waiting"
        assert {answer.status for answer in await asyncio.gather(*waiting)} == {200}
        assert (await call(app, "/v1/files")).status == 200

    in_app(story, f"option.batches_store={tmp_path}")


def test_lists_of_files_and_batches_have_limits(tmp_path: Path) -> None:
    async def story(app: MountedApp) -> None:
        for path, limit, status in (
            ("/v1/files", b"10000", 200),
            ("/v1/files", b"10001", 400),
            ("/v1/batches", b"100", 200),
            ("/v1/batches", b"101", 400),
        ):
            assert (await call(app, path, query_string=b"limit=" + limit)).status == status, (path, limit)

    in_app(story, f"option.batches_store={tmp_path}")


def test_without_a_store_files_and_batches_are_not_found() -> None:
    async def story(app: MountedApp) -> None:
        for path in ("/v1/files", "/v1/batches", "/v1/files/f/content", "/v1/batches/b"):
            answer = await call(app, path)
            assert answer.status == 404
            assert "not enabled on this server (option.batches_store)" in answer.value["error"]["message"]

    in_app(story)


def test_while_the_server_stops_no_file_is_taken_or_deleted(tmp_path: Path) -> None:
    async def story(app: MountedApp) -> None:
        id = (await upload(app, b"x")).value["id"]
        model_of(app).drain()
        assert (await upload(app, b"x")).status == 503
        assert (await call(app, f"/v1/files/{id}", "DELETE")).status == 503
        assert (await call(app, f"/v1/files/{id}")).status == 200

    in_app(story, f"option.batches_store={tmp_path}")


def test_stored_responses_that_are_not_kept_are_not_found(tmp_path: Path) -> None:
    async def story(app: MountedApp) -> None:
        for path, method in (
            ("/v1/responses/resp_1", "GET"),
            ("/v1/responses/resp_1", "DELETE"),
            ("/v1/responses/resp_1/input_items", "GET"),
        ):
            answer = await call(app, path, method)
            assert answer.status == 404, (path, method)
            assert "responses are not stored" not in answer.body.decode()
        answer = await call(app, "/v1/responses/resp_1/input_items", query_string=b"after=msg_1")
        assert "resp_1" in answer.body.decode()
        assert answer.status == 404
        model_of(app).drain()
        assert (await call(app, "/v1/responses/resp_1", "DELETE")).status == 503
        assert (await call(app, "/v1/responses/resp_1")).status == 404

    in_app(story, f"option.responses_store={tmp_path}")


def test_a_file_must_be_a_form(tmp_path: Path) -> None:
    async def story(app: MountedApp) -> None:
        assert (await call(app, "/v1/files", "POST", b"{}")).status == 415

    in_app(story, f"option.batches_store={tmp_path}")


def test_other_models_are_not_this_servers(tmp_path: Path) -> None:
    async def story(app: MountedApp) -> None:
        for path, status in (
            ("/v2/models/model", 200),
            ("/v2/models/model/versions/1", 200),
            ("/v2/models/model/versions/2", 404),
            ("/v2/models/other", 404),
        ):
            assert (await call(app, path)).status == status, path
        metadata = (await call(app, "/v2/models/model")).value
        config = (await call(app, "/v2/models/model/config")).value
        assert all(tensor["shape"][0] == -1 for tensor in metadata["inputs"])
        assert {tensor["name"]: tensor["optional"] for tensor in config["input"]}["text_input"] is False
        assert sum(not tensor["optional"] for tensor in config["input"]) == 1
        assert config["max_batch_size"] == 1
        assert config["model_transaction_policy"] == {"decoupled": True}
        assert metadata["platform"] == config["platform"] == config["backend"] == "echo"

    in_app(story)


# -- slashes that clients add to paths ---------------------------------------------------------------------------------


def test_extra_slashes_in_a_path_select_the_same_route() -> None:
    async def story(app: MountedApp) -> None:
        paths = (await call(app, "/api-doc/openapi.json")).value["paths"]
        assert {"/v1/chat/completions", "/v1/embeddings", "/v1/models", "/invocations", "/ping"} - {*paths} == {
            "/v1/embeddings"
        }
        for template, item in paths.items():
            path = re.sub("{[a-z]+}", "model", template)
            if template == "/v1/models/{id}" or path == "/metrics":
                continue  # an ID may begin with a slash; metrics change with each call
            for method in item:
                plain = await call(app, path, method.upper(), b"[]")
                for other in (f"{path}/", f"{path}//", f"/{path}", path.replace("/", "//")):
                    answer = await call(app, other, method.upper(), b"[]")
                    assert (answer.status, len(answer.body)) == (plain.status, len(plain.body)), (method, other)

    in_app(story, "option.enable_lora=true", "option.responses_store=memory")


def test_a_list_of_models_may_end_with_a_slash() -> None:
    async def story(app: MountedApp) -> None:
        listed = (await call(app, "/v1/models")).value
        for path in ("/v1/models/", "/v1//models//", "//v1/models"):
            assert (await call(app, path)).value == listed, path
        for id in ("/opt/ml/model", "org/x", "dir/"):
            for path in (f"/v1/models/{id}", f"/v1/models/{id}/"):
                assert (await call(app, path)).value["id"] == id, path
        assert (await call(app, "/v1/models/none/")).status == 404

    in_app(story, "option.served_model_name=/opt/ml/model,org/x,dir/")


def test_extra_slashes_open_no_path_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMI_API_KEY", "key-of-the-test")

    async def story(app: MountedApp) -> None:
        for path in ("/ping", "/ping/", "//health", "/health/"):
            assert (await call(app, path)).status == 200, path
        for path in ("/metrics/", "//v1/models", "/v1/models/", "/ping/../metrics"):
            assert (await call(app, path)).status in (401, 404), path

    in_app(story)


def test_the_attribute_route_may_have_extra_slashes() -> None:
    async def story(app: MountedApp) -> None:
        header = (b"x-amzn-sagemaker-custom-attributes", b"route=/v1/chat/completions/")
        body = json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}).encode()
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), header]
        for path in ("/invocations", "/invocations/"):
            answer = await call(app, path, "POST", body, headers=headers)
            assert (answer.status, answer.value["object"]) == (200, "chat.completion"), path

    in_app(story)
