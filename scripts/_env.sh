# Sourced by the other scripts: a venv in the checkout with the package installed under
# constraints.txt. Starts at once when nothing has changed since the last time. $PYTHON picks the
# interpreter (3.11 or newer), $LNS_STUDY_VENV another place.
# shellcheck shell=bash
set -euo pipefail
called_from=$PWD
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=${LNS_STUDY_VENV:-$root/.venv}
python=${PYTHON:-python3}
wanted=$("$python" -c '
import hashlib, sys
files = b"".join(open(path, "rb").read() for path in sys.argv[1:])
print(hashlib.sha256(files).hexdigest(), sys.version)' pyproject.toml setup.py constraints.txt)
if [ "$(cat "$venv/.installed" 2>/dev/null || true)" != "$wanted" ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "$("$python" --version) is too old: lns-study needs Python 3.11 or newer;" \
            "set PYTHON=/path/to/python3.11" >&2
        exit 2
    }
    echo "Installing into $venv (once; some minutes, mostly torch and Ray)" >&2
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    # torch by itself first: a plain version pin picks a CPU build where one is on offer.
    install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
    "${install[@]}" "$(grep '^torch==' constraints.txt)"
    "${install[@]}" --constraint constraints.txt --editable ".[dev]"
    echo "$wanted" >"$venv/.installed"
fi
# How the shell that called us gets to lns-study and its files: messages that name a command say so
# (study/program.py).
if [ "$(command -v lns-study)" -ef "$venv/bin/lns-study" ]; then
    LNS_STUDY_COMMAND=lns-study
else
    printf -v LNS_STUDY_COMMAND %q "${venv#"$root/"}/bin/lns-study"
fi
[ "$called_from" -ef "$root" ] ||
    printf -v LNS_STUDY_COMMAND 'cd %q && %s' "$root" "$LNS_STUDY_COMMAND"
export LNS_STUDY_COMMAND
export PATH="$venv/bin:$PATH"
