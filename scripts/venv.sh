# Sourced by quickstart and test: makes .venv with the named extras, once, and again only when pyproject.toml changes.

say() { if [ -t 1 ]; then printf '\033[1m==> %s\033[0m\n' "$*"; else printf '==> %s\n' "$*"; fi; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.13 python3.12 python3.11 python3 python; do
        if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    die "Python 3.11 or newer with the venv module was not found; install it (Debian: apt install python3 python3-venv) or set PYTHON=/path/to/python3."
}

# ensure_venv EXTRAS: .venv holds this checkout, installed editable with these extras.
ensure_venv() {
    local extras=$1 python stamp
    if [ ! -x .venv/bin/python ]; then
        python=$(find_python)
        say "Making .venv with $("$python" --version)"
        rm -rf .venv
        "$python" -m venv .venv
    fi
    stamp="$(.venv/bin/python -c 'import hashlib, sys; print(hashlib.sha256(open("pyproject.toml", "rb").read()).hexdigest(), sys.version)') "
    if [ "$(cat ".venv/installed-$extras" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    if ! .venv/bin/python -c 'import llama_cpp' >/dev/null 2>&1; then
        command -v c++ >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 || command -v clang++ >/dev/null 2>&1 ||
            die "llama.cpp is compiled here and needs a C++ compiler; install one (Debian: apt install g++)."
        say "Installing; llama.cpp is compiled for this machine the first time: about 7 minutes on 2 cores, less on more (pip keeps the result)"
    else
        say "Installing"
    fi
    .venv/bin/python -m pip install --disable-pip-version-check -e ".[$extras]"
    printf '%s' "$stamp" >".venv/installed-$extras"
}
