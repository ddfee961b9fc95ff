#!/usr/bin/env bash
# One run on several machines, by ssh alone: a process per machine, with all of its GPUs.
#
#   launchers/ssh.sh node1 node2 -- --config=configs/gpt2_124m.py --workdir=/shared/runs/gpt2
#
# Start it in the repository's root, which has its .venv (`make run` makes it) and the same path on every machine; --workdir is on
# a file system that they share. The first machine listens on port 8476 (PORT=... for another one). The machines also talk
# over ports that the system chooses, so all ports between them have to be open.
# It prints the lines of the first machine, and errors of the others, each after its machine's name. Ctrl-C makes all save
# after the same step. If a process dies, the others end too, and the same line continues the run.

set -uo pipefail
hosts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do hosts+=("$1"); shift; done
if [ ${#hosts[@]} = 0 ] || [ $# -lt 2 ]; then
  echo "launchers/ssh.sh HOST... -- --config=FILE --workdir=DIR ..." >&2
  exit 2
fi
shift
place="${hosts[0]#*@}:${PORT:-8476},${#hosts[@]}"

stop() {
  for host in "${hosts[@]}"; do
    ssh "$host" "pkill -TERM -f -- '--distributed=$place,'" &
  done
}
trap stop INT TERM

started=()
for i in "${!hosts[@]}"; do
  line="cd $(printf %q "$PWD") && exec ${PYTHON:-.venv/bin/python} launch.py $(printf '%q ' --distributed="$place,$i" "$@")"
  (trap '' INT; ssh "${hosts[$i]}" "$line" 2>&1 | sed -u "s|^|${hosts[$i]}: |"; exit "${PIPESTATUS[0]}") &
  started+=($!)
done

code=0
for process in "${started[@]}"; do
  wait "$process"; ended=$?
  while kill -0 "$process" 2>/dev/null; do wait "$process"; ended=$?; done  # a trap ends `wait`, and not the process
  [ "$code" = 0 ] && code=$ended
done
exit "$code"
