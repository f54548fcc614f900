"""Servers at `option.base_url`: their options, the check of their answers, their pauses, and the search for a model."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.core.values import Finish, Sampling, StructuredOutput
from handler.engines.base import EngineConfig
from handler.engines.grpc.client import CONTRACTS
from handler.engines.openai.completions import KINDS
from handler.engines.openai.sglang.api import generate
from handler.engines.remote.servers import (
    Failed,
    Lasting,
    Part,
    Refused,
    RemoteOptions,
    RemoteServer,
    ResponseCheck,
    check_same,
    choose,
    common_kind,
    find_model,
    other_size,
    score,
    with_ends,
)

OPTIONS = RemoteOptions("remote", "http://host:8000")

SERVERS: dict[str, Callable[[Sampling], Any]] = {
    **{kind: partial(servers.body, "model", [1]) for kind, servers in KINDS.items()},
    "sglang": lambda sampling: generate("model", [1], sampling),
    **{f"{name} by gRPC": partial(contract.request, "id", [1]) for name, contract in CONTRACTS.items()},
}


@pytest.mark.parametrize("server", SERVERS)
def test_structured_output_with_nul_characters_reaches_no_server(server: str) -> None:
    """xgrammar before 0.2.7 ends the process that reads some of them."""
    for kind, text in (
        ("regex", "a\0"),
        ("choice", '["a\\u0000"]'),
        ("grammar", 'root ::= "\0"'),
        ("json_schema", '{"pattern": "\\u0000"}'),
        ("json_schema", '{"pattern": "\\\\\\u0000"}'),
        ("structural_tag", '{"format": "\\u0000"}'),
    ):
        with pytest.raises(ValueError, match="NUL characters"):
            SERVERS[server](Sampling(max_new_tokens=1, structured_output=StructuredOutput(kind, text)))
    SERVERS[server](Sampling(max_new_tokens=1, structured_output=StructuredOutput("regex", r"\u0000")))


def configured(**options: Any) -> EngineConfig:
    return EngineConfig(dataclasses.replace(Config(), engine_options=options))


# -- options -----------------------------------------------------------------------------------------------------------


def test_addresses_are_those_of_the_option() -> None:
    assert OPTIONS.urls(configured(base_url=("http://a", "http://b"))) == ("http://a", "http://b")


def test_missing_addresses_are_asked_for_with_an_example() -> None:
    with pytest.raises(ConfigError, match=r"needs option.base_url, for example -o option.base_url=http://host:8000"):
        OPTIONS.urls(configured())


def test_both_a_missing_address_and_a_missing_model_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        OPTIONS.check(str(tmp_path / "none"), configured())
    assert "option.base_url" in str(raised.value)
    assert "option.model_id" in str(raised.value)


def test_a_model_that_is_fetched_later_is_not_looked_for_yet() -> None:
    OPTIONS.check("s3://bucket/model", configured(base_url=("http://a",)))


def test_the_directory_of_a_remote_model_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs option.model_id, a directory or a name on the hub$"):
        OPTIONS.prepare(None, configured())
    with pytest.raises(ConfigError, match=r"a directory or a name on the hub; '.*none' is neither"):
        OPTIONS.prepare(str(tmp_path / "none"), configured())
    with pytest.raises(ConfigError, match="tokenizer"):
        OPTIONS.prepare(str(tmp_path), configured())
    (tmp_path / "tokenizer.json").write_text("{}")
    assert OPTIONS.prepare(str(tmp_path), configured()) == tmp_path


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_failure_is_told_with_its_detail_and_is_nothing_else_by_default() -> None:
    failed = Failed("broke down", "out of memory")
    assert str(failed) == "broke down: out of memory"
    assert str(Failed("broke down")) == "broke down"
    assert type(failed) is Failed
    assert not failed.retry_after
    assert str(Refused(400, "too long")) == "refused the request with 400"


# -- answers -----------------------------------------------------------------------------------------------------------


def taken(
    check: ResponseCheck, ids: list[int], logprobs: Sequence[float | None] = (), tops: Sequence[Any] = ()
) -> Part:
    part = Part()
    check.take(part, ids, logprobs, tops)
    return part


def test_an_answer_has_at_most_the_tokens_that_were_asked_for() -> None:
    check = ResponseCheck(Sampling(max_new_tokens=3, logprobs=False))
    assert not check.begun
    taken(check, [])
    assert not check.begun
    assert taken(check, [5, 6]).ids == [5, 6]
    assert check.begun
    assert taken(check, [7]).logprobs == [None]
    with pytest.raises(Failed, match=r"sent more tokens than max_tokens=3$"):
        taken(check, [8])


def test_a_request_without_new_tokens_may_be_answered_with_one() -> None:
    check = ResponseCheck(Sampling(max_new_tokens=0, logprobs=False))
    assert taken(check, [5]).ids == [5]
    with pytest.raises(Failed, match="max_tokens=1"):
        taken(check, [6])


def test_each_token_has_the_scores_that_were_asked_for() -> None:
    check = ResponseCheck(Sampling(logprobs=True))
    assert taken(check, [5, 6], [-1, None]).logprobs == [-1.0, None]
    with pytest.raises(ValueError, match="a token's log-probability is missing"):
        taken(check, [5, 6], [-1.0])
    assert taken(ResponseCheck(Sampling(logprobs=False)), [5], [-1.0]).logprobs == [None], "nobody asked"


def test_each_token_has_the_alternatives_that_were_asked_for() -> None:
    check = ResponseCheck(Sampling(logprobs=False, top_logprobs=1))
    part = taken(check, [5], [-1.0], [((5, -1.0),)])
    assert (part.logprobs, part.tops) == ([-1.0], [((5, -1.0),)])
    with pytest.raises(ValueError, match="a token's alternatives are missing"):
        taken(check, [5], [-1.0], [])
    with pytest.raises(ValueError, match="log-probability is missing"):
        taken(check, [5], [], [((5, -1.0),)])
    assert taken(ResponseCheck(Sampling(logprobs=False)), [5], [], [((5, -1.0),)]).tops == [], "nobody asked"


def test_the_reason_of_an_answers_end_is_read_with_its_last_token() -> None:
    check = ResponseCheck(Sampling(stop_token_ids=(7,)))
    assert check.finish("length", 7) is Finish.LENGTH
    assert check.finish("stop", 7) is Finish.STOP
    assert check.finish("stop", 8) is Finish.EOS
    with pytest.raises(Failed, match=r"ended the request for an unknown reason: finish_reason='abort'"):
        check.finish("abort", 7)


def test_a_models_own_ends_stop_an_answer_unless_it_ignores_them() -> None:
    assert with_ends(Sampling(stop_token_ids=(9,)), {5, 9, 2}).stop_token_ids == (9, 2, 5)
    assert with_ends(Sampling(stop_token_ids=(9,), ignore_eos=True), {5}).stop_token_ids == (9,)


@pytest.mark.parametrize("value", ["-1.0", None, True, float("nan"), float("-inf")])
def test_a_score_that_is_no_finite_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="a log-probability is not a number"):
        score(value)


# -- pauses ------------------------------------------------------------------------------------------------------------


def known() -> RemoteServer:
    server = RemoteServer("http://a")
    assert (server.known, server.num_failures, server.outstanding, server.asking) == (False, 0, 0, None)
    assert (server.enforces_rules, server.enforces_until, server.asked_at) == (False, 0.0, 0.0)
    server.known = True
    return server


def test_a_remote_servers_pauses_double_up_to_half_a_minute() -> None:
    server, now, pauses = known(), 100.0, []
    for _ in range(12):
        pauses.append(server.failed(now))
        assert server.is_out(now)
        now += pauses[-1]
        assert not server.is_out(now)
    assert pauses == [1, 2, 4, 8, 16, *[30] * 7]
    assert server.num_failures == 8
    server.answered()
    assert server.failed(now) == 1


def test_a_failure_within_a_pause_does_not_lengthen_it() -> None:
    server = known()
    assert server.failed(100.0) == 1.0
    assert server.failed(100.5) == 0.0
    assert (server.num_failures, server.is_out(101.0)) == (1, False)


def test_a_complete_answer_ends_a_pause() -> None:
    server = known()
    server.failed(100.0)
    server.answered()
    assert not server.is_out(100.0)


def test_a_server_may_ask_for_a_longer_pause_up_to_the_longest() -> None:
    assert known().failed(100.0, retry_after=7.0) == 7.0
    assert known().failed(100.0, retry_after=0.5) == 1.0
    assert known().failed(100.0, retry_after=3600.0) == 30.0


def test_a_failed_server_must_confirm_its_model_before_it_is_preferred() -> None:
    server = known()
    assert server.serves(100.0)
    server.failed(100.0)
    assert not server.known
    assert not server.serves(200.0)
    server.known = True
    assert not server.serves(100.5), "its pause is not over"
    assert server.serves(101.0), "one request tries it"


def test_the_server_with_the_least_to_do_and_the_fewest_attempts_is_chosen() -> None:
    idle, busy, paused = known(), known(), known()
    busy.outstanding = 10
    paused.failed(100.0)
    assert choose([busy, idle, paused], Counter(), 100.0) is idle
    assert choose([busy, idle, paused], Counter([idle]), 100.0) is busy
    assert choose([paused, busy, idle], Counter([idle, busy]), 100.0) is idle, "rather than one that is out"
    assert choose([paused], Counter(), 100.0) is paused


# -- kinds -------------------------------------------------------------------------------------------------------------


def test_the_kind_that_all_servers_report_is_theirs() -> None:
    assert common_kind({"http://a": "vllm", "http://b": "vllm"}, ["c is down"], ["vllm", "tgi"]) == "vllm"


def test_servers_of_different_kinds_are_told_apart() -> None:
    with pytest.raises(ConfigError) as raised:
        common_kind({"http://a": "vllm", "http://b": "tgi"}, ["http://c is down"], ["vllm", "tgi"])
    assert str(raised.value) == (
        "option.base_url_kind=auto: the servers are of different kinds: http://a: vllm; http://b: tgi; "
        "http://c is down. Keep only servers of one kind"
    )


def test_without_a_server_that_reports_its_kind_the_kinds_are_named() -> None:
    with pytest.raises(ConfigError) as raised:
        common_kind({}, ["http://a is down"], ["vllm", "tgi"])
    assert str(raised.value) == (
        "option.base_url_kind=auto: no server has reported its kind: http://a is down. "
        "Start one, or set option.base_url_kind (vllm, tgi)"
    )


def test_models_may_differ_only_in_their_limits() -> None:
    check_same(Named("a", 10, 4), Named("a", 20, 4))
    with pytest.raises(Failed) as raised:
        check_same(Named("b", 10, 8), Named("a", 20, 4))
    assert str(raised.value) == "serves another model: name 'b' instead of 'a', dimensions 8 instead of 4"


def test_an_embedding_of_another_size_is_described() -> None:
    assert "size than at the start: 3 dimensions instead of one embedding with 4" in str(other_size([3], 4))
    assert "size than at the start: 2 embeddings instead of one embedding with 4" in str(other_size([4, 4], 4))


# -- the search for a model --------------------------------------------------------------------------------------------


class Found(NamedTuple):
    max_tokens: int | None


class Named(NamedTuple):
    name: str
    max_tokens: int | None
    dimensions: int


class Search:
    """Servers that answer in turn, and a clock on which each pause passes at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: list[Found | Failed]) -> None:
        self.now, self.answers = 1000.0, answers
        self.pauses: list[float] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    async def ask(self, url: str) -> Found:
        answers = self.answers[url]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Failed):
            raise answer
        return answer

    def fit(self, answer: Found, common: Found | None) -> Found:
        if answer.max_tokens == 13:
            raise Lasting("serves another model")
        return answer

    def run(self) -> tuple[Found, dict[str, Failed]]:
        model, failed = asyncio.run(find_model(list(self.answers), self.ask, self.fit, "a model"))
        return model, dict(failed)


def test_the_smallest_limit_of_all_servers_is_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(monkeypatch, a=[Found(100)], b=[Found(None)], c=[Found(50)], d=[Found(70)])
    assert search.run() == (Found(50), {})
    assert Search(monkeypatch, a=[Found(None)]).run() == (Found(None), {})
    assert not search.pauses


def test_one_server_with_the_model_is_enough_and_the_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    down = Failed("is down")
    model, failed = Search(monkeypatch, a=[down], b=[Found(100)], c=[Found(13)]).run()
    assert model == Found(100)
    assert failed["a"] is down
    assert str(failed["c"]) == "serves another model"


def test_failures_that_last_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(monkeypatch, a=[Found(13)], b=[Lasting("has another model", "x")])
    with pytest.raises(ConfigError) as raised:
        search.run()
    told = "option.base_url=a: serves another model; option.base_url=b: has another model: x"
    assert str(raised.value) == told


def test_a_server_that_is_not_up_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    down = [Failed("is down")]
    search = Search(monkeypatch, a=down * 39 + [Found(100)], b=[Found(13)])
    assert search.run()[0] == Found(100)
    assert search.pauses == [0.5] * 39
    line = "waiting for a model: option.base_url=a: is down; option.base_url=b: serves another model\n"
    assert capsys.readouterr().err == line, "every 10 seconds"


def test_an_error_of_the_search_itself_is_not_a_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(monkeypatch, a=[Found(100)])
    monkeypatch.setattr(search, "fit", lambda answer, common: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        search.run()
