# Shared by the scripts in this folder, which source it: where things are, messages, steps with progress.
# shellcheck shell=bash

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
# Read by the scripts that source this file.
# shellcheck disable=SC2034
python="$venv/bin/python"

# A command that is interrupted ends first; then the script says so, instead of what that command left.
trap 'echo "interrupted" >&2; exit 130' INT
trap 'exit 143' TERM HUP

say() { printf '%s\n' "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# An NVIDIA driver that lists a device; a machine with the tools but no device counts as a CPU.
has_gpu() { nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

# last_line FILE: its last line that is not blank or indented, without control characters.
last_line() {
    tail -c 4000 "$1" 2>/dev/null | tr '\r' '\n' | tr -d '\000-\011\013-\037' | grep -a '^[^ ]' | tail -n 1 || true
}

# show_progress LABEL SECONDS DETAIL: one line, rewritten on a terminal; elsewhere a line every 15 s.
show_progress() {
    local line="  $1 ... $2 s  $3" width
    if [[ -t 1 ]]; then
        width=$(tput cols 2>/dev/null || echo 80)
        printf '\r\033[K%s' "${line:0:width-1}"
    elif (($2 > 0 && $2 % 15 == 0)); then
        say "${line:0:160}"
    fi
}

end_progress() {
    if [[ -t 1 ]]; then printf '\r\033[K'; fi
    say "$*"
}

# Repeats show_progress for a step until it is stopped, or the script that started it is gone.
watch_log() {
    local label=$1 log=$2 started=$SECONDS
    while kill -0 "$$" 2>/dev/null; do
        show_progress "$label" "$((SECONDS - started))" "$(last_line "$log")"
        sleep 1
    done
}

# run_step LABEL LOG COMMAND...: runs it with its output in LOG; a failure prints the end of LOG and stops the script.
run_step() {
    local label=$1 log=$2 started=$SECONDS status=0 watcher
    shift 2
    : >"$log"
    # Without the lock of env.sh (descriptor 9): a last `sleep` would hold it a second longer.
    watch_log "$label" "$log" 9>&- &
    watcher=$!
    "$@" >"$log" 2>&1 || status=$?
    kill "$watcher" 2>/dev/null || true
    wait "$watcher" 2>/dev/null || true
    if ((status != 0)); then
        end_progress "  $label: failed after $((SECONDS - started)) s (exit $status)"
        tail -n 25 "$log" >&2
        die "$label failed; the whole output is in $log"
    fi
    end_progress "  $label: $((SECONDS - started)) s"
}
