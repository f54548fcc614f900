"""Chats with images over HTTP: texts and counts as transformers' tokens have them, alone and in company."""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor

from handler.core.media import Medium
from handler.core.text import Detokenizer
from handler.engines.huggingface.media import pillow_image
from tests.checkpoints.vision import CASES
from tests.random_models import NUM_TOKENS, Case, Compared
from tests.servers import LiveServer


def check_over_http(server: LiveServer, vision: Compared) -> None:
    """Ask for one case alone, then for all of them twice at the same time."""

    def ask(case: Case) -> tuple[int, str]:
        content = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in case.media]
        body = {
            "model": "model",
            "messages": [{"role": "user", "content": [*content, case.messages[0]["content"][-1]]}],
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
        }
        answer = server.post(body, "/v1/chat/completions").json()
        return answer["usage"]["prompt_tokens"], answer["choices"][0]["message"]["content"]

    vocabulary = vision.driver.tokenizer.vocabulary
    assert vocabulary is not None
    with ThreadPoolExecutor(8) as threads:
        for cases in ([CASES[1]], [*CASES, *CASES]):
            for case, (num_prompt, text) in zip(cases, threads.map(ask, cases), strict=True):
                expected = vision.expected(case)
                shown = "".join(map(Detokenizer(vocabulary).feed, expected.ids))
                assert (num_prompt, text) == (expected.num_prompt, shown)


def data_url(image: Medium) -> str:
    file = io.BytesIO()
    pillow_image(image).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
