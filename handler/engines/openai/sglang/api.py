"""SGLang's own HTTP API: the body of /generate, the events of its response, and what a server reports about itself.

Sources: SGLang 0.5.23 (sglang/srt/entrypoints/http_server.py, managers/tokenizer_manager.py, managers/io_struct.py),
and 0.5.2 to 0.5.13 for what has changed.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from handler.core.event_stream import StreamEvent
from handler.core.media import MEDIA
from handler.core.values import Extras, Finish, Pooling, Sampling, new_digits
from handler.engines.base import (
    JSON_TAGS,
    NO_LORA,
    Alternatives,
    Capabilities,
    EngineRequest,
    Rule,
    arguments,
    drawn_or,
    first_stop,
)
from handler.engines.openai.answer import MAX_EVENT, EventAnswer, event_value, status_error, unreadable
from handler.engines.remote.servers import Failed, Lasting, Part, Refused, score
from handler.engines.remote.sglang import (
    DRAWN,
    GREEDY,
    STARTED,
    TABLE,
    SglangFlags,
    guide,
    misses_stops,
    version_of,
)

if TYPE_CHECKING:
    from handler.engines.openai.client import HttpClient

_NO_MEDIA = dict.fromkeys(MEDIA, "SGLang tokenizes a prompt with media again, and this handler sends it only tokens")

_REASONS = {
    "num_beams": "beam search cannot be streamed",
    "typical_p": "typical decoding is not supported",
    "no_repeat_ngram_size": "repeated n-grams cannot be forbidden",
    "bad_sequences": "SGLang cannot forbid sequences of tokens",
    "allowed_token_ids": "SGLang cannot restrict a response to given token ids",
    "return_context_logits": "the servers return no logits",
    "return_generation_logits": "the servers return no logits",
}
_REFUSED = 400  # of errors without a status, which only a wrong request has before 0.5.13
_REPEATED = 5  # tokens of the prompt that the first event repeats before 0.5.4.post3
_BYTES_A_SCORE = 40  # of an id with its log-probability in JSON
_SALTING_VERSION = (0, 5, 6)
"""The oldest of the versions that were read in which `extra_key` separates the prefix cache. Older ones drop it."""
_SEEDED_DRAFTS = (0, 5, 20)
"""The oldest of the versions that were read in which speculative decoding uses seeds."""
_UNSEEDED = ("DFLASH", "DSPARK")
"""Algorithms of speculative decoding that ignore seeds."""
_LOCATION = re.compile(r"\[[0-9:]+\] \S+:[0-9]+: ")  # time and source line in xgrammar's messages
_GUIDES = ("json_schema", "regex", "ebnf", "structural_tag")


def _seed(sampling: Sampling) -> dict[str, Any]:
    return {} if sampling.seed is None else {"sampling_seed": sampling.signed_seed}


_DRAWN: Mapping[str, Rule] = {**DRAWN, "seed": _seed}

_PARAMETERS: Mapping[str, Rule] = {
    **TABLE,
    "do_sample": drawn_or(GREEDY, _DRAWN),
    "structured_output": lambda sampling: guide(sampling, "ebnf"),
}

_OF_THE_REQUEST = frozenset({"logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs", "cache_salt"})
"""Fields of the request itself, not of its `sampling_params`."""

SGLANG = Capabilities(
    frozenset({*_PARAMETERS, *_DRAWN, *_OF_THE_REQUEST}),
    _REASONS,
    no_adapters=NO_LORA,
    no_media=_NO_MEDIA,
    structural_tags=JSON_TAGS,
    labels=True,
)


def generate(adapter: str, ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    """Return the body for /generate. It also contains neutral values, as server defaults may differ.

    Args:
        adapter: name of a LoRA adapter that the server has loaded, or "" for its model.
    """
    tops = max(sampling.top_logprobs, sampling.prompt_top_logprobs if sampling.prompt_logprobs else 0)
    return {
        "input_ids": list(ids),
        "stream": True,
        "return_logprob": bool(sampling.logprobs or sampling.prompt_logprobs or tops),
        "logprob_start_len": 0 if sampling.prompt_logprobs else -1,
        "top_logprobs_num": tops,
        "sampling_params": {"n": 1, **arguments(_PARAMETERS, sampling)},
        **({"extra_key": sampling.cache_salt} if sampling.cache_salt else {}),
        **({"lora_path": adapter} if adapter else {}),
    }


def native(url: str) -> str:
    """Return the address before SGLang's own routes, from that of OpenAI's API."""
    return url.removesuffix("/v1")


class SglangServer(NamedTuple):
    """What an SGLang server reports about itself, as far as requests depend on it.

    Attributes:
        knows_seeds: whether its version has the parameter `sampling_seed`; older versions fail if they receive it.
        no_seeds: why it ignores seeds; "" if it uses them.
        flags: what decides whether it supports the parameters of both APIs.
        salts: whether its version separates the prefix cache by `extra_key`.
        preferred: names of the parameters for which --preferred-sampling-params sets defaults.
        no_loading: why it cannot load adapters while it runs; "" if it can.
        max_tokens: limit for the prompt and the response together; None if not reported. SGLang silently shortens
            responses that exceed the context or the KV cache by a few tokens, and with --allow-auto-truncate prompts
            too. This limit, which it reports for prompts, is smaller by 4 than the one for all tokens.
    """

    knows_seeds: bool = False
    no_seeds: str = ""
    flags: SglangFlags = SglangFlags()
    salts: bool = False
    preferred: tuple[str, ...] = ()
    no_loading: str = ""
    max_tokens: int | None = None

    @classmethod
    async def ask(cls, client: HttpClient, url: str, *, generates: bool = True) -> SglangServer:
        """Ask a server for its settings; see `read`."""
        root = native(url)
        model_info = await client.document(f"{root}/model_info", f"{root}/get_model_info")
        server_info = await client.document(f"{root}/server_info", f"{root}/get_server_info")
        return cls.read(model_info, server_info, generates=generates)

    @classmethod
    def read(cls, model: Any, server: Any, *, generates: bool = True) -> SglangServer:
        """Read the responses of /model_info and /server_info. Older versions lack some of the fields.

        Args:
            generates: whether the model should generate text, and not compute embeddings.

        Raises:
            Failed: the model is of the other kind, the server does not compute by itself, or its responses cannot be
                read.
        """
        try:
            if generates and not model["is_generation"]:
                detail = "its model computes embeddings: set option.task=text-embedding"
                raise Lasting("does not generate text", detail)
            if model["is_generation"] and not generates:
                raise Lasting("does not compute embeddings", "start it with --is-embedding")
            mode = server.get("disaggregation_mode") or "null"
            if mode != "null":
                detail = f"it was started with --disaggregation-mode {str(mode)[:20]}: set the address of its router"
                raise Lasting("does not generate text by itself", detail)
            preferred = model.get("preferred_sampling_params") or {}
            if isinstance(preferred, str):
                preferred = orjson.loads(preferred)
            version = version_of(server.get("version"))
            return cls(
                server.get("enable_deterministic_inference") is not None,
                _no_seeds(server, version),
                SglangFlags.read(server, version),
                version >= _SALTING_VERSION,
                tuple(map(str, preferred)),
                _no_loading(server),
                None if (limit := server.get("max_req_input_len")) is None else max(int(limit), 1),
            )
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise Failed("does not report its settings", f"its /server_info cannot be read: {error!r}") from None

    def check(self, body: Mapping[str, Any]) -> None:
        """Raise Refused if the server would ignore a part of a request, or fail because of it."""
        parameters = body["sampling_params"]
        if "sampling_seed" in parameters and self.no_seeds:
            raise Refused(400, f"seed: {self.no_seeds}")
        guide_name = next((name for name in _GUIDES if name in parameters), None)
        if reason := self.flags.refusal(
            min_p=parameters["min_p"],
            min_tokens=parameters["min_new_tokens"],
            repetition_penalty=parameters["repetition_penalty"],
            guide=guide_name,
        ):
            raise Refused(400, reason)
        if "extra_key" in body and not self.salts:
            raise Refused(400, "cache_salt: this version of SGLang does not separate its prefix cache")

    def addressed(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body for this server, with a new request id.

        Defaults of --preferred-sampling-params are set to None, which stands for SGLang's own. With
        --enable-deterministic-inference, all requests without a seed would have the same.
        """
        requested = body["sampling_params"]
        parameters = {**dict.fromkeys(self.preferred), **requested}
        if self.knows_seeds and "sampling_seed" not in requested:
            parameters["sampling_seed"] = random.getrandbits(63)
        return {**body, "rid": new_digits(), "sampling_params": parameters}


def _no_seeds(server: Mapping[str, Any], version: tuple[int, ...]) -> str:
    """Return why a server ignores seeds, or "" if it uses them."""
    if not server.get("enable_deterministic_inference"):
        return "the SGLang server was started without --enable-deterministic-inference"
    algorithm = server.get("speculative_algorithm")
    if algorithm and (algorithm in _UNSEEDED or version < _SEEDED_DRAFTS):
        return f"{STARTED} --speculative-algorithm {str(algorithm)[:20]}, and then ignores it"
    return ""


def _no_loading(server: Mapping[str, Any]) -> str:
    """Return why a server cannot load adapters while it runs, or "" if it can.

    With several schedulers, SGLang refuses to load them. Of several tokenizer processes, only one would know them.
    """
    if not server.get("enable_lora"):
        return "start it with --enable-lora, --max-lora-rank and --lora-target-modules"
    several = (flag for flag in ("dp_size", "tokenizer_worker_num") if (server.get(flag) or 1) > 1)
    if flag := next(several, None):
        return f"with --{flag.replace('_', '-')} above 1, it loads adapters only from its --lora-paths"
    return ""


def depends_on_flags(body: Mapping[str, Any]) -> bool:
    """Return whether a server's flags decide whether it supports a request (see `SglangServer.check`)."""
    parameters = body["sampling_params"]
    depending = ("sampling_seed", "min_p", "min_new_tokens", *_GUIDES)
    if parameters["repetition_penalty"] != 1 or "extra_key" in body:
        return True
    return any(parameters.get(name) is not None and parameters[name] != 0 for name in depending)


class GenerateAnswer(EventAnswer):
    """Reads the events of a response of /generate.

    An event repeats all ids so far, or contains only new ones. In most versions that depends on
    --incremental-streaming-output, formerly --stream-output; 0.5.2 sends new ones whatever its flag. So the number of
    tokens, which each event contains, decides. Before 0.5.4.post3, the first event begins with the prompt's last ids.

    Attributes:
        adapter: the adapter of the request, or None.

    Raises:
        ValueError: the server does not support the request.
    """

    def __init__(self, body: Mapping[str, Any], request: EngineRequest) -> None:
        _check_size(request)
        super().__init__(body, request)
        self.adapter = request.adapter
        self._request = request
        self._missed_stops = self._stops if misses_stops(request.sampling) else frozenset()
        self._last = -1

    def read(self, event: StreamEvent, part: Part) -> bool:
        if part.finish is not None:
            return True
        try:
            value = event_value(event, status=_REFUSED)
            meta = value["meta_info"]
            reason = meta["finish_reason"]
            if reason is not None and reason["type"] == "abort":  # it may repeat the last id
                raise _aborted(reason)
            if "output_ids" not in value:
                detail = "SGLang before 0.5 sends them only with --skip-tokenizer-init"
                raise Lasting("sent text without token ids", detail)
            ids = self._new(value["output_ids"], meta.get("completion_tokens"))
            if ids:
                self._take_new(ids, meta, part)
            if reason is not None and part.finish is None:
                part.finish = self._ended(reason)
        except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise unreadable(event, error) from None
        return bool(ids) or part.finish is not None

    def _new(self, ids: list[int], count: Any) -> list[int]:
        """Return the ids of an event that no earlier event contained.

        Args:
            count: number of tokens of the response so far, or None if the event does not contain it.

        Raises:
            Failed: tokens of the response are missing.
        """
        if not self._num_ids and type(count) is int and len(ids) > count:
            ids = self._without_prompt(ids, len(ids) - count)
        before, seen = self._num_ids, len(ids)
        if type(count) is not int:
            if before:
                raise Failed("sent a response without its number of tokens", "completion_tokens is missing")
        elif seen < count and before + seen != count:
            raise Failed("lost tokens of its response", f"received {before} + {seen} of {count} token ids")
        elif before and before + seen != count:
            if ids[before - 1] != self._last:
                raise Failed("changed tokens of its response", f"token {before}: {self._last}, then {ids[before - 1]}")
            ids = ids[before:]
        if not all(type(id) is int and id >= 0 for id in ids):
            raise ValueError("token ids must be non-negative integers")
        return ids

    def _without_prompt(self, ids: list[int], excess: int) -> list[int]:
        """Return the ids of the first event without the `excess` ones at its beginning, which the prompt must have."""
        prompt = self._request.ids
        if excess != min(len(prompt), _REPEATED) or ids[:excess] != list(prompt[-excess:]):
            raise ValueError(f"the event contains {excess} more token ids than it reports as its number of tokens")
        return ids[excess:]

    def _take_new(self, ids: list[int], meta: Mapping[str, Any], part: Part) -> None:
        logprobs: Sequence[float | None] = ()
        tops: Sequence[Alternatives] = ()
        if self._scored:
            # Whether they repeat the earlier ones does not always depend on the same as for ids.
            entries = meta["output_token_logprobs"][-len(ids) :]
            if [entry[1] for entry in entries] != ids:
                raise ValueError("the log-probabilities do not match the tokens")
            logprobs = [entry[0] for entry in entries]
        if self._num_tops:
            tops = [_ranked(row, self._num_tops) for row in meta["output_top_logprobs"][-len(ids) :]]
        sampling, first = self._request.sampling, not self._num_ids
        if (at := first_stop(ids, self._missed_stops, self._num_ids, sampling)) is not None:
            ids, logprobs, tops = ids[: at + 1], logprobs[: at + 1], tops[: at + 1]
            part.finish, self.stopped = self.finish("stop", ids[-1]), True
        if first and sampling.prompt_logprobs:
            self._take_prompt(meta, part)
        self.take(part, ids, logprobs, tops)
        self._last = ids[-1]
        if first:
            self._count_cached(meta.get("cached_tokens"), part)

    def _count_cached(self, number: Any, part: Part) -> None:
        """Add the number of cached prompt tokens, which comes with the first tokens."""
        if self._num_prompt and type(number) is int and number > 0:
            part.extras = Extras(num_cached_tokens=min(number, self._num_prompt))

    def _take_prompt(self, meta: Mapping[str, Any], part: Part) -> None:
        num_tops, entries = self._request.sampling.prompt_top_logprobs, meta["input_token_logprobs"]
        if [entry[1] for entry in entries] != list(self._request.ids):
            raise ValueError("log-probabilities of the prompt are missing")
        part.prompt_logprobs = [None, *(score(entry[0]) for entry in entries[1:])]
        if num_tops:
            rows = meta["input_top_logprobs"]
            if len(rows) != len(entries):
                raise ValueError("alternatives to tokens of the prompt are missing")
            part.prompt_tops = [(), *(_ranked(row, num_tops) for row in rows[1:])]

    def _ended(self, reason: Mapping[str, Any]) -> Finish:
        matched = reason.get("matched")
        if isinstance(matched, str):  # no request has stop strings; "NaN happened" is not one either
            raise Failed("ended the request for an unknown reason", f"it stopped at {matched[:100]!r}")
        return self.finish(reason["type"], matched if type(matched) is int else self._last)


class LabelAnswer(GenerateAnswer):
    """Reads the log-probabilities of labels from the response to a request for a single token.

    Args:
        body: body for a request that `label_sampling` describes.
    """

    def __init__(self, body: Mapping[str, Any], request: EngineRequest) -> None:
        self._label_ids = request.pooling.label_ids
        labels = {"token_ids_logprob": list(self._label_ids)}
        super().__init__({**body, **labels}, request._replace(parameters=label_sampling(request.pooling)))

    def _take_new(self, ids: list[int], meta: Mapping[str, Any], part: Part) -> None:
        super()._take_new(ids, meta, part)
        values = {id: -math.inf if logprob is None else score(logprob) for logprob, id, _ in meta[_LABELS][-1]}
        part.extras = Extras(vector=[*(values[id] for id in self._label_ids), score(part.logprobs[0])])
        part.ids, part.logprobs = [], []


_LABELS = "output_token_ids_logprobs"


def label_sampling(pooling: Pooling) -> Sampling:
    """Return the parameters of a request for the most likely next token."""
    return Sampling(max_new_tokens=1, ignore_eos=True, cache_salt=pooling.cache_salt)


def _ranked(row: Sequence[Sequence[Any]] | None, count: int) -> Alternatives:
    """Return the alternatives to a token, best first. Tokens that structured output forbids have no number in JSON."""
    pairs = [(id, score(logprob)) for logprob, id, _ in row or () if logprob is not None]
    return sorted(pairs, key=lambda pair: -pair[1])[:count]


def _aborted(reason: Mapping[str, Any]) -> Refused | Failed:
    """Return the error for a response that the server has aborted, perhaps after some tokens."""
    status, words = reason.get("status_code"), str(reason.get("message"))
    if type(status) is not int:  # another client or the operator may have aborted it
        return Failed("aborted the request", words)
    return status_error(status, orjson.dumps({"message": _LOCATION.sub("", words)}))


def _check_size(request: EngineRequest) -> None:
    """Raise ValueError if the log-probabilities of a prompt are too large for an event."""
    sampling, count = request.sampling, len(request.ids)
    if sampling.prompt_logprobs and count * (1 + sampling.prompt_top_logprobs) * _BYTES_A_SCORE > MAX_EVENT:
        raise ValueError(f"prompt_logprobs: the values of {count} tokens do not fit into an event of {MAX_EVENT} bytes")
