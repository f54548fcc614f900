"""Our renderer of chat templates beside that of transformers: the same prompt, or both refuse."""

from __future__ import annotations

from typing import Any

import pytest

from handler.core.errors import GenerationFailed, InvalidPayload
from handler.engines.huggingface.chat_template import ChatTemplate, render_error, shows_system, without_system
from tests.one_test import in_one_test

TOOL = {"type": "function", "function": {"name": "weather", "description": "Größe <b>", "parameters": {"a": [1, None]}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "n": 1.0}}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hé <b>?"},
    {"role": "assistant", "content": None, "reasoning_content": "Hm\n", "tool_calls": [CALL]},
    {"role": "tool", "content": "12 °C", "tool_call_id": "c1", "name": "weather"},
    {"role": "user", "content": [{"type": "text", "text": "And?"}, {"type": "image"}]},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ALL = "{% for m in messages %}"
FEATURES = {
    "tojson": ALL + "{{ m | tojson }}{% endfor %}{{ tools | tojson }}",
    "tojson of ASCII": "{{ tools | tojson(ensure_ascii=True) }}{{ tools | tojson(ensure_ascii=False) }}",
    "tojson with spaces": "{{ tools | tojson(indent=2) }}{{ tools | tojson(separators=(',', ':'), sort_keys=True) }}",
    "html": "{{ messages[1].content | tojson }}{{ messages[1].content }}{{ messages[1].content | escape }}",
    "capitals": ALL
    + "{{ m.role | capitalize }}{{ m.role | upper }}{{ m.role | title }}{{ m.role.title() }}{% endfor %}",
    "negative indices": "{{ messages[-1].content[-1].type }}{{ messages[1].content[-1] }}"
    "{{ messages[1].content[1:-1] }}",
    "slices": "{{ messages[::-1] | length }}{{ messages[1:][0].content }}{{ messages[1].content[::-1] }}",
    "break": ALL + "{% if loop.index0 == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "continue": ALL + "{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "generation": ALL + "{% if m.role == 'assistant' %}{% generation %}{{ m.reasoning_content }}{% endgeneration %}"
    "{% endif %}{% endfor %}",
    "generation that sets": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "blocks": "  {% if true %}\n  a\n  {% endif %}\n{%- if true -%}  b  {%- endif %}\n c",
    "comments": "a{# b #}\n{#- c -#} d",
    "namespaces": "{% set ns = namespace(n=0) %}" + ALL + "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "macros": "{% macro f(x, y='d') %}[{{ x }}{{ y }}{{ caller() if caller }}]{% endmacro %}{{ f(1) }}"
    "{% call f(2, y=3) %}c{% endcall %}",
    "filters": "{{ messages | map(attribute='role') | unique | join(',') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ messages | rejectattr('name', 'defined') | list | length }}{{ [3, 1, 2] | sort | first }}"
    "{{ {'b': 1, 'a': 2} | dictsort }}{{ ' a ' | trim }}",
    "more filters": "{{ 'a b c' | replace(' ', '-') | indent(2) }}{{ 3.7 | int }}{{ '3' | int + 1 }}{{ none | "
    "default('d', true) }}{{ [1, [2]] | string }}{{ {'a': 1} | items | list }}{{ 'abc' | batch(2) | list }}",
    "strings": "{{ 'a,b'.split(',') }}{{ ' x'.lstrip() }}{{ 'x\\n'.rstrip('\\n') }}{{ 'ab'.startswith('a') }}"
    "{{ '%s-%d' | format('a', 1) }}{{ '{}'.format(1) }}{{ 'a' ~ 1 }}{{ 'ab'.find('b') }}{{ 'x' * 3 }}",
    "tests": "{{ messages[0] is mapping }}{{ messages is iterable }}{{ messages[0].content is string }}"
    "{{ x is undefined }}{{ messages[2].content is none }}{{ 1 is number }}{{ 1 is odd }}{{ true is boolean }}",
    "values": "{{ true }}{{ none }}{{ 1.0 }}{{ [true, none, 'a'] }}{{ {'a': true} }}"
    "{{ 1 // 2 }}{{ 2 ** 3 }}{{ 7 % 3 }}",
    "loops": ALL + "{{ loop.first }}{{ loop.last }}{{ loop.previtem.role if loop.previtem }}{{ loop.cycle('a', 'b') }}"
    "{{ loop.revindex }}{% else %}none{% endfor %}",
    "recursion": "{% for i in [1, [2]] recursive %}{% if i is iterable %}{{ loop(i) }}{% else %}{{ i }}{% endif %}"
    "{% endfor %}",
    "dictionaries": "{% for k, v in tools[0].function.items() %}{{ k }}={{ v }};{% endfor %}{{ dict(a=1) }}"
    "{{ tools[0].get('x', 'd') }}{{ tools[0].keys() | list }}",
    "inclusion": "{{ 'user' in messages | map(attribute='role') | list }}{{ 'a' not in 'bc' }}{{ 1 if 0 else 2 }}",
    "tokens": "{{ bos_token }}{{ eos_token }}[{{ pad_token }}]{{ documents }}{{ add_generation_prompt }}",
    "reasoning": "{{ messages[2].thinking }}{{ messages[2].reasoning_content }}{{ messages[2].reasoning }}",
    "null": "{{ messages[2].content is defined }}{{ 'content' in messages[2] }}",
    "arguments": "{{ enable_thinking }}{{ custom.a }}",
    "unsafe text": "{% set x %}{{ messages[1].content }}{% endset %}{{ x }}{% filter upper %}a{% endfilter %}",
    "dates": "{{ strftime_now('%Y')[:2] }}",
}
REFUSED = {
    "raise_exception": "{{ raise_exception('roles must alternate') }}",
    "change": "{{ messages.append(1) }}",
    "attributes": "{{ messages.__class__.__mro__ }}",
    "undefined": "{{ a.b }}",
    "undefined in JSON": "{{ a | tojson }}",
    "syntax": "a\n{% if %}",
    "types": "{{ 'a' + 1 }}",
    "unknown": "{{ 1 | nothing }}",
    "ranges": "{% for i in range(1000000000) %}{% endfor %}",
}


@pytest.fixture(scope="module")
def theirs() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"?": 0}, unk_token="?")), **TOKENS)


ARGUMENTS: dict[str, Any] = {"enable_thinking": False, "custom": {"a": "b"}}


@pytest.mark.parametrize("ending", [True, False])
def test_a_conversations_prompt_is_that_of_transformers(ending: bool, theirs: Any) -> None:
    for name, template in FEATURES.items():
        wanted = theirs.apply_chat_template(
            CHAT, tools=[TOOL], chat_template=template, tokenize=False, add_generation_prompt=ending, **ARGUMENTS
        )
        found = ChatTemplate(template, TOKENS).render(CHAT, [TOOL], ARGUMENTS, add_generation_prompt=ending)
        assert found == wanted, name


@in_one_test("template", REFUSED.values(), ids=REFUSED)
def test_what_transformers_refuses_is_refused_with_its_words(template: str, theirs: Any) -> None:
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        theirs.apply_chat_template(CHAT, chat_template=template, tokenize=False)
    with pytest.raises(Exception) as found:  # noqa: PT011
        ChatTemplate(template, TOKENS).render(CHAT)
    assert (type(found.value), str(found.value)) == (type(wanted.value), str(wanted.value))
    refusal = render_error(found.value)
    assert isinstance(refusal, GenerationFailed if "{% if %}" in template or "nothing" in template else InvalidPayload)
    assert "/" not in refusal.message, "no path of a build machine"


def test_an_error_names_the_line_of_the_template() -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        ChatTemplate("a\n{{ raise_exception('no') }}", {}).render(CHAT)
    assert render_error(raised.value).message.endswith("refuses them: no (line 2 of the template)")


@in_one_test(
    ("template", "shows"),
    [
        (ALL + "{{ m.content }}{% endfor %}", True),
        (ALL + "{{ m.content[0].text }}{% endfor %}", True),
        (ALL + "{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", False),
        (ALL + "{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}", False),
    ],
)
def test_templates_without_a_system_role_are_known(template: str, shows: bool) -> None:
    assert shows_system(ChatTemplate(template, {}).render) is shows


def says(*contents: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in contents]


PART = [{"type": "text", "text": "a"}]


@in_one_test(
    ("messages", "wanted"),
    [
        (says(("system", "s"), ("user", "u")), says(("user", "s\nu"))),
        (says(("system", "s"), ("system", "t"), ("user", "u")), says(("user", "s\nt\nu"))),
        (says(("system", "s"), ("user", PART)), says(("user", [{"type": "text", "text": "s"}, *PART]))),
        (says(("system", PART), ("user", "u")), says(("user", "a\nu"))),
        (says(("system", "s"), ("assistant", "a")), says(("user", "s"), ("assistant", "a"))),
        (says(("user", "u"), ("system", "s")), says(("user", "u"), ("user", "s"))),
        (says(("user", "u"), ("assistant", "a")), says(("user", "u"), ("assistant", "a"))),
    ],
)
def test_the_text_of_a_system_message_is_not_lost(messages: Any, wanted: Any) -> None:
    assert without_system(messages) == wanted
