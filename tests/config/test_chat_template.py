"""`data.chat_template`: a template, or a file with one; what cannot be one is refused."""

import pytest
from data_cases import char_tokenizer

from hotseat.checks.pipeline import TOKENIZERS, startup_problems
from hotseat.checks.stage import TokenizerContext, run_checks
from hotseat.config import loads
from hotseat.config.chat_template import chat_template_problem, chat_template_text, variables_problem
from hotseat.errors import UserError

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
MARKED = "{% for m in messages %}{%- generation -%}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"


def test_a_file_stands_for_its_text(tmp_path):
    (tmp_path / "tmpl.jinja").write_text(TEMPLATE)
    assert chat_template_text(str(tmp_path / "tmpl.jinja")) == TEMPLATE
    assert chat_template_text(TEMPLATE) == TEMPLATE
    assert chat_template_text(None) is None


@pytest.mark.parametrize("template", [TEMPLATE, MARKED, "{{ messages[0]['content'] }}"])
def test_templates_that_use_the_messages(template, tmp_path):
    assert chat_template_problem(template) is None
    (tmp_path / "file").write_text(template)
    assert chat_template_problem(str(tmp_path / "file")) is None


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("tmpl.jinja", "'tmpl.jinja' is no template, which would contain {{ or {%, and cannot be read as a file"),
        (".", "Is a directory"),
        ("~no-user-of-this-name/tmpl.jinja", "Could not determine home directory"),
        ("tmpl\0.jinja", "embedded null byte"),
        ("Give a short answer. " * 500, "Give a short ans...' is no template"),
        ("Question: {{ prompt }}", "the template ignores the messages"),
        ("{{ 'messages' }}", "the template ignores the messages"),
        ("{% for m in messages %}\n{{ m }", "no Jinja template: unexpected '}' at line 2"),
    ],
)
def test_what_is_no_template_is_refused(template, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert problem in chat_template_problem(template)


def test_a_run_is_refused_before_anything_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = loads("{}", ["data.apply_chat_template=true", "data.chat_template=tmpl.jinja"])
    assert "data.chat_template" in [problem.key for problem in startup_problems(config)]
    (tmp_path / "tmpl.jinja").write_text(TEMPLATE)
    assert "data.chat_template" not in [problem.key for problem in startup_problems(config)]


THINKING = (
    "{% set style = style | default('') %}{{ messages }}{% if enable_thinking is defined and not enable_thinking %}"
)
THINKING += "{{ style }}{% endif %}"


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["enable_thinking", "style"], None),
        (
            ["enable_thinkin"],
            "no variable enable_thinkin; did you mean enable_thinking? it has: enable_thinking, style",
        ),
        (["effort"], "the chat template has no variable effort; it has: enable_thinking, style"),
        (["messages"], "messages is set by what renders the template: leave it out"),
        (["add_generation_prompt"], "add_generation_prompt is set by what renders the template"),
    ],
)
def test_variables_that_a_template_does_not_have_are_refused(names, problem):
    found = variables_problem(THINKING, names)
    assert found is None if problem is None else problem in found


def test_variables_are_checked_against_the_template_of_the_run():
    keys = ["data.apply_chat_template=true", "data.chat_template_kwargs.effort=low"]
    own = loads("{}", [*keys, f"data.chat_template={THINKING!r}"])
    assert "data.chat_template_kwargs" in [problem.key for problem in startup_problems(own)]
    of_tokenizer = loads("{}", keys)
    assert "data.chat_template_kwargs" not in [problem.key for problem in startup_problems(of_tokenizer)]
    with pytest.raises(UserError, match="no variable effort; it has: enable_thinking, style"):
        check_variables(of_tokenizer, THINKING)
    check_variables(of_tokenizer, THINKING + "{{ effort }}")
    check_variables(own, TEMPLATE)  # not the one that is rendered


def check_variables(config, template):
    run_checks(TokenizerContext(config=config, tokenizer=char_tokenizer(template)), TOKENIZERS)
