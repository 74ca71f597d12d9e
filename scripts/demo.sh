#!/usr/bin/env bash
# From nothing to an answer: the environment, then `sglang-dsv4 demo`; see --help.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<'END'
Usage: scripts/demo.sh [OPTIONS OF sglang-dsv4 demo]

Makes the environment (scripts/env.sh --cpu), then runs `sglang-dsv4 demo` in it: it starts SGLang's
own server with nano, a small trained DeepSeek-V4 that is part of this package, asks it a few
questions, and prints the answers, how many prompt tokens were cached, and the class that served.
On a terminal it then lets you ask. At the end it stops the server.

  --ask TEXT         ask this instead (can be repeated)
  --interactive      let me ask at a prompt afterwards (default on a terminal, unless --ask is given)
  --no-input         never wait for input
  --plot FILE.png    draw model, cache and prompts; needs matplotlib
                     (.venv/bin/python -m pip install matplotlib)
  --url URL          ask a server that is running already
  --checkpoint DIR   serve this checkpoint instead of nano; its words are not judged
  --device DEVICE    SGLang's --device (default: cpu)
  --port PORT        port of 127.0.0.1 for the server (default: a free one)
  --keep             leave the server running, and say how to talk to it and how to stop it
  --log FILE         the server's log (default: a temporary file)
  --wait SECONDS     how long the server may take to start (default: 600)
  --json             print one JSON object on stdout; what is said about the environment goes to stderr
  --help             show this

Exit codes: 0 everything is as expected, 1 something failed (the message says what), 2 an option that
cannot be used, 130 or 143 interrupted (the server is stopped then too).
END
}

for option in "$@"; do
    case $option in
        --help | -h) usage && exit 0 ;;
    esac
done

# Its messages are no part of what is asked for, for example with --json.
bash "$root/scripts/env.sh" --cpu >&2
exec "$venv/bin/sglang-dsv4" demo "$@"
