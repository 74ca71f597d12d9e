#!/usr/bin/env bash
# Makes the environment and runs every check; see --help.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<'END'
Usage: scripts/test.sh [PYTEST ARGUMENTS]

Makes the environment with the test tools (scripts/env.sh --test), then runs ruff, mypy and pytest.
All of them run, also after one has failed; the times are printed at the end.

  scripts/test.sh                                     everything
  scripts/test.sh tests/attention                     the checks, and the tests of one folder
  scripts/test.sh -m 'not served' -x                  without the tests that start a server

Exit codes: 0 all passed, 1 something failed.
END
}

case ${1:-} in
    --help | -h) usage && exit 0 ;;
esac

phases=()
failed=no

# phase NAME COMMAND...: runs it, and keeps its name, time and outcome for the summary.
phase() {
    local name=$1 started=$SECONDS outcome=passed
    shift
    say "==> $name"
    "$@" || outcome="FAILED (exit $?)"
    if [[ $outcome != passed ]]; then failed=yes; fi
    phases+=("$(printf '%-12s %5d s  %s' "$name" "$((SECONDS - started))" "$outcome")")
}

# Tiny models run several times slower when OpenMP threads share cores; and no test may reach a hub.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

cd "$root"
phase environment bash "$root/scripts/env.sh" --test
if [[ $failed == no ]]; then
    phase ruff "$python" -m ruff check sglang_dsv4 attention moe scripts tests
    phase mypy bash "$root/scripts/typecheck.sh"
    # Two at a time; a file stays together, so that it starts its server once.
    phase pytest "$python" -m pytest -n 2 --dist loadfile --durations=15 "$@"
fi

say ""
say "==> summary ($SECONDS s in all)"
printf '    %s\n' "${phases[@]}"
[[ $failed == no ]]
