#!/usr/bin/env bash
# Creates what every make target needs: the virtual environment, the locked dependencies, the import links.
# Prints nothing and returns at once when all of it is current.
#
# Environment:
#   PYTHON  interpreter to build the environment with (default: that of the environment at hand, else python3,
#           else the newest of python3.13, python3.12, python3.11)
#   EXTRAS  extras of pyproject.toml to install on top, comma separated (gpu, compiler); remembered
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly root="$PWD" venv=.venv links=build/imports/pagedtune log=build/setup.log
readonly stamp="$venv/pagedtune-setup" oldest=3.11

die() {
    printf 'setup: %s\n' "$@" >&2
    exit 2
}

is_recent_enough() {
    "$1" -c "import sys; sys.exit(sys.version_info < (${oldest/./, }))" 2>/dev/null
}

# The interpreter under an environment, or the interpreter itself.
base_of() {
    "$1" -c 'import sys; print(sys._base_executable)'
}

find_python() {
    local candidate
    if [[ -n "${PYTHON:-}" ]]; then
        command -v "$PYTHON" >/dev/null ||
            die "PYTHON=$PYTHON was not found; name an interpreter on the PATH or by its path."
        is_recent_enough "$PYTHON" || die "PYTHON=$PYTHON is $("$PYTHON" -V 2>&1); $oldest or newer is needed."
        base_of "$PYTHON"
        return
    fi
    for candidate in "$venv/bin/python" python3 python3.13 python3.12 python3.11; do
        if is_recent_enough "$candidate"; then
            base_of "$candidate"
            return
        fi
    done
    die "Python $oldest or newer is needed, and python3 is: $(python3 -V 2>/dev/null || echo "not there")." \
        "Install one (Debian, Ubuntu: apt install python3.11 python3.11-venv) or name one:" \
        "    make setup PYTHON=/path/to/python3"
}

# The links let editors and type checkers see the top folders as the namespace `pagedtune`.
make_links() {
    local room
    mkdir -p "$links"
    for room in kernels runtime harness tuner configs; do
        [[ "$(readlink "$links/$room")" == "../../../$room" ]] || ln -sfn "../../../$room" "$links/$room"
    done
}

# All that the environment depends on; the folder is part of it because an environment cannot be moved.
wanted_state() {
    printf 'python %s\nfolder %s\nextras %s\n' "$("$1" -c 'import sys; print(sys.version)' | tr -d '\n')" "$root" "$2"
    cat requirements.lock pyproject.toml scripts/setup.sh | cksum
}

make_venv() {
    local python="$1" version
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1 && [[ "$(base_of "$venv/bin/python")" == "$python" ]]; then
        return
    fi
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
        die "$python cannot create virtual environments: its venv or ensurepip module is missing." \
            "Install it (Debian, Ubuntu: apt install python$version-venv), then run make again."
    fi
    printf 'setup: creating %s with %s\n' "$venv" "$("$python" -V)"
    "$python" -m venv --clear "$venv" || die "could not create $root/$venv; the lines above say why."
}

latest_line() {
    grep -vE 'WARNING|ninstall|Found existing' "$log" | tail -n 1 | tr -s ' ' | cut -c 1-70
}

# Runs a command with its output in the log, and says every few seconds how far it is.
with_progress() {
    local what="$1" start=$SECONDS shown=$SECONDS step=15 pid
    shift
    [[ -t 1 ]] && step=2
    "$@" >>"$log" 2>&1 &
    pid=$!
    trap 'kill "$pid" 2>/dev/null || true' INT TERM
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        if ((SECONDS - shown >= step)); then
            shown=$SECONDS
            printf 'setup: %s, %d s: %s\n' "$what" "$((SECONDS - start))" "$(latest_line)"
        fi
    done
    trap - INT TERM
    if ! wait "$pid"; then
        grep -v WARNING "$log" | tail -n 15 >&2
        die "$what failed; the whole output is in $root/$log."
    fi
}

has_compiler() {
    local name
    for name in "${CXX:-}" c++ g++ clang++; do
        [[ -n "$name" ]] && command -v "${name%% *}" >/dev/null && return
    done
    return 1
}

install_dependencies() {
    # Most of what is installed is never imported: compiling 13,000 files takes longer than unpacking them. What every
    # command imports is compiled at the end, also where the environment forbids it (containers often do): else each
    # process would compile torch anew, 2 s each.
    local extras="$1" pip=("$venv/bin/python" -m pip --disable-pip-version-check install --no-compile --progress-bar off)
    : >"$log"
    printf 'setup: installing the dependencies of requirements.lock (the first time this takes some minutes)\n'
    with_progress "installing" "${pip[@]}" -r requirements.lock
    with_progress "linking pagedtune" "${pip[@]}" --no-deps --no-build-isolation --editable .
    if [[ -n "$extras" ]]; then
        with_progress "installing extras $extras" "${pip[@]}" -c requirements.lock --no-build-isolation --editable ".[$extras]"
    fi
    with_progress "checking" "$venv/bin/python" -m pip --disable-pip-version-check check
    with_progress "compiling what is imported" env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c \
        "import pagedtune.tuner.cli, pagedtune.tuner.report, triton.compiler, pytest, hypothesis"
}

is_current() {
    [[ -x $venv/bin/python && -f $stamp && "$(cat "$stamp")" == "$1" ]]
}

main() {
    local python extras state
    python="$(find_python)"
    make_links
    extras="${EXTRAS:-$(sed -n 's/^extras //p' "$stamp" 2>/dev/null || true)}"
    if ! has_compiler && [[ ",$extras," != *,compiler,* ]]; then
        printf 'setup: no C++ compiler found: taking the one from PyPI (ziglang)\n'
        extras="${extras:+$extras,}compiler"
    fi
    state="$(wanted_state "$python" "$extras")"
    is_current "$state" && return
    if command -v flock >/dev/null; then  # two makes at once: the second waits and finds the work done
        exec 9>build/setup.lock
        flock 9
        is_current "$state" && return
    fi
    make_venv "$python"
    rm -f "$stamp"
    install_dependencies "$extras"
    printf '%s\n' "$state" >"$stamp"
    printf 'setup: done\n'
}

main
