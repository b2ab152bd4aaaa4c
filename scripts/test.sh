#!/usr/bin/env bash
# Installs the test extras into .venv and runs the suite in two processes (tests use one thread
# each). Arguments go to pytest:
#   bash scripts/test.sh
#   bash scripts/test.sh tests/laws -q
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"

install_environment dev
cd "$root"
say "pytest $*"
exec "$python" -m pytest -n 2 --dist loadfile "$@"
