"""The command line: what is read, and what is refused, in one line each."""

import subprocess
import sys

import pytest

from experiments import command, config_files
from experiments.errors import Mistake
from tests.experiments.runs import as_people_run_it as as_people_run_it

CONFIG_FILE = "configs/vit_24.py"


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


def test_a_method_may_get_a_new_name():
    rules = "--config.rules=((r'.*/mlp/.*', 'mlp'), (r'.*', 'dense'))"
    config = command.read(["launch.py", f"--config={CONFIG_FILE}", "--config.sparsity.mlp=s_ste(2,4)", rules]).config
    assert config.sparsity.mlp == "s_ste(2,4)"


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


BERT = "tests/checkpoints/golden/bert"
RESULTS = "needs a sweep that trains. Add --sweep or --sweep_index=N, and leave out --mode=plan"
SEEDS = "--seeds_at_once=.: write at least 1. A number above 1 needs --sweep, and cannot be combined"
TRAINS = "--sweep and --sweep_index train: leave out --from and --mode"
BASELINE = "leave out --sweep, --sweep_index and --mode"

MISTAKES = {  # config file -> words of a command, and what is said
    "": [
        ("--mode=plan", "--config=FILE is missing, such as --config=configs/vit_24.py. --help lists them"),
        ("--config=nothing.py", "there is no file nothing.py. --help lists the config files"),
        ("--config=configs/vit24.py", r"no file configs/vit24.py. Did you mean configs/vit_24.py\?"),
        ("--config=README.md", "a config file is a .py file"),
        ("--config=configs/vit_24.py:cifar", r"vit_24.py, line \d+: ValueError: there is no variant 'cifar'"),
        ("--config=configs/gpt2_124m.py:cifar10", "no variant 'cifar10'"),
        ("--confg=configs/vit_24.py", r"there is no flag --confg. Did you mean --config\?"),
        ("--steps=10", r"there is no flag --steps. Did you mean --config.steps\?"),
        ("--mode=eval", "--mode=eval needs --workdir=DIR"),
        ("--mode=eval --workdir=/no/such", "--workdir=/no/such holds no run: there is no such directory"),
        ("--mode=eval --workdir=configs", "--workdir=configs holds no run: it has no config.json"),
        ("--mode eval --workdir nowhere", "--workdir=nowhere holds no run"),
    ],
    "configs/vit_24.py": [
        # fields and values
        ("--config.bach=3", r"no field 'bach'. Did you mean config.batch\?"),
        ("-config.stesp=5", "config has no field 'stesp'. Did you mean config.steps"),
        ("--config.data.nmae=x", r"no field 'nmae'. Did you mean config.data.name\?"),
        ("--config.batch.size=3", r"config.batch is \d+, and has no fields"),
        ("--config.learning_rate=3", "is a group of fields. Set one of them: .*--config.learning_rate.peak"),
        ("--config.batch=1.5", "--config.batch=1.5: '1.5' is not a whole number"),
        ("--config.learning_rate.peak=fast", "'fast' is not a number"),
        ("--config.model.scan=maybe", "'maybe' is neither true nor false"),
        ("--config.sparsity.mlp=s_ste(2,4)", r"no rule uses 'mlp'. Also write --config.rules=.* one of blocks\."),
        # flags
        ("--mode=trian", "--mode=trian: value should be one of"),
        ("--tracker=wandbb", "--tracker=wandbb: value should be one of <wandb.trackio.mlflow>"),
        ("--profile=0", "--profile=0: 0 is not a positive integer"),
        ("--profile=2.5", "profile"),
        ("--wrokdir=x", r"there is no flag --wrokdir. Did you mean --workdir\?"),
        ("-wrokdir=x", r"Did you mean --workdir\?"),
        ("--steps=10", r"there is no flag --steps. Did you mean --config.steps\?"),
        ("--learning_rate.peak=1", r"Did you mean --config.learning_rate.peak\?"),
        ("--learning-rate=1", r"Did you mean --config.learning_rate.FIELD\? FIELD is one of .*peak"),
        ("--peak=1", r"Did you mean --config.learning_rate.peak\?"),
        ("--data=2", r"Did you mean --config.data.FIELD\? FIELD is one of .*name"),
        ("--config_seed=3", r"there is no flag --config_seed."),
        ("--notag=x", "there is no flag --notag. Did you mean --"),
        ("--zzz", "there is no flag --zzz. --help lists all flags"),
        ("train", "'train' is not a flag"),
        # flags that do not go together
        ("--mode=eval", "--mode=eval needs --workdir"),
        ("--mode=plan --tag=x", "--tag and --note need a run that trains. With --mode=plan"),
        ("--mode=plan --tracker=wandb", "--tracker needs a run that trains. With --mode=plan, leave it out."),
        ("--mode=plan --sweep", TRAINS),
        ("--sweep_index=99", r"--sweep_index=99: the sweep has \d+ runs, from 0 to"),
        ("--seeds_at_once=2", SEEDS),
        ("--sweep --seeds_at_once=0", SEEDS),
        ("--sweep_index=1 --seeds_at_once=2", SEEDS),
        ("--results=a.jsonl", f"--results=a.jsonl {RESULTS}"),
        ("--sweep_index=1 --mode=plan --results=a.jsonl", RESULTS),
        ("--sweep --results=nowhere/a.jsonl", "--results=nowhere/a.jsonl: there is no folder nowhere. Create it,"),
        ("--sweep --results=tests", "--results=tests is a folder. Write the name of a file, such as tests/all"),
        ("--sweep --results=results.jsonl", r"a sweep writes its own file of this name.* such as all\.jsonl\."),
        ("--sweep --results=/proc/all.jsonl", r"--results=/proc/all\.jsonl cannot be written"),
        ("--with_baseline --config.baseline=", "names no baseline. Write --config.baseline=FILE"),
        ("--with_baseline --mode=plan", BASELINE),
        ("--with_baseline --sweep", BASELINE),
        ("--with_baseline --config.baseline=configs/vit_dens.py", "Did you mean configs/vit_dense.py"),
        ("--profile=2 --mode=plan", "needs a single run that trains: leave out --mode=plan"),
        ("--profile=2 --mode=eval --workdir=configs", "needs a single run that trains: leave out --mode=eval"),
        ("--profile=2 --sweep", "needs a single run that trains: leave out --sweep"),
        # several processes
        ("--distributed=two", "write auto, off, or HOST:PORT,N,I"),
        ("--distributed=localhost,2,0", "write auto, off, or HOST:PORT,N,I"),
        ("--distributed=localhost:1234,2,2", "this process is 2, and must be less than the number of processes, 2"),
        # data
        ("--config.experiment=imgae", r"is not known. Did you mean 'image'\? Write one of finetune, image, text"),
        ("--config.data.name=digist", r"Did you mean digits\?"),
        ("--config.data.name=cifar10 --config.data.dir=/absent", "/absent.*does not exist"),
        ("--config.data.name=cifar10 --config.data.dir=README.md", "is 'README.md', which is a file, not a folder"),
        (
            "--config.data.name=folder",
            "Use the variant of a config file: --config=configs/vit_24.py:folder --config.data",
        ),
        ("--config.data.name=a.npz --mode=plan", "found no a.npz"),
        ("--config.data.crop=-1", "config.data.crop=-1 is out of range"),
        ("--config.data.validation=-0.1", "is not a share: write 0 or a share below 1"),
        ("--config.data.validation=1.0", "is not a share"),
        ("--config.data.validation=0.9999", "no training data"),
    ],
    "configs/vit_24.py:folder": [("--mode=plan", "needs --config.data.dir=DIR")],
    "configs/gpt_24.py": [
        ("--config.data.name=my.txt --config.data.tokenizer=a.json --mode=plan", "found none of my.txt"),
        ("--config.data.name=my.txt --config.steps=0 --config.epochs=1 --mode=plan", "found none of my"),
        ("--config.data.length=1000000", "longer text"),
        ("--config.data.tokenizer=absent.json", "absent.json"),
    ],
    "configs/vit_24.py:smoke": [
        # length, learning rate and optimizer
        ("--config.steps=0 --config.epochs=0", "set one of them to a positive, finite number"),
        ("--config.steps=-5 --config.epochs=1", "leave the other at 0 or above"),
        ("--config.steps=0 --config.epochs=inf", "positive, finite"),
        ("--config.accumulate=3", "has to be a positive multiple of config.accumulate=3"),
        ("--config.seed=-1", "config.seed=-1 is not from 0"),
        ("--profile=25 --config.steps=24", "--profile=25 is more than the 24 steps of the run. Give fewer."),
        ("--config.evaluate=often", "config.evaluate='often' is not a duration"),
        ("--config.learning_rate.peak=-1", "config.learning_rate.peak=-1.0 must be a finite number, at least 0"),
        ("--config.learning_rate.shape=cosin", r"Did you mean 'cosine'\?"),
        ("--config.learning_rate.warmup=1000 --config.steps=1000", "1000 steps, and the run has 1000"),
        ("--config.optimizer=sgd(learning_rate=1)", "set the rate with config.learning_rate.peak"),
        ("--config.optimizer=adamx()", "Did you mean 'adam"),
        ("--config.optimizer=sgd(momentun=0.9)", r"Did you mean 'momentum'\?"),
        ("--config.optimizer=sgd(0.9)", "no call with named options"),
        ("--config.optimizer=sgd(momentum=", "no call with named options"),
        ("--config.optimizer=step_adam()", "after"),
        ("--config.optimizer=novograd(weight_decay=0.1)", "also biases"),
        ("--config.optimizer=lbfgs", "'lbfgs' is not known"),
        # recipe and model
        ("--config.rules=(('.*','msee(2,4)'),)", "config.rules.*msee"),
        ("--config.rules=(('.*','block'),)", "config.rules.*blocks"),
        ("--config.rules=(('.*',),)", "config.rules.*pattern, sparsity"),
        ("--config.rules=(('(','dense'),)", "config.rules.*regular expression"),
        ("--config.rules=(('mlp','blocks'),)", r"(?s)apply to no layer.*The layers are:\n  blocks/0"),
        ("--config.rules=(('patches','blocks'),)", r'(?s)patches: .* where it has one value, and a group.*"dense"\),'),
        ("--config.model.size=tine", r"config.model.size='tine' is not known. Did you mean 'tiny'\?"),
        ("--config.model.patch=3", "the model: patch must divide image"),
        ("--config.dtype=float16", "config.dtype"),
        # devices
        ("--config.batch=6", "4 devices"),
        ("--config.mesh.fsdp=3", "config.mesh.fsdp=3 x config.mesh.tensor=1 is 3 devices, which do not divide the 4"),
        ("--config.mesh.fsdp=0", "config.mesh.fsdp=0 is not a number of devices"),
    ],
    "configs/finetune_24.py:smoke": [
        (f"--config.teacher.weights={BERT} --config.teacher.logits=1.5", "logits is a share from 0 to 1"),
        (f"--config.teacher.weights={BERT} --config.teacher.temperature=0.0", "temperature is above 0"),
        (f"--config.teacher.weights={BERT}", r"gives logits \(0,\) and the model \(9,\)"),  # it has no head
        ("--config.teacher.weights=nowhere", "config.teacher.weights='nowhere' is not a folder"),
        ("--config.weights=", "config.weights is empty. Give the folder"),
        ("--config.weights=nowhere", "config.weights='nowhere' is not a folder with a config.json"),
        ("--config.weights=tests/checkpoints/golden/gpt2", "tokenizer.json: there is no such file"),
        ("--config.data.length=2", "config.data.length=2 leaves no place for a text beside 2 special tokens"),
        ("--config.model.dropout=2.0", "config.model.dropout=2.0 is not a rate from 0 to less than 1"),
        ("--config.model.name=other", "config.model.name='other': write module:name"),
        ("--config.objective=translate", "config.objective='translate' is not known"),
        ("--config.sparsity.blocks=y_w=ste(wanda(2,4))", "by the norms of inputs, which a run does not measure"),
        ("--config.rates=(('embedding',0.0),)", "config.rates: 'embedding' matches no whole path of a parameter"),
        ("--config.rates=(('.*',-1.0),)", "an entry is a pattern of paths and a factor of at least 0"),
    ],
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("config_file", "words", "said"),
    [pytest.param(file, *row, id=f"{file} {row[0]}") for file, rows in MISTAKES.items() for row in rows],
)
def test_mistakes_are_told_in_a_line_that_helps_and_nothing_is_written(config_file, words, said, tmp_path, monkeypatch):
    """In one line, except for what is a list."""
    monkeypatch.delenv("NMJAX_DATA", raising=False)
    for name in ("configs", "tests", "README.md"):
        (tmp_path / name).symlink_to(config_files.ROOT / name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Mistake, match=said) as caught:
        command.main(["launch.py", *[f"--config={config_file}"][: bool(config_file)], *words.split()], "")
    assert ("\n" in str(caught.value)) == ("(?s)" in said)
    assert not list(tmp_path.glob("runs/*"))


def test_runs_side_by_side_need_a_single_process(monkeypatch):
    monkeypatch.setattr(command.processes, "count", lambda: 2)
    monkeypatch.setattr(command.processes, "same", lambda _: None)
    with pytest.raises(Mistake, match="--seeds_at_once=2 needs a single process: leave out --distributed"):
        command.main(["launch.py", f"--config={CONFIG_FILE}", "--sweep", "--seeds_at_once=2"], "")


@pytest.mark.parametrize(
    "words",
    [
        ["--nosweep", "--nowith_baseline"],
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
    ("words", "code", "errors", "said"),
    [
        ([], 2, 0, "python launch.py --help\n"),
        ([f"--config={CONFIG_FILE}", "--config.bach=3"], 2, 1, ""),
        (["--help"], 0, 0, "--mode=train|eval|plan"),
    ],
)
def test_a_process_says_it_on_stderr_and_in_its_exit_code(words, code, errors, said):
    done = subprocess.run([sys.executable, "launch.py", *words], capture_output=True, text=True, cwd=config_files.ROOT)
    assert (done.returncode, len(done.stderr.splitlines())) == (code, errors)
    assert said in done.stdout
    assert bool(done.stdout) == bool(said)
    assert len(done.stdout.splitlines()) < 25 or words  # without arguments, a page


def test_every_config_file_says_what_it_is_and_how_to_run_it():
    for config_file in config_files.names():
        text = (config_files.ROOT / config_file).read_text()
        assert f"python launch.py --config={config_file}" in text.split('"""')[1]
        assert len(text.splitlines()) <= 45
