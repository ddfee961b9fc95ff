"""Tests of --help and --mode=config: they show every flag, and every field with its value and a comment."""

import ast
import re
import shlex

import pytest

from experiments import command, config_files, usage


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.chdir(config_files.ROOT)


def settings(printed):
    """Return the settings of a listing as words of a command line, and the comment of each."""
    lines = [shlex.split(line.strip().partition("  ")[0]) for line in printed.splitlines()]
    return [word for (word,) in lines], [line.strip().partition("  ")[2].strip() for line in printed.splitlines()]


VARIANTS = [
    "configs/vit_24.py:cifar10",
    "configs/vit_24.py:folder",
    "configs/vit_24.py:smoke",
    "configs/gpt_24.py:smoke",
]


@pytest.mark.parametrize("config_file", [*config_files.names(), *VARIANTS])
def test_the_settings_that_are_printed_give_the_config_again(config_file):
    """A config of the same fields with other values, changed by the printed words, is the same config."""
    config = command.read(["launch.py", f"--config={config_file}"]).config
    words, comments = settings(usage.listing(config))
    assert all(comments)
    assert not any("an argument of" in comment for comment in comments)  # that is for models of others
    changed = command.read(["launch.py", f"--config={config_file}", *words]).config
    assert changed.to_dict() == config.to_dict()
    assert len(words) == len(usage.flat(config.to_dict()))
    blank = command.read(
        ["launch.py", f"--config={config_file}", "--config.seed=7", "--config.batch=3", "--config.clip=2.0"]
    )
    assert blank.config.to_dict() != config.to_dict()
    again = command.read(["launch.py", f"--config={config_file}", "--config.seed=7", "--config.batch=3", *words]).config
    assert again.to_dict() == config.to_dict()


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("config_file", ["", "configs/gpt_24.py"])
def test_help_has_every_flag_and_fits_the_terminal(config_file, width, capsys, monkeypatch):
    """And the fields of the config file, or the config files if none is given."""
    monkeypatch.setenv("COLUMNS", f"{width}")
    command.main(["launch.py", "--help", *[f"--config={config_file}"][: bool(config_file)]], "The usage.")
    said = capsys.readouterr().out
    assert said.startswith("The usage.\n\nsettings:\n")
    for flag in command._flags():
        if flag not in ("?", "help", "helpshort", "helpfull", "helpxml"):
            assert re.search(rf"^  --{flag}\b", said, re.MULTILINE), flag
    assert all(re.search(f"^  {name}( |$)", said, re.MULTILINE) for name in config_files.names()) == (not config_file)
    assert ("--config.data.tokenizer=bytes\n" in said) == bool(config_file)
    lines = said.splitlines()
    assert all(len(line) <= max(width, 60) or len(line.split("=", 1)[-1].split()) == 1 or "'" in line for line in lines)
    assert max(map(len, lines)) > 0.8 * min(width, 150)


def test_what_launch_prints_without_arguments_fits_a_page():
    text = ast.get_docstring(ast.parse((config_files.ROOT / "launch.py").read_text()))
    assert all(len(line) < 80 for line in text.splitlines())
    files = re.findall(r"configs/\w+\.py", text)
    assert len(files) >= 3
    assert set(files) <= set(config_files.names())
    for field in re.findall(r"--config\.([\w.]+)=", text):
        assert field == "FIELD" or field in usage.flat(config_files.load("configs/vit_24.py").to_dict())


def test_help_says_what_arguments_of_models_mean():
    """The meanings are those of the documentation of the model's class. Models of others have none here."""
    config = command.read(["launch.py", "--config=configs/vit_24.py:smoke"]).config
    said = usage.listing(config)
    assert re.search("--config.model.patch=2 +the height and width of a patch, which must divide image\n", said)
    assert re.search('--config.model.pool=mean +"cls" to classify by a token of its own; "mean" by the mean of', said)
    assert re.search("--config.model.remat=False +True to compute blocks again in the backward pass, to save", said)
    assert re.search("--config.model.depth=1 +the number of blocks\n", said)
    config.model.name = "mylab.models:Mixer"
    assert re.search("--config.model.patch=2 +an argument of the model's class\n", usage.listing(config))


def test_help_says_what_fields_mean_for_the_objective():
    """A language model reads a text. A classifier reads examples."""
    said = usage.listing(config_files.load("configs/finetune_24.py:language"))
    assert re.search("--config.data.length=128 +tokens in a window\n", said)
    assert re.search("--config.data.windows=0 +windows of a text that are evaluated; 0: all", said)
    said = usage.listing(config_files.load("configs/finetune_24.py"))
    assert re.search(r"--config.data.length=\d+ +tokens to which longer texts are cut\n", said)
    assert re.search("--config.model.name='' +module:name of a head that takes", said)


def test_the_mode_config_prints_the_settings_with_the_changes(capsys):
    command.main(["launch.py", "--config=configs/vit_24.py", "--config.batch=64", "--mode=config"], "")
    words, _ = settings(capsys.readouterr().out)
    assert "--config.batch=64" in words


def test_every_flag_is_on_the_page_of_commands():
    text = (config_files.ROOT / "docs" / "reference" / "commands.md").read_text()
    for flag in usage.FLAGS:
        assert f"`--{flag}" in text, flag
