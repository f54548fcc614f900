"""The scripted server's decisions, by System One and OpenAI's API: as their SDKs need them, or as vLLM 0.33 has them.

Sources of vLLM's form: vllm 0.33.0, entrypoints/generate/structured_decisions and entrypoints/openai/decisions.
"""

from __future__ import annotations

import itertools
import json
from typing import Any, NamedTuple

from handler.serving.compression import Inflater
from tests.moving.conform.wire import Refused, Reply, Request, Value

SYSTEM_ONE, OPENAI = "/v1/systemone", "/v1/decisions"
_OPTIONS = {"choice": ("criteria", "choices"), "score": ("criteria", "levels")}
_MASS = 0.8
_NUMBERS = itertools.count(1)
_IDS = ("model", "jev-latest", None)


class Field(Refused):
    """An invalid question, of which System One's clients read the path."""

    def __init__(self, path: list[str | int]) -> None:
        super().__init__(f"invalid {path}", 422)
        self.path = path


class Form(NamedTuple):
    """What distinguishes the servers.

    Attributes:
        is_vllm: whether to answer as vLLM 0.33 does, otherwise as the SDKs of TypeSafe and OpenAI need it.
    """

    is_vllm: bool = False

    def decides(self, request: Request) -> str:
        """Return the route whose API the request has, or "" if it is no decision."""
        if request.path == "/invocations" and not self.is_vllm and b'"questions"' in request.body:
            return SYSTEM_ONE if b'"state"' in request.body else OPENAI
        return request.path if request.path in (SYSTEM_ONE, OPENAI) else ""

    def reply(self, request: Request) -> Reply:
        """Answer a decision."""
        route = self.decides(request)
        try:
            value = json.loads(self._body(request))
            self._check(route, value)
            answer = self._systemone(value) if route == SYSTEM_ONE else self._openai(value)
            reply = Reply({"model": "model", **answer}, made=1)
            if not self.is_vllm:
                reply.headers["x-typesafe-request-id"] = f"decision-{next(_NUMBERS)}"
            return reply
        except ValueError as error:
            return self._refusal(400, str(error))
        except Field as error:
            if route == SYSTEM_ONE and not self.is_vllm:
                return Reply({"detail": [{"loc": ["body", *error.path], "msg": "invalid", "type": "value_error"}]}, 422)
            return self._refusal(400, str(error))
        except Refused as error:
            return self._refusal(error.status, str(error))

    def _body(self, request: Request) -> bytes:
        coding = request.headers.get("content-encoding")
        if coding is None or self.is_vllm:
            return request.body
        decoder = Inflater(coding, 1 << 20)
        data = b"".join(decoder.feed(request.body))
        decoder.end()
        return data

    def _refusal(self, status: int, message: str) -> Reply:
        kind, code = ("BadRequestError", status) if self.is_vllm else ("invalid_request_error", None)
        return Reply({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)

    def _check(self, route: str, value: Value) -> None:
        if value.get("model") not in (("model", None) if self.is_vllm else _IDS):
            raise Refused("the model does not exist", 404)
        if (value.get("chat_template_kwargs") or {}).get("enable_thinking") or "images" in value:
            raise Refused("not with this model", 400)
        if not value["questions"] or ("state" if route == SYSTEM_ONE else "input") not in value:
            raise Field(["questions"])
        for part in self._parts(value):
            if part["type"] not in (("input_text",) if self.is_vllm else ("input_text", "input_json")):
                raise Refused("not with this model", 400)
        items = value["questions"].items() if route == SYSTEM_ONE else enumerate(value["questions"])
        for name, question in items:
            if question["type"] not in ("noul", "predicate", *_OPTIONS):
                raise Field(["questions", name, "type"])
            if question["type"] in _OPTIONS and not self._options(question):
                raise Field(["questions", name, "criteria"])

    @staticmethod
    def _parts(value: Value) -> list[Value]:
        items = value.get("input")
        return [part for item in items for part in item["content"]] if isinstance(items, list) else []

    @staticmethod
    def _options(question: Value) -> Any:
        return next((question[name] for name in _OPTIONS[question["type"]] if name in question), None)

    @staticmethod
    def _probabilities(number: int) -> list[float]:
        """Return probabilities of which the last is the highest."""
        total = number * (number + 1) / 2
        return [(index + 1) / total for index in range(number)]

    def _confidence(self, values: list[float], *, ordered: bool) -> float:
        number, best = len(values), len(values) - 1
        if self.is_vllm:
            return values[best] * _MASS
        if not ordered:
            return (number * values[best] - 1) / (number - 1)
        spread = sum(abs(index - (number - 1) / 2) for index in range(number)) / number
        return max(0.0, 1 - sum(value * (best - index) for index, value in enumerate(values)) / spread)

    def _systemone(self, value: Value) -> Value:
        results: Value = {}
        for name, question in value["questions"].items():
            kind = question["type"]
            if kind == "noul":
                more = {"probabilities": {"yes": 0.7, "no": 0.3}, "confidence": 0.7 * _MASS} if self.is_vllm else {}
                results[name] = {"type": "noul", "noul": 0.7, **more}
                continue
            options = question["criteria"]
            values = self._probabilities(len(options))
            confidence = self._confidence(values, ordered=kind == "score")
            names = [*options] if kind == "choice" else [str(index) for index in range(len(options))]
            result = {"type": kind, "probabilities": dict(zip(names, values, strict=True)), "confidence": confidence}
            if kind == "choice":
                result["choice"] = names[-1]
            else:
                result["score"] = sum(index * p for index, p in enumerate(values))
                result["legend"] = dict(zip(names, options, strict=True))
            results[name] = result
        diagnostics = {name: {"label_mass": _MASS, "argmax_is_label": True} for name in results}
        usage = {"input_tokens": 8, "output_tokens": len(results) if self.is_vllm else 0}
        head = (
            {"id": f"decision-{next(_NUMBERS)}", "object": "structured_decision", "created": 1} if self.is_vllm else {}
        )
        return {**head, "answers": results, "usage": usage, "diagnostics": diagnostics}

    def _openai(self, value: Value) -> Value:
        results: list[Value] = []
        for question in value["questions"]:
            kind, name = question["type"], question.get("name")
            if kind == "predicate":
                results.append({"type": kind, "name": name, "probability": 0.7})
                continue
            options = self._options(question)
            values = self._probabilities(len(options))
            confidence = self._confidence(values, ordered=kind == "score")
            if kind == "choice":
                rows = [{"value": option["value"]} for option in options]
                head: Value = {"choice": rows[-1]["value"]}
            else:
                rows = [{"value": index, "label": option["label"]} for index, option in enumerate(options)]
                head = {"score": sum(index * p for index, p in enumerate(values))}
            for row, p in zip(rows, values, strict=True):
                row["probability"] = p
            results.append({"type": kind, "name": name, **head, "confidence": confidence, "probabilities": rows})
        written = len(results) if self.is_vllm else 0
        usage = {
            "input_tokens": 8,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 8 + written,
        }
        diagnostics = {"label_mass": _MASS, "argmax_is_label": True}
        return {"answers": results, "usage": usage, "diagnostics": [diagnostics for _ in results]}
