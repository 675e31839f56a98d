"""Chat templates: rendered as transformers renders them, bounded, and with errors that carry the template's words."""

from collections.abc import Mapping
from typing import Any

import pytest

from edge_transformer.errors import TextError
from edge_transformer.text import chat_template, jinja_sandbox
from edge_transformer.text.chat_template import ChatTemplate, missing_chat_template
from edge_transformer.text.chat_template_files import huggingface_chat_template
from edge_transformer.text.huggingface_tokenizer import huggingface_tokenizer
from text.tokenizer_files import real_tokenizer

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
TURNS: list[dict[str, object]] = [
    {"role": "system", "content": "Be brief.  "},
    {"role": "user", "content": "  1 < 2 & \"é\" 'x' 😀\n"},
    {"role": "assistant", "content": "Yes.\n\n", "tool_calls": None, "reasoning": "compare"},
    {"role": "user", "content": [{"type": "text", "text": "And\tthis?"}], "name": "Ann"},
]
TOOLS: list[dict[str, object]] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "required": ["a", "b"]}}}
]
TEMPLATES = {
    "plain": "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "white space of blocks": """
    {%- for m in messages %}
        {% if m.role == 'user' %}
    U: {{ m.content }}
        {% else %}
    O: {{ m.content | trim }}

        {% endif %}
    {% endfor %}
    {% generation %}
      A {{ messages | length }}
    {% endgeneration %}
end
""",
    "json": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|"
    "{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true) }}",
    "loop controls": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}"
    "{% if loop.last %}{% break %}{% endif %}{{ m.role }},{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, seen=false) %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{% if m.role == 'system' %}{% set ns.seen = true %}{% endif %}{% endfor %}"
    "{{ ns.n }}{{ ns.seen }}",
    "undefined": "[{{ unk_token }}][{{ nothing }}]{% if tools is defined and tools %}T{% endif %}"
    "{% if messages[2].tool_calls is defined %}C{% endif %}{{ tools }}{{ documents }}{{ enable_thinking is defined }}",
    "reasoning": "{% for m in messages %}{{ m.thinking }}/{{ m.reasoning_content }}/{{ m.keys() | list }};{% endfor %}",
    "types": "{% for m in messages %}{% if m.content is string %}s{% elif m.content is sequence %}l{% endif %}"
    "{{ m.content is mapping }}{{ m.get('name', 'nobody') }}{% endfor %}",
    "strings": "{{ messages[1].content.strip().split('&')[0] }}{{ 'a' ~ 1 ~ none }}{{ 'x' * 3 }}{{ 2 ** 8 }}"
    "{{ '%s-%03d' | format('q', 7) }}{{ messages[0].content.startswith('Be') }}{{ 'ab'[::-1] }}",
    "dictionaries": "{% set d = dict(a=1, **{'b': 2}) %}{{ d }}{{ d.items() | list }}"
    "{% for k, v in d | dictsort %}{{ k }}{{ v }}{% endfor %}",
    "macro": "{% macro turn(m) -%}\n  [{{ m.role }}]\n{%- endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson }}\n"
    "{{ t.function.parameters.required | join(',') }}{% endfor %}{% endif %}"
    "{{ documents[0].title if documents }}",
    "carriage returns": "a\r\n{% if true %}\r\nb\r\n{% endif %}\r\nc\r\n",
}


def render(source: str, messages: list[dict[str, object]] | None = None, **options: Any) -> str:
    return ChatTemplate({"default": source}, NAMED).render(TURNS if messages is None else messages, **options)


@pytest.mark.golden
@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_equals_transformers(name: str, add_generation_prompt: bool) -> None:
    source = TEMPLATES[name]
    for options in ({}, {"tools": TOOLS, "documents": [{"title": "T", "text": "x"}]}):
        reference = reference_rendering(source, TURNS, add_generation_prompt=add_generation_prompt, **options)
        assert render(source, add_generation_prompt=add_generation_prompt, **options) == reference


def reference_rendering(source: str, messages: list[dict[str, object]], **options: Any) -> str:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=source, **NAMED)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert isinstance(rendered, str)
    return rendered


@pytest.mark.golden
@pytest.mark.real_model
@pytest.mark.parametrize("name", ["qwen3", "llama3", "gpt_oss", "gemma3"])
def test_real_templates_equal_transformers(name: str) -> None:
    from transformers import AutoTokenizer

    folder = real_tokenizer(name)
    template = huggingface_chat_template(folder, huggingface_tokenizer(folder).named_tokens)
    if template is None:
        pytest.skip(f"{name} has no chat template")
    reference = AutoTokenizer.from_pretrained(folder)
    conversations: list[list[dict[str, object]]] = [
        [{"role": "user", "content": "Hi"}],
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes? "},
            {"role": "user", "content": "1 < 2"},
        ],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好 😀\n"}],
    ]
    for messages in conversations:
        for add_generation_prompt in (False, True):
            expected = reference.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
            assert template.render(messages, add_generation_prompt=add_generation_prompt) == expected
        tokenizer = huggingface_tokenizer(folder)
        ids = reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert tokenizer.encode(template.render(messages), add_bos=False) == ids


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", "<s><system>Be brief.  </s><user>hi</s><assistant>"),
        (
            "json",
            '[{"role": "system", "content": "Be brief.  "}, {"role": "user", "content": "hi"}]|{\n  "role": "system",'
            '\n  "content": "Be brief.  "\n}|{"a": "<é>", "b": 1}',
        ),
        ("loop controls", "system,"),
        ("namespace", "2True"),
        ("carriage returns", "a\nb\nc"),
    ],
)
def test_by_hand(name: str, expected: str) -> None:
    assert render(TEMPLATES[name], [TURNS[0], {"role": "user", "content": "hi"}]) == expected


def test_the_template_decides_what_it_refuses() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}ok"
    assert render(source, TURNS[1:]) == "ok"
    with pytest.raises(TextError, match="refuses this conversation: System role not supported"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__class__=1) }}",
        "{% for i in range(100000000) %}{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ strftime_now(1) }}",
        "{% include 'other' %}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 1000000000) }}",
        "{{ 'a'.center(1000000000) }}",
        "{{ 'a'.zfill(1000000000) }}",
        "{% set n = namespace(s='a') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='a') %}{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}",
    ],
)
def test_faults_inside_a_template(source: str) -> None:
    with pytest.raises(TextError, match=r"refuses this conversation: \S"):
        render(source)


def test_a_template_that_is_no_jinja() -> None:
    with pytest.raises(TextError, match="not valid Jinja in line 2"):
        render("a\n{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 5 }}{% endfor %}",
        "{% for i in range(9) %}" * 15 + "{% endfor %}" * 15,
    ],
)
def test_a_template_without_end_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja_sandbox, "RENDER_SECONDS", 0.2)
    with pytest.raises(TextError, match="takes too long"):
        render(source)


def test_a_template_nested_deeper_than_python_compiles_is_refused() -> None:
    with pytest.raises(TextError, match="not valid Jinja"):
        render("{% for i in messages %}" * 30 + "x" + "{% endfor %}" * 30)


def test_operators_and_formats_of_usual_size_work_as_in_jinja() -> None:
    assert render("{{ 1 ~ 'a' ~ none ~ [2] ~ 1.5 }}") == "1aNone[2]1.5"
    assert render("{{ [1] + [2] }}{{ 'a' + 'b' }}{{ 1 + 2.5 }}{{ 7 % 4 }}{{ 'x' * 3 }}") == "[1, 2]ab3.53xxx"
    assert render("{{ '%05d|%s' % (7, 'y') }}{{ '{:>4}|{n}'.format('z', n=1) }}{{ 'a'.center(5) }}") == (
        "00007|y   z|1  a  "
    )


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TextError, match="more than the 1048576 accepted"):
        render("x" * (chat_template.MAX_TEMPLATE_CHARS + 1))
    monkeypatch.setattr(chat_template, "MAX_OUTPUT_CHARS", 1000)
    assert len(render("{% for i in range(1000) %}x{% endfor %}")) == 1000
    with pytest.raises(TextError, match="writes more than 1000 characters"):
        render("{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}")


def test_the_data_is_copied_and_plain() -> None:
    class Text(str):
        secret = "s"

    messages: list[Mapping[str, object]] = [{"role": Text("user"), "content": Text("x"), "n": 1, "t": (1, [None])}]
    assert render("{{ messages[0].content.secret }}{{ messages[0].t }}", messages) == "(1, [None])"
    with pytest.raises(TextError, match="got bytes"):
        render("", [{"role": "user", "content": b"x"}])
    with pytest.raises(TextError, match="must be mappings, got str"):
        render("", ["hello"])  # type: ignore[list-item]
    with pytest.raises(TextError, match="at least one message"):
        render("", [])


def test_named_templates() -> None:
    one = ChatTemplate({"default": "d", "tool_use": "t", "rag": "r"}, NAMED)
    assert one.render(TURNS) == "d"
    assert one.render(TURNS, tools=TOOLS) == "t"
    assert ChatTemplate({"only": "o"}, NAMED).render(TURNS) == "o"
    with pytest.raises(TextError, match=r"named \['a', 'b'\], none of them 'default'"):
        ChatTemplate({"a": "1", "b": "2"}, NAMED).render(TURNS)


def test_variables_reach_the_template() -> None:
    assert (
        render("{{ enable_thinking }}{{ bos_token }}", variables={"enable_thinking": False, "bos_token": "!"})
        == "False!"
    )


def test_nothing_is_compiled_before_the_first_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    original = jinja_sandbox.compile_template
    monkeypatch.setattr(jinja_sandbox, "compile_template", lambda source: compiled.append(source) or original(source))
    template = ChatTemplate({"default": "x"}, {})
    assert compiled == []
    template.render(TURNS)
    template.render(TURNS)
    assert compiled == ["x"]
    ready = ChatTemplate({"default": "y", "tool_use": "z"}, {})
    ready.prepare()
    assert compiled == ["x", "y"]
    assert ready.render(TURNS) == "y"
    assert compiled == ["x", "y"]
    ChatTemplate({"default": "{% if"}, {}).prepare()


def test_without_a_template_raw_text_is_offered() -> None:
    error = missing_chat_template("gemma-3-270m")
    assert isinstance(error, TextError)
    assert "gemma-3-270m has no chat template" in str(error)
    assert "--raw" in str(error)
