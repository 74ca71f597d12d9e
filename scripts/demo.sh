#!/usr/bin/env bash
# From nothing to an answer: environment, checkpoint, server, two questions; see --help.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<'END'
Usage: scripts/demo.sh [--keep] [--checkpoint DIR] [--port N]

Makes the environment (scripts/env.sh), makes a small DeepSeek-V4 checkpoint in .demo/tiny or reuses
the one that is there, starts SGLang's own server with it, sends a completion and a chat request, each
twice, and prints the answers, the cached-token counts and the class that served them. Then it stops
the server.

  --keep             leave the server running, and print how to talk to it and how to stop it
  --checkpoint DIR   serve this checkpoint instead of the small one
  --port N           listen on this port of 127.0.0.1 (default: a free one)
  --help             show this

The small checkpoint has random weights, so its answers are nonsense: it shows the whole path from a
request to an answer, not what a trained model says. It runs on the CPU: this version has no GPU
kernels.

Exit codes: 0 everything worked, 1 something failed (the message says what), 2 wrong usage,
130 or 143 interrupted (the server is stopped then too).
END
}

keep=no
checkpoint=
port=
while (($# > 0)); do
    case $1 in
        --keep) keep=yes ;;
        --checkpoint | --port)
            if (($# < 2)); then usage >&2 && exit 2; fi
            if [[ $1 == --port ]]; then port=$2; else checkpoint=$2; fi
            shift
            ;;
        --help | -h) usage && exit 0 ;;
        *) printf 'error: unknown option %s; see --help\n' "$1" >&2 && exit 2 ;;
    esac
    shift
done
if [[ -n $port ]] && ! [[ $port =~ ^[1-9][0-9]{0,4}$ && $port -le 65535 ]]; then
    die "--port: expected a number from 1 to 65535, found '$port'"
fi
# Before anything changes folder, and before minutes are spent on the environment.
if [[ -n $checkpoint ]]; then
    [[ -f $checkpoint/config.json ]] || die "--checkpoint: $checkpoint has no config.json; name the folder of a checkpoint"
    checkpoint=$(cd "$checkpoint" && pwd)
fi

demo="$root/.demo"
ready_limit=600 # seconds
stop_limit=30
server=

stop_server() {
    [[ -n $server ]] || return 0
    local pid=$server waited=0
    server=
    if kill -0 "$pid" 2>/dev/null; then
        say "Stopping the server"
        kill -TERM "$pid" 2>/dev/null || true
        while kill -0 "$pid" 2>/dev/null && ((waited < stop_limit * 5)); do
            sleep 0.2
            waited=$((waited + 1))
        done
    fi
    # Its workers are in its group; one that it had just started may have missed the signal.
    kill -KILL -- "-$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
}
trap stop_server EXIT

# free_port [WANTED]: that one, or any, if nothing listens there now. Should somebody take it before
# the server does, the server says so.
free_port() {
    "$python" - "${1:-0}" 2>/dev/null <<'END'
import socket, sys

with socket.socket() as listener:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(sys.argv[1])))
    print(listener.getsockname()[1])
END
}

# Run by run_step.
# shellcheck disable=SC2329
make_checkpoint() {
    local partial="$demo/tiny.partial"
    # Made beside its final place and moved there, so that an interrupted run leaves no half checkpoint.
    rm -rf "$partial"
    "$venv/bin/sglang-dsv4" make-tiny "$partial" --preset tiny --names hf --dtype bfloat16 --seed 0
    rm -rf "$demo/tiny"
    mv "$partial" "$demo/tiny"
}

start_server() {
    local options=(
        --model-path "$checkpoint" --host 127.0.0.1 --port "$port"
        --skip-server-warmup --enable-cache-report
        --max-total-tokens 16384 --context-length 4096 --max-running-requests 8 --device cpu
    )
    : >"$log"
    # A session, and so a process group, of its own: Ctrl-C reaches this script only, which then
    # ends the whole group.
    setsid "$python" -m sglang.launch_server "${options[@]}" >>"$log" 2>&1 </dev/null &
    server=$!
}

answers() {
    "$python" -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1] + "/health", timeout=5)' "$url" 2>/dev/null
}

wait_until_ready() {
    local label="Starting the server (log: $log)" started=$SECONDS waited=0
    say "$label"
    while ! answers; do
        waited=$((SECONDS - started))
        if ! kill -0 "$server" 2>/dev/null; then
            end_progress "The server ended after $waited s. The end of its log:"
            tail -n 40 "$log" >&2
            die "the server did not start; the whole log is in $log"
        fi
        if ((waited >= ready_limit)); then
            end_progress "No answer after $waited s. The end of the log:"
            tail -n 40 "$log" >&2
            die "the server did not become ready within $ready_limit s; the whole log is in $log"
        fi
        show_progress "waiting" "$waited" "$(last_line "$log")"
        sleep 1
    done
    end_progress "  ready after $((SECONDS - started)) s at $url"
}

explain_how_to_talk() {
    cat <<END

The server is still running at $url (process $server, log $log).

With curl:
  curl -s $url/v1/completions -H 'Content-Type: application/json' \\
    -d '{"model": "default", "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}'

With the OpenAI client ($python):
  from openai import OpenAI
  client = OpenAI(base_url="$url/v1", api_key="none")
  reply = client.chat.completions.create(
      model="default", messages=[{"role": "user", "content": "Hello"}], max_tokens=16)
  print(reply.choices[0].message.content)

Ask the same again:
  $python $root/scripts/demo_client.py --url $url

Stop it:
  kill $server
END
}

bash "$root/scripts/env.sh" --cpu

# The server is reached directly, whatever proxy this machine uses for the rest.
export no_proxy="127.0.0.1${no_proxy:+,$no_proxy}" NO_PROXY="127.0.0.1${NO_PROXY:+,$NO_PROXY}"
export HF_HUB_OFFLINE=1
# With more OpenMP threads a model this small becomes many times slower, not faster.
export OMP_NUM_THREADS=1

mkdir -p "$demo"
if [[ -n $checkpoint ]]; then
    say "Checkpoint: $checkpoint"
else
    checkpoint="$demo/tiny"
    if [[ -f $checkpoint/config.json ]]; then
        say "Checkpoint: $checkpoint, from an earlier run"
    else
        say "Checkpoint: making $checkpoint"
        run_step "random weights and a tokenizer" "$demo/make-tiny.log" make_checkpoint
    fi
    say "  Its weights are random: what it says is nonsense. This shows the path, not a model."
fi

port=$(free_port "$port") || die "the port of --port is taken; choose another, or leave the option out"
url="http://127.0.0.1:$port"
log="$demo/server-$port.log"
start_server
wait_until_ready
status=0
"$python" "$root/scripts/demo_client.py" --url "$url" || status=$?

if [[ $keep == yes ]]; then
    explain_how_to_talk
    server=
else
    stop_server
fi
exit "$status"
