"""Chat templates: the foreign renderings, the real model's ids, hostile templates under a memory limit, forged markers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from literate_engine.chat import ChatTemplate, TemplateError

FIXTURE = json.loads((Path(__file__).parents[1] / "data/fixtures/chat/chat_templates.json").read_text("utf-8"))
SYNTHETIC = FIXTURE["synthetic_template_cases"]


def name(case):
    return f"{case['name']}-{case.get('conversation', '')}-{'gen' if case['add_generation_prompt'] else 'plain'}"


@pytest.mark.parametrize("case", FIXTURE["cases"] + SYNTHETIC, ids=name)
def test_rendered_as_transformers_does(case):
    template = ChatTemplate(case.get("template", FIXTURE["chat_template"]), case.get("bos_token", ""), case.get("eos_token", ""))

    def render():
        return template.render(case["messages"], tools=case.get("tools"), add_generation_prompt=case["add_generation_prompt"])

    if case.get("error"):
        with pytest.raises(TemplateError):
            render()
    else:
        assert render() == case["rendered"]


@pytest.fixture(scope="module")
def model(smollm2):
    from literate_engine.gguf import GGUFFile
    from literate_engine.tokenizer import Tokenizer

    with GGUFFile(smollm2) as g:
        tokenizer = Tokenizer.from_gguf(g)
        return tokenizer, ChatTemplate.from_gguf(g, tokenizer)


@pytest.mark.parametrize("case", FIXTURE["cases"], ids=name)
def test_ids_of_the_real_model(case, model):
    tokenizer, template = model
    assert template.encode(tokenizer, case["messages"], add_generation_prompt=case["add_generation_prompt"]) == case["ids"]


def test_every_control_token_of_the_real_model_stays_text_in_a_message(model):
    tokenizer, template = model
    for marker in [t for t, i in tokenizer.special_tokens.items() if tokenizer.is_special(i)]:
        ids = template.encode(tokenizer, [{"role": "user", "content": f"a{marker}b {marker}"}])
        want = template.encode(tokenizer, [{"role": "user", "content": "x"}])
        assert [i for i in ids if tokenizer.is_special(i)] == [i for i in want if tokenizer.is_special(i)], marker
        assert f"a{marker}b {marker}" in tokenizer.decode(ids)


@pytest.mark.parametrize(
    "source, content",
    [
        ("{{ messages[0].content | trim }}", "  <|im_end|> "),
        ("{{ messages[0].content[1:-1] }}", "x<|im_end|>x"),
        ("{{ messages[0].content | lower }}", "<|IM_END|>"),
        ("{{ messages[0].content | replace('x', '') }}", "<|im_xend|>"),
        ("{{ messages | tojson }}", "<|im_end|>"),
        ("{{ messages[0].content | upper | lower }}", "<|im_end|>"),
    ],
)
def test_no_treatment_forges_a_marker(source, content, model):
    tokenizer, _ = model
    ids = ChatTemplate(source).encode(tokenizer, [{"role": "user", "content": content}])
    assert ids and not any(tokenizer.is_special(i) for i in ids)


def test_tools_and_names_stay_text(model):
    tokenizer, _ = model
    tools = [{"type": "function", "function": {"name": "<|im_start|>", "description": "<|im_end|>", "parameters": {"<|endoftext|>": {}}}}]
    ids = ChatTemplate("{{ tools | tojson }}{{ messages[0].name }}").encode(tokenizer, [{"role": "user", "name": "<|im_end|>", "content": ""}], tools=tools)
    assert not any(tokenizer.is_special(i) for i in ids)
    assert tokenizer.decode(ids) == json.dumps(tools, ensure_ascii=False) + "<|im_end|>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.split('<|im_start|>')[1] }}",
        "{{ messages[0].content.partition('<|im_start|>')[2] }}",
        "{% if '<|im_start|>' in messages[0].content %}{{ messages[0].content[13:] }}{% endif %}",
        "{{ messages[0].content.removeprefix('a<|im_start|>') }}",
        "{{ messages[0].content | replace('a<|im_start|>', '') }}",
        "{% if messages[0].content == 'a<|im_start|>b<' and bos_token == '<|im_start|>' %}b<{% endif %}",
        "{% set x = '<|im_start|>' %}{% if x == '<|im_start|>' and x != messages[0].content %}b<{% endif %}",
    ],
)
def test_a_template_finds_its_markers_in_a_message(source, model):
    tokenizer, _ = model
    assert tokenizer.decode(ChatTemplate(source, "<|im_start|>").encode(tokenizer, [{"role": "user", "content": "a<|im_start|>b<"}])) == "b<"


def test_text_parts_equal_their_joined_text():
    template = ChatTemplate(FIXTURE["chat_template"])
    parts = [{"type": "text", "text": "Sure, "}, {"type": "text", "text": "the"}]
    assert template.render([{"role": "assistant", "content": parts}]) == template.render([{"role": "assistant", "content": "Sure, the"}])
    with pytest.raises(TemplateError, match="input_audio"):
        template.render([{"role": "user", "content": [{"type": "input_audio"}]}])


def test_a_template_may_refuse_the_messages():
    template = ChatTemplate("{{ raise_exception('Conversation roles must alternate') }}")
    with pytest.raises(TemplateError, match="Conversation roles must alternate"):
        template.render([])


HOSTILE = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = [n.x, n.x] | join %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    "{{ 'a' * 10 ** 11 }}",
    "{{ [1] * 10 ** 11 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ 'a'.zfill(10 ** 10) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10 ** 10) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (10 ** 10, 1) }}",
    "{{ '%9999999999d' | format(1) }}",
    "{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 6) }}",
    "{{ (5).to_bytes(10 ** 10) }}",
    "{{ 'a'.translate({97: 'x' * 10 ** 6}) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ " + "(" * 50000 + "1" + ")" * 50000 + " }}",
    "{{ [" * 2000,
]


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
def test_hostile_templates_cost_little():
    code = (
        "import json, resource, sys, time; from literate_engine.chat import ChatTemplate, TemplateError\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))\n"
        "for s in json.load(sys.stdin):\n"
        "    t = time.process_time()\n"
        "    try: out = 'rendered ' + ChatTemplate(s).render([])[:20]\n"
        "    except TemplateError as e: out = 'refused'\n"
        "    print(json.dumps([out, time.process_time() - t]))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], input=json.dumps(HOSTILE), capture_output=True, text=True, timeout=120)
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(results) == len(HOSTILE), run.stderr[-500:]
    assert [(s[:60], r[0]) for s, r in zip(HOSTILE, results) if r[0] != "refused"] == []
    assert max(r[1] for r in results) < 10


QWEN_LIKE = r"""
{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}{{- "\n</tools><|im_end|>\n" }}{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>')
           and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""


class Characters:
    "A character is its own id; control tokens come after all characters."

    def __init__(self, *control):
        self.special_tokens = {t: 0x110000 + i for i, t in enumerate(control)}
        self.text, self.add_bos, self.bos_id = {i: t for t, i in self.special_tokens.items()}, False, None

    def is_special(self, id):
        return id >= 0x110000

    def encode_parts(self, parts):
        return [i for p in parts for i in ([p] if isinstance(p, int) else map(ord, p))]

    def decode(self, ids):
        return "".join(self.text.get(i) or chr(i) for i in ids)


def test_hiding_markers_changes_no_text():
    import random

    rng, template = random.Random(0), ChatTemplate(QWEN_LIKE)
    tokenizer = Characters("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_response>", "</tool_response>", "[INST]", "PAD")
    pieces = [
        "<think>",
        "</think>",
        "<tool_response>",
        "</tool_response>",
        "<|im_end|>",
        "<",
        ">",
        "[INST]",
        "[",
        "PAD",
        "PA",
        "\n",
        " text",
        "\ufdd0",
        "\U000f0000",
        '"',
    ]
    for _ in range(300):
        messages = [
            {"role": rng.choice(["user", "assistant", "system"]), "content": "".join(rng.choices(pieces, k=rng.randrange(8)))} for _ in range(rng.randrange(5))
        ]
        tools = [{"name": "".join(rng.choices(pieces, k=3)), "<|im_end|>": 1}] if rng.random() < 0.3 else None
        thinking = {"enable_thinking": False} if rng.random() < 0.3 else {}
        assert tokenizer.decode(template.encode(tokenizer, messages, tools, **thinking)) == template.render(messages, tools, **thinking)
