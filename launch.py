"""Train a network with N:M sparsity, score a run, or show what a config prunes.

usage: python launch.py --config=FILE [--config.FIELD=VALUE ...] [flags]

Train a 2:4 Vision Transformer on digits (two minutes on two CPU cores), and
write runs/first/report.html. The same command continues an interrupted run:
  python launch.py --config=configs/vit_24.py --workdir=runs/first

Change the method and other settings:
  python launch.py --config=configs/vit_24.py --config.batch=64 \\
    --config.sparsity.blocks='s_ste(2,4)'

Show which layers are pruned and what that saves, without training:
  python launch.py --config=configs/gpt_24.py --mode=plan

List the flags and the config files, or the settings of one config file:
  python launch.py --help
  python launch.py --help --config=configs/vit_24.py
"""

import os
import signal
import sys


def interrupted(*_):
    """End the process. An exception would be lost if the signal falls into a callback of JAX, as while it compiles."""
    os.write(2, b"launch.py: interrupted\n")
    os._exit(130)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, interrupted)  # until training begins, which ends after its step

if __name__ == "__main__" and len(sys.argv) == 1:
    print((__doc__ or "").strip())
    sys.exit(2)

try:
    from experiments import command
    from experiments.errors import Failed, Mistake, Stopped, visible
except ModuleNotFoundError as error:
    print(f"launch.py: the package {error.name} is missing: pip install -r requirements.txt", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    try:
        command.main(sys.argv, __doc__)
    except (Mistake, Failed, Stopped, KeyboardInterrupt) as error:
        print(visible(f"launch.py: {str(error) or 'interrupted'}"), file=sys.stderr)
        sys.exit(getattr(error, "code", 130))
