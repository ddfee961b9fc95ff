"""Train, evaluate or plan a run, or show its settings.

python launch.py --config=configs/vit_24.py [--workdir=DIR] [--from=DIR] [--mode=train|eval|plan|config]
                 [--config.FIELD=VALUE ...] [--sweep [--seeds_at_once=N]] [--sweep_index=I] [--results=FILE]
                 [--with_baseline] [--tracker=wandb|trackio|mlflow] [--profile=STEPS]
                 [--distributed=auto|off|HOST:PORT,N,I] [--tag=NAME[,NAME]] [--note=TEXT]
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
