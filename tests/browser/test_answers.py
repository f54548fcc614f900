"""Answers that the test writes itself: Markdown, thoughts, tool calls, what is hostile, and what breaks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from handler import __commit__, __version__
from handler.core.values import Sampling
from tests.browser.conftest import Open, needed
from tests.browser.test_page import ANSWER, PHONE, ready, send, unfold, until, whole
from tests.servers import LiveServer

pytestmark = pytest.mark.browser

FAKE = """() => {
  const real = window.fetch;
  window.bodies = [];
  window.fetch = (path, options) => {
    if (!String(path).endsWith("chat/completions")) return real(path, options);
    bodies.push(JSON.parse(options.body));
    const stream = new ReadableStream({ start: (controller) => { window.sink = controller; } });
    options.signal.addEventListener("abort", () => sink.error(options.signal.reason));
    const headers = { "Content-Type": "text/event-stream" };
    return Promise.resolve(new Response(stream.pipeThrough(new TextEncoderStream()), { headers }));
  };
}"""
"""The page's chats get what the test feeds them."""


class Chat:
    """A page whose answers come from the test: `feed` sends deltas at once, `end` the finish reason.

    The page renders in frames, and later where frames are slow: wait with `until` for what is shown midway.
    """

    def __init__(self, page: Any) -> None:
        ready(page)
        page.evaluate(FAKE)
        self.page = page

    def ask(self, text: str = "Go") -> None:
        count = len(self.bodies)
        send(self.page, text)
        self.asked(count + 1)

    def asked(self, count: int) -> None:
        until(self.page, f"bodies.length == {count}")

    @property
    def bodies(self) -> list[Any]:
        return list(self.page.evaluate("bodies"))

    def feed(self, *deltas: str | dict[str, Any], finish: str | None = None) -> None:
        """Send an event for each delta, and wait for some frames."""
        values = [{"content": delta} if isinstance(delta, str) else delta for delta in deltas]
        events = [{"choices": [{"delta": value, "finish_reason": finish}]} for value in values]
        self.page.evaluate(
            """async (text) => { sink.enqueue(text);
                for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame); }""",
            "".join(f"data: {json.dumps(event)}\n\n" for event in events),
        )

    def end(self, finish: str | None = "stop") -> None:
        if finish:
            self.feed("", finish=finish)
        self.page.evaluate("sink.close()")
        self.page.wait_for_selector(f"{ANSWER} .note")

    def count(self, selector: str) -> int:
        return int(self.page.locator(f"{ANSWER} .text {selector}").count())


@pytest.fixture
def chat(echo_server: LiveServer, open_page: Open) -> Chat:
    return Chat(open_page(echo_server, permissions=["clipboard-read", "clipboard-write"]))


# -- Markdown ----------------------------------------------------------------------------------------------------

MARKDOWN = """# Title

A **bold** *word*, `code` and [a link](https://example.com/).

1. one
2. two
   - [x] done

| a | b |
|:-:|--:|
| 1 | 2 |

> quoted

Last [reference].

[reference]: https://example.com/reference
"""


def test_markdown(chat: Chat) -> None:
    chat.ask()
    chat.feed(*MARKDOWN)
    chat.end()
    elements = {"h1": 1, "strong": 1, "em": 1, "p > code": 1, "ol > li": 2, "ul input[disabled]": 1, "blockquote": 1}
    elements |= {"th[align=center]": 1, "td[align=right]": 1, "a[target=_blank][rel~=noopener]": 2}
    assert {selector: chat.count(selector) for selector in elements} == elements
    chat.ask("next")
    assert chat.bodies[1]["messages"][1] == {"role": "assistant", "content": MARKDOWN}


TABLE = """| Engine | Installation command | Supported architectures |
|---|---|---|
| TensorRT-LLM | `pip install tensorrt-llm-extras` | Transformers, state-space models, mixtures-of-experts |
| OpenVINO | `pip install openvino-genai` | Transformers |
"""


def test_a_wide_table_scrolls_and_breaks_no_word(chat: Chat) -> None:
    chat.ask()
    chat.feed(TABLE)
    chat.end()
    broken = """() => [...document.querySelectorAll(".scroll :is(th, td)")].flatMap((cell) => {
        const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
        const range = document.createRange();
        const found = [];
        while (walker.nextNode()) for (const { 0: word, index } of walker.currentNode.data.matchAll(/[\\w]+/g)) {
            range.setStart(walker.currentNode, index);
            range.setEnd(walker.currentNode, index + word.length);
            if (range.getClientRects().length > 1) found.push(word);
        }
        return found;
    })"""
    for width in (390, 768):
        chat.page.set_viewport_size({"width": width, "height": 800})
        assert chat.page.evaluate(broken) == []
        assert chat.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert chat.page.locator(".scroll[tabindex='0']").count() == 1


def test_a_code_block_grows_in_place_and_is_copied(chat: Chat) -> None:
    """An open fence is a code block at once; its button keeps the focus while more comes."""
    chat.ask()
    chat.feed("Look:\n\n```python\nprint(1)\n")
    chat.page.focus(f"{ANSWER} .code-block .copy")
    chat.feed("x = '<b>'\n", "`", "``")
    chat.feed("\n\nThat **is** it, [half a lin")
    chat.page.wait_for_selector(f"{ANSWER} .text strong")  # a frame may be left out
    assert chat.page.evaluate("document.activeElement.className") == "quiet copy"
    chat.end()
    assert chat.page.inner_text(f"{ANSWER} .code-block span") == "python"
    chat.page.click(f"{ANSWER} .code-block .copy")
    until(chat.page, "document.querySelector('.code-block .copy').textContent == 'Copied ✓'")
    assert chat.page.evaluate("navigator.clipboard.readText()") == "print(1)\nx = '<b>'\n"
    chat.page.click(f"{ANSWER} .foot >> text=Copy")
    until(chat.page, "document.querySelector('.foot .note ~ button:last-child').textContent == 'Copied ✓'")
    assert chat.page.evaluate("navigator.clipboard.readText()").endswith("That **is** it, [half a lin")


def test_code_is_coloured_as_it_grows(chat: Chat) -> None:
    """By ranges over its text, which stays one node: it is copied and selected as before."""
    words = "(range) => `${kind} ${range.startContainer.data.slice(range.startOffset, range.endOffset)}`"
    kinds = f"[...CSS.highlights].flatMap(([kind, ranges]) => [...ranges].map({words}))"
    chat.ask()
    chat.feed("```python\ndef f():\n")
    until(chat.page, f"{kinds}.includes('keyword def')")
    chat.feed("    return 'a'  # b\n```\n\n```nothing\nreturn\n```\n\n```js\nconst " + "x" * 300 + "\n```")
    chat.end()
    found = chat.page.evaluate(kinds)
    assert {"keyword def", "keyword return", "string 'a'", "comment # b"} <= set(found)
    assert found.count("keyword return") == 1
    assert "keyword const" not in found  # a run that takes the patterns long
    assert chat.page.evaluate(f"document.querySelector('{ANSWER} .code-block code').childNodes.length") == 1


FORMULAS = r"""A price of $5 or $10, US$3-$4, and $HOME/a:$PATH.

The mean $\bar{x}$ and \(y_1\):

$$
x = \frac{1}{n} \sum_i \begin{pmatrix} a & b \\ c & d \end{pmatrix}
$$

`$code$` and $\unknowncommand$.
"""


def test_formulas(chat: Chat) -> None:
    chat.ask()
    chat.feed(*FORMULAS)
    chat.end()
    elements = {"math": 3, ".formula.display math": 1, "mfrac": 1, "mtable": 1, "p > code": 2}
    assert {selector: chat.count(selector) for selector in elements} == elements
    assert "A price of $5 or $10, US$3-$4, and $HOME/a:$PATH." in whole(chat.page)
    chat.ask("next")
    assert chat.bodies[1]["messages"][1]["content"] == FORMULAS


def test_a_token_costs_the_last_block_only(chat: Chat) -> None:
    """Earlier answers and finished blocks are never touched, and many tokens are one frame."""
    chat.ask()
    chat.feed("Earlier.")
    chat.end()
    chat.ask("more")
    chat.feed("First.\n\nSecond.\n\nLast")
    chat.page.evaluate(
        """() => {
            window.changes = [];
            const names = (records) => records.map(({ target }) => target.className || target.nodeName);
            new MutationObserver((records) => changes.push(names(records)))
                .observe(document.getElementById("log"), { childList: true, subtree: true, characterData: true });
            const blocks = document.querySelectorAll(".turn.assistant:last-child .text > *");
            blocks.forEach((node, number) => { node.number = number; });
        }"""
    )
    chat.feed(*[f" word{number}" for number in range(2000)])
    until(chat.page, "document.querySelector('.turn:last-child p:last-child').textContent.endsWith('word1999')")
    changes = chat.page.evaluate("changes")
    assert 1 <= len(changes) <= 20
    assert {target for change in changes for target in change} == {"text"}
    numbers = "[...document.querySelectorAll('.turn:last-child p')].map((node) => node.number ?? -1)"
    assert chat.page.evaluate(numbers) == [0, 1, -1]
    chat.feed("x" * 60_000)  # one block too long to parse again for each frame
    chat.feed("y" * 10)
    until(chat.page, "document.querySelector('.plain')?.textContent.endsWith('xyyyyyyyyyy')")
    chat.end()


def test_a_long_answer_at_once_is_markdown(chat: Chat) -> None:
    """A hidden tab has no frames: all of it is rendered at the end. Only a block that is too long stays text."""
    chat.ask()
    code = "```\n" + "c\n\n" * 8000 + "```\n\n"
    chat.feed("**a** b\n\n" * 3000 + code + "x " * 15_000 + "\n\n" + code, "**a** b")
    chat.end()
    assert {selector: chat.count(selector) for selector in ("p > strong", "pre", ".plain")} == {
        "p > strong": 3001,
        "pre": 2,
        ".plain": 1,
    }
    assert chat.page.inner_text(f"{ANSWER} .plain").strip() == ("x " * 15_000).strip()


def test_line_ends_of_windows(chat: Chat) -> None:
    """Each line is shown once, and the next request has them as they came."""
    lines = [f"line {number}" for number in range(40)]
    text = "\r\n\r\n".join(lines)
    chat.ask()
    chat.feed(text[:300])
    chat.feed(text[300:])
    chat.end()
    assert chat.page.locator(f"{ANSWER} .text p").all_inner_texts() == lines
    chat.ask("next")
    assert chat.bodies[1]["messages"][1]["content"] == text


def test_what_takes_too_long_stays_text(chat: Chat) -> None:
    chat.ask()
    chat.feed(("_a" * 9990 + "\n\n") * 100 + "end")
    chat.end()
    assert chat.count("p") > 0
    assert whole(chat.page).endswith("_a\n\nend")
    assert chat.count(".plain:last-child") == 1


# -- hostile answers ---------------------------------------------------------------------------------------------

HOSTILE = {
    "script": "<script>window.hacked = 1</script>\n\ntext <script src=//example.com/x.js></script>",
    "handlers": '<img src=x onerror="window.hacked=1"><svg onload="window.hacked=1"><a onclick="window.hacked=1">x</a>',
    "image": "![a](https://example.com/a.png) ![b](//example.com/b.png 'c') ![c](data:image/png;base64,AA==)",
    "own image": "![a](/metrics) <img src=page/icon.svg>",
    "javascript": "[a](javascript:window.hacked=1) [b](JaVaScRiPt:window.hacked=1) <javascript:window.hacked=1>",
    "entities": "[a](&#106;avascript:window.hacked=1) [b](java&#10;script:window.hacked=1) [c](data:text/html,x)",
    "reference": "[a]\n\n[a]: javascript:window.hacked=1 'x\" onmouseover=\"window.hacked=1'",
    "title": '[a](https://example.com "x" onmouseover=window.hacked=1 y="")',
    "alt": "![\"><script>window.hacked=1</script>](https://example.com/'onerror='window.hacked=1)",
    "style": "<style>body { display: none }</style><div style='position:fixed;inset:0'>x</div>",
    "frames": "<iframe src=https://example.com></iframe><object data=x></object><base href=//example.com>",
    "form": "<form action=https://example.com><input name=prompt id=prompt><button>Send</button></form>",
    "clobbering": "<a id=log name=form></a><img name=getElementById> <input id=prompt>",
    "info": '```"><script>window.hacked=1</script> onload=x\ncode </code></pre><script>window.hacked=1</script>',
    "math": "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=hacked=1&gt;'>",
    "TeX": r"$\href{javascript:hacked=1}{x}$ $\includegraphics{https://example.com/a.png}$ $\htmlStyle{top:0}{x}$",
    "TeX names": r"$\label{prompt}$ $\ref{x}$ $\htmlId{log}{x}$ $\class{x}{y}$ $\data{a=b}{c}$ $\tag{<img src=x>}$",
    "TeX bomb": r"$\def\a{\a\a}\a$ $\rule{9999em}{9999em}$ $\hspace{-900em}x$ " + "${" * 900 + "$" + "$x$" * 2000,
    "TeX text": r"$$\text{<script>window.hacked=1</script>}$$ \[ <img src=x onerror=hacked=1> \]",
    "long line": "x" * 5000 + " `" + "y" * 5000 + "`\n\n| " + "z" * 3000 + " |\n|---|\n| 1 |",
    "right to left": "שלום \u202eevil\u202c\n\n\u202e unended\n\n- مرحبا\n\n| א | b |\n|---|---|\n| 1 | 2 |",
    "marks": "\u0300" * 2000 + "\x00\x07\ufffe",
    "open": "```js\nlet a = `\n\n| a |\n|--\n[x](",
    "deep": "> " * 3000 + "x",
    "brackets": "[" * 4000 + "](" * 4000,
    "stars": "*a **b _c " * 2000,
}

UNSAFE = """() => {
  const found = [];
  const allowed = ["http:", "https:", "mailto:"];
  for (const node of document.querySelectorAll(".turn.assistant .text *")) {
    const formula = node.closest(".formula math"); // of our own making: MathML alone
    if (node.matches("script, style, img, svg, iframe, object, form, base, link")) found.push(node.nodeName);
    if (node.namespaceURI.endsWith("MathML") ? !formula : formula) found.push(node.nodeName);
    for (const { name, value } of node.attributes) {
      if (formula && name === "style" && !/position|url|fixed/.test(value)) continue;
      if (/^(on.*|style|src|srcset|id|name|action|formaction|ping)$/.test(name)) found.push(`${name}=${value}`);
      if (name === "href" && !allowed.includes(node.protocol)) found.push(value);
    }
  }
  return [window.hacked ?? null, found, document.documentElement.scrollWidth <= innerWidth];
}"""


def test_a_hostile_answer_is_only_text(chat: Chat) -> None:
    """Midway at several places, and whole. `open_page` checks that no request leaves, and none is refused."""
    for name, text in HOSTILE.items():
        chat.ask(name)
        size = max(len(text) // 5, 1)
        for start in range(0, len(text), size):
            chat.feed(text[start : start + size])
            assert [name, *chat.page.evaluate(UNSAFE)] == [name, None, [], True]
        chat.end()
        assert [name, *chat.page.evaluate(UNSAFE)] == [name, None, [], True]
    assert chat.page.locator(".turn").count() == 2 * len(HOSTILE)
    for width in (390, 768, 2560):
        chat.page.set_viewport_size({"width": width, "height": 800})
        assert [width, *chat.page.evaluate(UNSAFE)] == [width, None, [], True]
        assert chat.page.is_visible("#prompt")


# -- thoughts and tool calls -------------------------------------------------------------------------------------


def call(index: int | str, name: str = "", arguments: str = "", **more: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": {"name": name, "arguments": arguments}, **more}]}


def test_thoughts_are_folded(chat: Chat) -> None:
    chat.ask()
    chat.feed({"reasoning": "Let me <b>see</b>.", "reasoning_content": "Let me <b>see</b>."})
    assert chat.page.inner_text(f"{ANSWER} summary") == "Thinking …"
    assert chat.page.is_hidden(f"{ANSWER} .thoughts")
    chat.feed("Done.")
    assert chat.page.inner_text(f"{ANSWER} summary").startswith("Thought for ")
    chat.end()
    chat.page.click(f"{ANSWER} summary")
    assert chat.page.inner_text(f"{ANSWER} .thoughts") == "Let me <b>see</b>."
    assert whole(chat.page) == "Done."


def test_tool_calls_are_shown_and_their_results_sent(chat: Chat) -> None:
    page = chat.page
    page.fill("#p-more", '{"tools": []}')
    chat.ask("Weather?")
    assert chat.bodies[0]["tools"] == []
    chat.feed({"reasoning": "I look."}, call(0, "weather", '{"city"', id="call_a"), call(0, arguments=': "Paris"}'))
    chat.feed(call(1, "time", "{}", id="call_b"))
    chat.end("tool_calls")
    assert page.locator(f"{ANSWER} .call code").all_inner_texts() == ["weather", "time"]
    assert page.locator(f"{ANSWER} .call pre").first.inner_text() == '{\n  "city": "Paris"\n}'
    page.fill(f"{ANSWER} .call textarea >> nth=0", "sunny")
    page.click("text=Send results")
    chat.asked(2)
    chat.feed("It is sunny.")
    chat.end()
    question, answer, *results = chat.bodies[1]["messages"]
    assert question == {"role": "user", "content": "Weather?"}
    assert answer == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
            {"id": "call_b", "type": "function", "function": {"name": "time", "arguments": "{}"}},
        ],
        "reasoning_content": "I look.",
    }
    assert results == [
        {"role": "tool", "tool_call_id": "call_a", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_b", "content": ""},
    ]
    page.fill("#p-more", "[1]")
    assert not page.evaluate("document.getElementById('parameters').checkValidity()")


def test_a_call_may_have_any_index(chat: Chat) -> None:
    chat.ask()
    chat.feed(call(1_000_000, "far", '{"a"'), call("__proto__", "odd", "{}"), call(1_000_000, arguments=": 1}"))
    chat.end("tool_calls")
    chat.ask("next")
    calls = chat.bodies[1]["messages"][1]["tool_calls"]
    assert [each["id"] for each in calls] == ["call_0", "call_1"]
    assert [each["function"] for each in calls] == [
        {"name": "far", "arguments": '{"a": 1}'},
        {"name": "odd", "arguments": "{}"},
    ]


# -- again -------------------------------------------------------------------------------------------------------


def test_regenerating_editing_and_starting(chat: Chat) -> None:
    page = chat.page

    def contents() -> list[str]:
        return [message["content"] for message in chat.bodies[-1]["messages"]]

    page.click("text=better sleep")
    chat.asked(1)
    chat.feed("A")
    chat.end()
    chat.ask("two")
    chat.feed("B")
    chat.end()
    starter = "Give me three tips for better sleep."
    page.click(f"{ANSWER} >> text=Regenerate")
    chat.asked(3)
    assert contents() == [starter, "A", "two"]
    chat.feed("B again")
    chat.end()
    assert page.locator(".turn").count() == 4
    page.click(".turn.user >> nth=0 >> text=Edit")
    page.keyboard.press("Escape")
    assert page.inner_text(".turn.user .text >> nth=0") == starter
    page.click(".turn.user >> nth=0 >> text=Edit")
    page.keyboard.press("End")
    page.keyboard.type(" Now!")
    page.keyboard.press("Enter")
    chat.asked(4)
    assert contents() == [f"{starter} Now!"]
    chat.feed("C")
    chat.end()
    assert page.locator(".turn .text").all_inner_texts() == [f"{starter} Now!", "C"]


def test_a_cut_answer_looks_broken(chat: Chat) -> None:
    """What came of it stays in the chat; an answer without anything does not."""
    page = chat.page
    chat.ask("one")
    chat.feed("Half an ans")
    chat.end(finish=None)
    assert page.inner_text(f"{ANSWER}.broken .error") == "The connection ended before the answer was complete."
    chat.ask("two")
    page.evaluate("sink.error(new TypeError('gone'))")
    page.wait_for_selector(f"{ANSWER}.broken .error >> text=The connection broke")
    chat.ask("three")
    assert [message["content"] for message in chat.bodies[2]["messages"]] == ["one", "Half an ans", "three"]
    chat.feed("Ok")
    chat.end()
    page.click(".turn.broken >> nth=1 >> button:text('Retry')")
    chat.asked(4)
    assert [message["content"] for message in chat.bodies[3]["messages"]] == ["one", "Half an ans", "two"]


def test_a_proxy_may_add_lines_to_the_stream(chat: Chat) -> None:
    chat.ask()
    chat.page.evaluate("sink.enqueue(': open\\nretry: 10\\n\\nevent: message\\nid: 1\\n')")
    chat.feed("Whole")
    chat.end()
    assert whole(chat.page) == "Whole"
    assert chat.page.locator(".broken").count() == 0


# -- the page around it ------------------------------------------------------------------------------------------


def test_on_a_phone_the_answer_comes_into_view(echo_server: LiveServer, open_page: Open) -> None:
    chat = Chat(open_page(echo_server, **PHONE))
    page = chat.page
    page.fill("#prompt", "Go")
    unfold(page, "Parameters")  # over the chat
    page.evaluate("document.getElementById('form').requestSubmit()")
    chat.asked(1)
    assert page.evaluate("document.activeElement.nodeName") == "BODY"  # no keyboard over the answer
    chat.feed(*[f"{number}. line\n" for number in range(100)])
    box = "document.querySelector('.text li:last-child').getBoundingClientRect()"
    inside = f"(({{ top, bottom }}) => top > 0 && bottom < innerHeight)({box})"
    until(page, inside)
    chat.end()
    assert page.evaluate(inside)


@pytest.mark.parametrize("settings", [{}, PHONE], ids=["desktop", "phone"])
def test_a_long_chat_does_not_lengthen_the_page(
    echo_server: LiveServer, open_page: Open, settings: dict[str, Any]
) -> None:
    chat = Chat(open_page(echo_server, **settings))
    before = chat.page.evaluate("document.documentElement.scrollHeight")
    assert settings or before == 800  # on a desktop the page itself never scrolls
    for _ in range(2):
        chat.ask()
        chat.feed(*[f"{number}. line\n" for number in range(100)])
        chat.end()
    assert chat.page.evaluate("document.documentElement.scrollHeight") == before


def test_a_phone_gets_no_advice_for_keyboards_and_a_tidy_foot(echo_server: LiveServer, open_page: Open) -> None:
    chat = Chat(open_page(echo_server, **PHONE))
    assert chat.page.get_attribute("#prompt", "placeholder") == "Ask anything"
    chat.ask()
    chat.feed("Half")
    chat.end(finish=None)
    tops = f"[...document.querySelectorAll('{ANSWER} .foot button')].map((each) => each.offsetTop)"
    found = chat.page.evaluate(tops)
    assert len(found) == 3
    assert max(found) - min(found) < 10  # Retry, Continue and Copy stand side by side


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("settings", [{}, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing_in_answers(
    echo_server: LiveServer, open_page: Open, settings: dict[str, Any], scheme: str
) -> None:
    """With Markdown, code, thoughts, calls, an error, and a question that is edited."""
    chat = Chat(open_page(echo_server, color_scheme=scheme, **settings))
    chat.ask()
    chat.feed({"reasoning": "I think."}, MARKDOWN, "```python\nprint(1)\n```\n", call(0, "weather", "{}", id="a"))
    chat.end("tool_calls")
    chat.page.click("summary:has-text('Thought')")
    chat.ask()
    chat.feed("Half")
    chat.end(finish=None)
    chat.page.click(".turn.user >> nth=0 >> text=Edit")
    axe = needed("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(chat.page)
    assert found.violations_count == 0, found.generate_report()


def test_it_names_the_server_and_its_defaults(slow_server: LiveServer, open_page: Open) -> None:
    page = open_page(slow_server)
    ready(page)
    unfold(page, "Server")
    shown = dict(
        zip(page.locator("#server dt").all_inner_texts(), page.locator("#server dd").all_inner_texts(), strict=True)
    )
    assert shown == {
        "Model": "mine",
        "Engine": "echo",
        "Device": "cpu",
        "Context, tokens": "131,072",
        "Replicas": "1",
        "Version": __version__ + (f", commit {__commit__[:12]}" if __commit__ else ""),
    }
    defaults = Sampling()
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
        assert float(page.get_attribute(f"#p-{name}", "placeholder")) == getattr(defaults, name)
    assert page.input_value("#p-temperature") == "0.7"
    assert page.input_value("#p-top_p") == "0.9"


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ({"json": {"version": "2.0.0", "sha": "0123456789abcdef"}}, "2.0.0, commit 0123456789ab"),
        ({"body": "of the user's own code"}, "–"),
    ],
)
def test_it_says_the_commit(slow_server: LiveServer, open_page: Open, answer: dict[str, Any], shown: str) -> None:
    page = open_page(slow_server)
    page.route("**/info", lambda route: route.fulfill(**answer))
    page.reload()
    ready(page)
    unfold(page, "Server")
    until(page, "document.querySelector('#s-replicas').textContent == '1'")
    assert page.inner_text("#s-version") == shown


# -- parameters, the model, the theme, and what comes before the first token -------------------------------------


def test_presets_and_what_each_parameter_is_for(chat: Chat) -> None:
    page = chat.page
    assert page.input_value("#p-preset") == "Balanced"
    page.select_option("#p-preset", "Precise")
    page.fill("#p-seed", "7")
    chat.ask()
    chat.feed("A")
    chat.end()
    assert page.input_value("#p-preset") == "Precise"
    page.fill("#p-temperature", "0.3")
    assert page.input_value("#p-preset") == "Custom"
    page.select_option("#p-preset", "Server defaults")
    chat.ask()
    kept = [{name: body.get(name) for name in ("temperature", "top_p", "seed")} for body in chat.bodies]
    assert kept == [
        {"temperature": 0, "top_p": None, "seed": 7},
        {"temperature": None, "top_p": None, "seed": 7},
    ]
    for about in page.query_selector_all("#parameters .about"):
        tip = f"#{about.get_attribute('aria-describedby')}"
        about.focus()
        assert page.is_visible(tip)
        page.keyboard.press("Escape")
        assert page.is_hidden(tip)


def test_fields_that_the_engine_refuses_are_not_offered(echo_server: LiveServer, open_page: Open) -> None:
    page = open_page(echo_server)
    served = ["max_tokens", "temperature", "top_p", "seed", "frequency_penalty", "stop"]
    told = {"id": "model", "parent": None, "input_modalities": ["text"], "supported_parameters": served}
    ready(page)
    page.evaluate("document.querySelector('#p-top_logprobs').value = '5'")
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [told]}))
    page.evaluate("dispatchEvent(new Event('focus'))")
    chat = Chat(page)
    until(page, "document.querySelector('#p-presence_penalty').parentElement.hidden")
    assert page.input_value("#p-top_logprobs") == "1"
    assert not page.evaluate("document.querySelector('#p-frequency_penalty').parentElement.hidden")
    assert page.get_attribute("#p-top_logprobs", "max") == "1", "every engine gives the chosen token's probability"
    page.select_option("#p-preset", "Creative")
    chat.ask()
    assert page.input_value("#p-preset") == "Creative"
    assert (chat.bodies[0]["temperature"], chat.bodies[0].get("presence_penalty")) == (1, None)


def test_what_comes_before_the_first_token(chat: Chat) -> None:
    page = chat.page
    chat.ask()
    assert page.inner_text(f"{ANSWER} .pending").startswith("Processing the prompt")
    figures = page.request.get(page.url.partition("#")[0] + "metrics").text()
    queued = figures.replace("\nlmi_queued_requests 0.0", "\nlmi_queued_requests 3.0")
    page.route("**/metrics", lambda route: route.fulfill(body=queued))
    page.wait_for_selector(f"{ANSWER} .pending:text('Queued: 3 requests are waiting for the engine')")
    chat.feed("A")
    assert page.locator(".pending").count() == 0
    chat.end()


def test_the_theme_is_kept_and_rules_both_pages(chat: Chat) -> None:
    page = chat.page
    dark = "getComputedStyle(document.body).backgroundColor == 'rgb(18, 21, 26)'"
    assert not page.evaluate(dark)
    page.select_option("#theme", "dark")
    assert page.evaluate(dark)
    page.click("a[href=docs]")
    page.wait_for_url("**/docs")
    until(page, dark)
    page.go_back()
    ready(page)
    assert page.input_value("#theme") == "dark"
    page.select_option("#theme", "")
    assert not page.evaluate(dark)
    assert page.evaluate("localStorage.length") == 0


def test_an_adapter_is_chosen(echo_server: LiveServer, open_page: Open) -> None:
    page = open_page(echo_server)
    own = {"id": "model", "parent": None, "root": "SmolLM2-135M-Instruct"}
    names = [own, {"id": "sql", "parent": "model"}, {"id": "<b>", "parent": "model"}]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": names}))
    page.reload()
    chat = Chat(page)
    shown = "[...document.querySelectorAll('#model option')].map((option) => option.textContent)"
    until(page, f"{shown}.length == 3")
    assert page.evaluate(shown) == ["SmolLM2-135M-Instruct", "sql", "<b>"]
    page.select_option("#model", "sql")
    chat.ask()
    assert chat.bodies[0]["model"] == "sql"
    chat.feed("A")
    chat.end()
    assert page.text_content(f"{ANSWER} .hidden") == "sql: "


@pytest.mark.parametrize("settings", [{}, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing_in_the_sides(echo_server: LiveServer, open_page: Open, settings: dict[str, Any]) -> None:
    """With a kept chat, its menu, a deletion to undo, a formula, and what a parameter is for."""
    chat = Chat(open_page(echo_server, **settings))
    page = chat.page
    for question in ("one", "two"):
        chat.ask(question)
        chat.feed(FORMULAS)
        chat.end()
        if page.is_hidden("#history"):
            page.click("#history-toggle")
        page.click("#clear")
    if page.is_hidden("#history"):
        page.click("#history-toggle")
    page.click(".more >> nth=1")
    page.click("#chat-delete")
    page.wait_for_selector("#toast >> text=Undo")
    page.click(".open")
    if settings:
        page.click("#history-toggle")
    else:
        page.focus(".about")
    page.click(".more")
    axe = needed("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


# -- images and audio clips --------------------------------------------------------------------------------------

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
FILES = [["red <b>.png", "image/png", PNG], ["clip.wav", "audio/wav", "UklGRg=="], ["a.pdf", "application/pdf", "JQ=="]]
GIVE = """([event, target, files]) => {
  const data = new DataTransfer();
  for (const [name, type, text] of files) {
    data.items.add(new File([Uint8Array.from(atob(text), (character) => character.charCodeAt(0))], name, { type }));
  }
  const settings = { bubbles: true, cancelable: true };
  const given = event === "paste"
    ? new ClipboardEvent(event, { ...settings, clipboardData: data })
    : new DragEvent(event, { ...settings, dataTransfer: data });
  document.querySelector(target).dispatchEvent(given);
}"""


def test_files_are_dropped_and_pasted_where_the_model_takes_them(echo_server: LiveServer, open_page: Open) -> None:
    page = open_page(echo_server)
    taken = {"data": [{"id": "model", "parent": None, "input_modalities": ["text", "image", "audio"]}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=taken))
    page.reload()
    chat = Chat(page)
    page.wait_for_selector("#attach")
    page.evaluate(GIVE, ["drop", "#log", FILES])
    until(page, "document.querySelectorAll('#attached li').length == 2")
    assert page.inner_text("#toast span") == "a.pdf: the model accepts only text and images and audio clips."
    page.evaluate(GIVE, ["paste", "#prompt", FILES[:1]])
    until(page, "document.querySelectorAll('#attached li').length == 3")
    page.click("#attached button >> nth=2")
    chat.ask("What is it?")
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    clip = {"type": "input_audio", "input_audio": {"data": "UklGRg=="}}
    content = [image, clip, {"type": "text", "text": "What is it?"}]
    assert chat.bodies[0]["messages"] == [{"role": "user", "content": content}]
    chat.feed("A dot.")
    chat.end()
    until(page, "location.hash")
    page.reload()
    again = Chat(page)
    until(page, "document.querySelector('.turn.user canvas')?.getAttribute('aria-label') == 'red <b>.png'")
    again.ask("Sure?")
    assert again.bodies[0]["messages"][0] == {"role": "user", "content": content}


def test_files_are_refused_where_the_model_takes_text(echo_server: LiveServer, open_page: Open) -> None:
    page = open_page(echo_server)
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "model", "parent": None}]}))
    page.reload()
    ready(page)
    page.evaluate(GIVE, ["drop", "#log", FILES[:1]])
    page.wait_for_selector("#toast:has-text('the model accepts only text')")
    assert page.is_hidden("#attach")
    assert page.locator("#attached li").count() == 0
