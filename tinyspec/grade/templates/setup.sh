#!/usr/bin/env bash
# Run once, when Gradescope builds the container: a Python of 3.11 or newer, and what tinyspec needs.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y python3 python3-venv
python=python3
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    apt-get install -y python3.11 python3.11-venv
    python=python3.11
fi
"$python" -m venv /autograder/venv
/autograder/venv/bin/pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    -r /autograder/source/requirements.txt
