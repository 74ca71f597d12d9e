#!/usr/bin/env bash
# Makes the environment in .venv; see --help.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<'END'
Usage: scripts/env.sh [--test] [--cpu]

Makes the Python environment .venv in the repository's root, or brings the one that is there up to
date. Running it again costs a second when nothing changed. It needs Python 3.11 or later with pip,
about 2.5 GB of disk, and nothing else.

  --test   also install what the tests need
  --cpu    make the CPU environment although there is an NVIDIA GPU. What was made so stays so: on
           a GPU host, remove .venv for one that uses the GPU
  --help   show this

Without an NVIDIA GPU it installs a CPU torch and SGLang without its CUDA dependencies. With one it
installs everything that SGLang asks for; that path has not been verified yet.

Exit codes: 0 the environment is ready, 1 something failed (the message says what), 2 wrong usage.
END
}

with_tests=no
kind=cpu
if has_gpu && [[ ! -e "$venv/stamp-cpu" ]]; then kind=gpu; fi
while (($# > 0)); do
    case $1 in
        --test) with_tests=yes ;;
        --cpu) kind=cpu ;;
        --help | -h) usage && exit 0 ;;
        *) usage >&2 && exit 2 ;;
    esac
    shift
done

here="$root/scripts"
log="$venv/install.log"

# is_recent_python COMMAND: it runs, is 3.11 or later, and can make a virtual environment.
is_recent_python() {
    "$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in python3.11 python3 python3.12 python3.13; do
        if is_recent_python "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11 or later found (looked for python3.11, python3, python3.12, python3.13)." \
        "Install one, with its venv module (on Debian and Ubuntu: apt install python3 python3-venv), and run this again."
}

venv_works() { is_recent_python "$python" && "$python" -m pip --version >/dev/null 2>&1; }

make_venv() {
    local base
    base=$(find_python)
    say "Making $venv with $base ($("$base" --version 2>&1))"
    if "$base" -c 'import ensurepip' 2>/dev/null; then
        "$base" -m venv "$venv"
    else
        # Some distributions leave out ensurepip: then the pip beside this Python fills the environment.
        "$base" -m venv --without-pip "$venv"
        "$base" -m pip --python "$python" install --quiet pip
    fi
    venv_works || die "$venv cannot run pip. Remove it (rm -r '$venv') and run this again."
}

# requirements FIELD: what pyproject.toml lists there, one a line: "sglang" (its pin) or "test" (the extra).
requirements() {
    "$python" - "$root/pyproject.toml" "$1" <<'END'
import pathlib, sys, tomllib

project = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())["project"]
pins = [line for line in project["dependencies"] if line.startswith("sglang==")]
wanted = {"sglang": pins, "test": project["optional-dependencies"]["test"]}[sys.argv[2]]
print(*wanted, sep="\n")
END
}

# What the environment is made from: when any of it changes, the next run installs again.
fingerprint() {
    {
        echo "$root" "$kind"
        "$python" --version
        cat "$root/pyproject.toml" "$here"/requirements-*.txt "$here/torchvision_shim.py" "$here/env.sh"
    } | sha256sum
}

is_stamped() { [[ "$(cat "$venv/stamp-$1" 2>/dev/null)" == "$(fingerprint)" ]]; }
stamp() { fingerprint >"$venv/stamp-$1"; }

refuse_other_kind() {
    local other=gpu
    if [[ $kind == gpu ]]; then other=cpu; fi
    [[ ! -e "$venv/stamp-$other" ]] ||
        die "$venv was made for a machine of the other kind ($other, now $kind)." \
            "Remove it (rm -r '$venv') and run this again."
}

# Bytecode is compiled once at the end, on all cores (compile_bytecode).
pip_install() { "$python" -m pip install --no-compile --no-warn-conflicts "$@"; }

install_shim() {
    local site
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp "$here/torchvision_shim.py" "$site/"
    echo 'import torchvision_shim' >"$site/torchvision_shim.pth"
}

# Without it each server start compiles thousands of files, again and again where
# PYTHONDONTWRITEBYTECODE is set. A few files in there are not for this Python: they do not count.
compile_bytecode() {
    "$python" -m compileall -qq -j 0 "$venv/lib" || true
}

install_cpu() {
    local sglang
    sglang=$(requirements sglang)
    run_step "$sglang without its CUDA dependencies" "$log" \
        pip_install --no-deps -r "$here/requirements-cpu-nodeps.txt" "$sglang"
    run_step "torch, transformers and what the server imports" "$log" \
        pip_install -r "$here/requirements-cpu.txt"
    run_step "sglang-dsv4, editable" "$log" pip_install --no-deps --no-build-isolation -e "$root"
    install_shim
    run_step "bytecode" "$log" compile_bytecode
    # torchvision is what the shim is for; the others are the two large ones.
    run_step "check: the libraries import" "$log" "$python" -c 'import torch, torchvision, transformers'
    "$python" -c 'import torch; exit(torch.version.cuda is None)' 2>/dev/null &&
        say "  (this torch is a CUDA build: it works on the CPU too, and is only larger)"
    return 0
}

install_gpu() {
    say "  An NVIDIA GPU is here: installing everything SGLang asks for (this path is not verified yet)."
    run_step "sglang-dsv4, editable, with SGLang and CUDA libraries" "$log" pip_install -e "$root"
    run_step "bytecode" "$log" compile_bytecode
}

install_tests() {
    local tools
    mapfile -t tools < <(requirements test)
    run_step "what the tests need" "$log" pip_install "${tools[@]}"
    run_step "bytecode" "$log" compile_bytecode
}

# Two runs at once would install into each other.
if command -v flock >/dev/null; then
    exec 9>"$root/.venv.lock"
    flock --nonblock 9 || {
        say "Another run is making the environment: waiting for it"
        flock 9
    }
fi

refuse_other_kind
venv_works || make_venv
if is_stamped "$kind"; then
    say "Environment: $venv is up to date ($kind)"
else
    say "Environment: installing into $venv ($kind)"
    "install_$kind"
    stamp "$kind"
fi
if [[ $with_tests == yes ]] && ! is_stamped test; then
    install_tests
    stamp test
fi
