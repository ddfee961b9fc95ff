"""The command line: what is read, and what is refused, in one line each."""

import subprocess
import sys

import pytest

from experiments import command, config_files
from experiments.errors import Mistake

CONFIG_FILE = "configs/vit_24.py"


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.chdir(config_files.ROOT)


def test_a_config_file_and_changes_to_it():
    words = [
        f"--config={CONFIG_FILE}",
        "--config.batch=64",
        "--config.sparsity.blocks=sdgp(2,4)",
        "--workdir=/x",
        "--mode=plan",
    ]
    config, name, workdir, mode = (
        getattr(command.read(["launch.py", *words]), n) for n in ("config", "name", "workdir", "mode")
    )
    assert (config.batch, config.sparsity.blocks, name, workdir, mode) == (64, "sdgp(2,4)", "vit_24", "/x", "plan")
    assert config.data.name == "digits"


def test_values_may_be_words_of_their_own_and_rules_tuples():
    rules = "((r'.*/mlp/.*', 'blocks'), (r'.*', 'dense'))"
    words = ["--config", f"{CONFIG_FILE}:cifar10", "--config.batch", "32", f"--config.rules={rules}"]
    asked = command.read(["launch.py", *words])
    config, name, mode = asked.config, asked.name, asked.mode
    assert (config.batch, config.data.name, name, mode) == (32, "cifar10", "vit_24_cifar10", "train")
    assert config.rules == ((".*/mlp/.*", "blocks"), (".*", "dense"))


def test_flags_with_one_dash_and_values_after_a_space():
    words = [
        f"-config={CONFIG_FILE}",
        "-config.batch=64",
        "--mode",
        "plan",
        "-workdir",
        "/x",
        "--note",
        "-config=other",
        "--sweep",
    ]
    asked = command.read(["launch.py", *words])
    assert (asked.config.batch, asked.mode, asked.workdir, asked.sweep) == (64, "plan", "/x", True)
    assert asked.labels == {"note": "-config=other"}
    with pytest.raises(Mistake, match="config has no field 'stesp'. Did you mean config.steps"):
        command.read(["launch.py", f"-config={CONFIG_FILE}", "-config.stesp=5"])
    with pytest.raises(Mistake, match="--workdir=nowhere holds no run"):
        command.read(["launch.py", "--mode", "eval", "--workdir", "nowhere"])


def test_a_method_may_get_a_new_name():
    rules = "--config.rules=((r'.*/mlp/.*', 'mlp'), (r'.*', 'dense'))"
    config = command.read(["launch.py", f"--config={CONFIG_FILE}", "--config.sparsity.mlp=s_ste(2,4)", rules]).config
    assert config.sparsity.mlp == "s_ste(2,4)"
    with pytest.raises(
        Mistake, match=r"sparsity.mlp: no rule uses 'mlp'. Also write --config.rules=.* one of blocks\."
    ):
        command.read(["launch.py", f"--config={CONFIG_FILE}", "--config.sparsity.mlp=s_ste(2,4)"])


def test_tags_and_a_note():
    given = lambda *words: command.read(["launch.py", f"--config={CONFIG_FILE}", *words]).labels
    assert given() == {}
    assert given("--tag=a,b", "--tag=c", "--note=") == {"tags": ["a", "b", "c"], "note": ""}
    assert given("--note=two words, and a comma") == {"note": "two words, and a comma"}
    plain, tagged = (
        command.read(["launch.py", f"--config={CONFIG_FILE}", *words]).config for words in ([], ["--tag=a"])
    )
    assert plain == tagged


def test_one_reading_does_not_change_the_next():
    changed = command.read(["launch.py", f"--config={CONFIG_FILE}", "--config.batch=7"]).config
    assert changed.batch == 7 != command.read(["launch.py", f"--config={CONFIG_FILE}"]).config.batch


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], r"--config=FILE is missing: one of .*configs/vit_24.py"),
        (["--config=configs/vit24.py"], r"no file configs/vit24.py. Did you mean configs/vit_24.py\?"),
        ([f"--config={CONFIG_FILE}:cifar"], r"vit_24.py, line \d+: ValueError: there is no variant 'cifar'"),
        ([f"--config={CONFIG_FILE}", "--config.bach=3"], r"no field 'bach'. Did you mean config.batch\?"),
        ([f"--config={CONFIG_FILE}", "--config.data.nmae=x"], r"no field 'nmae'. Did you mean config.data.name\?"),
        ([f"--config={CONFIG_FILE}", "--config.batch.size=3"], r"config.batch is \d+, and has no fields"),
        (
            [f"--config={CONFIG_FILE}", "--config.learning_rate=3"],
            r"config.learning_rate is a group of fields. Set one of them: .*--config.learning_rate.peak",
        ),
        (["--mode=eval", "--workdir=/no/such"], "--workdir=/no/such holds no run: there is no such directory"),
        (["--mode=eval", "--workdir=configs"], "--workdir=configs holds no run: it has no config.json"),
        ([f"--config={CONFIG_FILE}", "--config.batch=1.5"], "--config.batch=1.5: '1.5' is not a whole number"),
        ([f"--config={CONFIG_FILE}", "--config.learning_rate.peak=fast"], "'fast' is not a number"),
        ([f"--config={CONFIG_FILE}", "--config.model.scan=maybe"], "'maybe' is neither true nor false"),
        ([f"--config={CONFIG_FILE}", "--mode=trian"], "--mode=trian: value should be one of"),
        ([f"--config={CONFIG_FILE}", "--wrokdir=x"], r"there is no flag --wrokdir. Did you mean --workdir\?"),
        (["--confg=configs/vit_24.py"], r"there is no flag --confg. Did you mean --config\?"),
        ([f"--config={CONFIG_FILE}", "--steps=10"], r"there is no flag --steps. Did you mean --config.steps\?"),
        ([f"--config={CONFIG_FILE}", "--learning_rate.peak=1"], r"Did you mean --config.learning_rate.peak\?"),
        (["--steps=10"], r"there is no flag --steps. Did you mean --config.steps\?"),
        (
            [f"--config={CONFIG_FILE}", "--learning-rate=1"],
            r"Did you mean --config.learning_rate.FIELD\? FIELD is one of .*peak",
        ),
        ([f"--config={CONFIG_FILE}", "--peak=1"], r"Did you mean --config.learning_rate.peak\?"),
        ([f"--config={CONFIG_FILE}", "--data=2"], r"Did you mean --config.data.FIELD\? FIELD is one of .*name"),
        ([f"--config={CONFIG_FILE}", "--config_seed=3"], r"there is no flag --config_seed."),
        ([f"--config={CONFIG_FILE}", "-wrokdir=x"], r"Did you mean --workdir\?"),
        ([f"--config={CONFIG_FILE}", "--notag=x"], "there is no flag --notag. Did you mean --"),
        ([f"--config={CONFIG_FILE}", "--zzz"], "there is no flag --zzz. --help lists all flags"),
        (["--mode=eval"], "--mode=eval needs --workdir=DIR"),
        (
            [f"--config={CONFIG_FILE}", "--config.learning_rate.peak=-1"],
            "config.learning_rate.peak=-1.0 must be a finite number, at least 0",
        ),
        (
            [f"--config={CONFIG_FILE}", "--config.optimizer=sgd(learning_rate=1)"],
            "set the rate with config.learning_rate.peak",
        ),
        (
            [f"--config={CONFIG_FILE}", "--config.data.name=folder", "--config.data.dir=/absent"],
            "'folder' needs settings that this config does not have. Use the variant of a config file: --config=",
        ),
        ([f"--config={CONFIG_FILE}", "train"], "'train' is not a flag"),
        ([f"--config={CONFIG_FILE}", "--mode=eval"], "--mode=eval needs --workdir"),
        (
            [f"--config={CONFIG_FILE}", "--mode=plan", "--tag=x"],
            "--tag and --note need a run that trains. With --mode=plan",
        ),
        (
            [f"--config={CONFIG_FILE}", "--config.experiment=imgae"],
            r"config.experiment='imgae' is not known. Did you mean 'image'\? Write one of finetune, image, text",
        ),
        ([f"--config={CONFIG_FILE}", "--config.seed=-1"], "config.seed=-1 is not from 0"),
        (["--config=README.md"], "a config file is a .py file"),
        ([f"--config={CONFIG_FILE}", "--config.data.crop=-1"], "config.data.crop=-1 is out of range"),
        (["--config=configs/gpt2_124m.py:cifar10"], "no variant 'cifar10'"),
        ([f"--config={CONFIG_FILE}", "--config.data.name=digist"], r"Did you mean digits\?"),
        (
            [f"--config={CONFIG_FILE}", "--config.data.name=cifar10", "--config.data.dir=/absent"],
            "/absent.*does not exist",
        ),
    ],
)
def test_mistakes_are_one_line_that_helps(words, said):
    with pytest.raises(Mistake, match=said) as caught:
        command.main(["launch.py", *words], "")
    assert "\n" not in str(caught.value)


SEEDS = "--seeds_at_once=.: write at least 1. A number above 1 needs --sweep, and cannot be combined"
TOGETHER = [  # flags that do not go together
    ("--sweep --mode=plan", "--sweep and --sweep_index train: leave out --from and --mode"),
    ("--sweep_index=99", r"--sweep_index=99: the sweep has \d+ runs, from 0 to"),
    ("--seeds_at_once=2", SEEDS),
    ("--sweep --seeds_at_once=0", SEEDS),
    ("--sweep_index=1 --seeds_at_once=2", SEEDS),
    ("--results=a.jsonl", "--results=a.jsonl needs a sweep that trains. Add --sweep or --sweep_index=N,"),
    ("--sweep_index=1 --mode=plan --results=a.jsonl", r"needs a sweep that trains\. .* leave out --mode=plan"),
    ("--sweep --results=nowhere/a.jsonl", "--results=nowhere/a.jsonl: there is no folder nowhere. Create it,"),
    ("--sweep --results=tests", "--results=tests is a folder. Write the name of a file, such as tests/all"),
    ("--sweep --results=results.jsonl", r"a sweep writes its own file of this name.* such as all\.jsonl\."),
    ("--sweep --results=/proc/all.jsonl", r"--results=/proc/all\.jsonl cannot be written"),
    ("--with_twin --config.twin=", "names no twin. Write --config.twin=FILE"),
    ("--with_twin --mode=plan", "leave out --sweep, --sweep_index and --mode"),
    ("--with_twin --sweep", "leave out --sweep, --sweep_index and --mode"),
    ("--with_twin --config.twin=configs/vit_dens.py", "Did you mean configs/vit_dense.py"),
    ("--profile=0", "--profile=0: 0 is not a positive integer"),
    ("--profile=2.5", "profile"),
    ("--profile=2 --mode=plan", "needs a single run that trains: leave out --mode=plan"),
    ("--profile=2 --mode=eval --workdir=configs", "needs a single run that trains: leave out --mode=eval"),
    ("--profile=2 --sweep", "needs a single run that trains: leave out --sweep"),
]


@pytest.mark.parametrize(("words", "said"), TOGETHER)
def test_flags_that_do_not_go_together_are_refused_and_nothing_is_written(words, said):
    before = sorted(config_files.ROOT.glob("runs/*"))
    with pytest.raises(Mistake, match=said) as caught:
        command.main(["launch.py", f"--config={CONFIG_FILE}", *words.split()], "")
    assert "\n" not in str(caught.value)
    assert sorted(config_files.ROOT.glob("runs/*")) == before


def test_runs_side_by_side_need_a_single_process(monkeypatch):
    monkeypatch.setattr(command.processes, "count", lambda: 2)
    monkeypatch.setattr(command.processes, "same", lambda _: None)
    with pytest.raises(Mistake, match="--seeds_at_once=2 needs a single process: leave out --distributed"):
        command.main(["launch.py", f"--config={CONFIG_FILE}", "--sweep", "--seeds_at_once=2"], "")


@pytest.mark.parametrize(
    "words",
    [
        ["--nosweep", "--nowith_twin"],
        ["--config.seed", "3", "-config.batch=4", "-workdir=x"],
        ["--note", "--wow", "--tag=--x", "--sweep", "--workdir", "--abc"],
    ],
)
def test_every_form_of_a_flag_is_taken(words):
    asked = command.read(["launch.py", "--config", CONFIG_FILE, *words])
    assert asked.config_file == CONFIG_FILE
    if "--note" in words:
        assert (asked.labels, asked.sweep, asked.workdir) == ({"tags": ["--x"], "note": "--wow"}, True, "--abc")
    if "3" in words:
        assert (asked.config.seed, asked.config.batch, asked.workdir) == (3, 4, "x")


def test_a_mistake_in_a_config_file_is_told_with_its_line(tmp_path):
    config_file = tmp_path / "mine.py"
    config_file.write_text(
        "from configs import common\ndef get_config():\n    c = common.vit('')\n    c.bach = 3\n    return c\n"
    )
    with pytest.raises(Mistake, match=r"mine.py, line 4: .*bach"):
        config_files.load(str(config_file))
    config_file.write_text("def get_config(:\n")
    with pytest.raises(Mistake, match="mine.py: SyntaxError"):
        config_files.load(str(config_file))
    config_file.write_text("x = 1\n")
    with pytest.raises(Mistake, match="mine.py is not a config file.*get_config"):
        config_files.load(str(config_file))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "code"), [([], 2), ([f"--config={CONFIG_FILE}", "--config.bach=3"], 2), (["--help"], 0)]
)
def test_a_process_says_it_on_stderr_and_in_its_exit_code(words, code):
    done = subprocess.run([sys.executable, "launch.py", *words], capture_output=True, text=True, cwd=config_files.ROOT)
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == (code != 0)
    if not code:
        assert "configs/vit_24.py" in done.stdout
        assert "--mode=train|eval|plan" in done.stdout


def test_every_config_file_says_what_it_is_and_how_to_run_it():
    for config_file in config_files.names():
        text = (config_files.ROOT / config_file).read_text()
        assert f"python launch.py --config={config_file}" in text.split('"""')[1]
        assert len(text.splitlines()) <= 45
