"""Tests of --help and --mode=config: they show every flag, and every field with its value and a comment."""

import re
import shlex

import pytest

from experiments import command, pages, usage


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.chdir(pages.ROOT)


def settings(printed):
    """Return the settings of a listing as words of a command line, and the comment of each."""
    lines = [shlex.split(line.strip().partition("  ")[0]) for line in printed.splitlines()]
    return [word for (word,) in lines], [line.strip().partition("  ")[2].strip() for line in printed.splitlines()]


@pytest.mark.parametrize("page", [*pages.names(), "configs/vit_24.py:cifar10", "configs/vit_24.py:folder"])
def test_the_settings_that_are_printed_give_the_config_again(page):
    """A page of the same fields with other values, changed by the printed words, is the page."""
    config = command.read(["launch.py", f"--config={page}"]).config
    words, comments = settings(usage.listing(config))
    assert all(comments)
    changed = command.read(["launch.py", f"--config={page}", *words]).config
    assert changed.to_dict() == config.to_dict()
    assert len(words) == len(usage.flat(config.to_dict()))
    blank = command.read(["launch.py", f"--config={page}", "--config.seed=7", "--config.batch=3", "--config.clip=2.0"])
    assert blank.config.to_dict() != config.to_dict()
    again = command.read(["launch.py", f"--config={page}", "--config.seed=7", "--config.batch=3", *words]).config
    assert again.to_dict() == config.to_dict()


def test_help_has_every_flag_and_the_fields_of_the_page(capsys):
    command.main(["launch.py", "--help", "--config=configs/gpt_24.py"], "The usage.")
    said = capsys.readouterr().out
    assert said.startswith("The usage.\n\nflags:\n")
    for flag in command._flags():
        if flag not in ("?", "help", "helpshort", "helpfull", "helpxml"):
            assert re.search(rf"^  --{flag}\b", said, re.MULTILINE), flag
    assert "fields of configs/gpt_24.py" in said
    assert re.search(r"^  --config.data.tokenizer=bytes +bytes, or a JSON file", said, re.MULTILINE)
    assert all(page in said for page in pages.names())


def test_the_mode_config_prints_the_settings_with_the_changes(capsys):
    command.main(["launch.py", "--config=configs/vit_24.py", "--config.batch=64", "--mode=config"], "")
    words, _ = settings(capsys.readouterr().out)
    assert "--config.batch=64" in words


def test_every_flag_is_on_the_page_of_commands():
    text = (pages.ROOT / "docs" / "reference" / "commands.md").read_text()
    for flag in usage.FLAGS:
        assert f"`--{flag}" in text, flag
