#!/usr/bin/env bash
# install.sh DIR: a virtual environment in DIR with a real SGLang 0.5.23 that serves small text models on a CPU.
# Python 3.11 and 1.5 GB of disk; a .pth file puts the stubs next to this file on its path.
# RELAX_SGLANG_PYTHON=DIR/bin/python pytest -m sglang    then runs the tests against it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd); dir=$1
python3 -m venv "$dir"
"$dir/bin/pip" install -q -r "$here/requirements.txt"
"$dir/bin/pip" install -q --no-deps sglang==0.5.23
site=$("$dir/bin/python" -c 'import site; print(site.getsitepackages()[0])')
printf '%s\nimport sgl_stub\n' "$here/stubs" > "$site/sgl_stubs.pth"
"$dir/bin/python" -c 'import sglang; print("sglang", sglang.__version__)'
