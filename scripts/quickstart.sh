#!/usr/bin/env bash
# From a fresh clone to a real answer: installs into .venv, then decodes one prompt with and without
# speculation and compares. Arguments go to `dspark generate --compare`:
#   bash scripts/quickstart.sh
#   bash scripts/quickstart.sh "Explain how a bicycle stays upright." --max-new-tokens 128
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"

install_environment
if [ $# -eq 0 ] || [[ "$1" == -* ]]; then
    set -- "Write a Python function that checks whether a number is prime." "$@"
fi
say "dspark generate --compare $*"
exec "$root/.venv/bin/dspark" generate --compare "$@"
