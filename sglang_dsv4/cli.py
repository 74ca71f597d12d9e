"""The console command `sglang-dsv4`: subcommands, exit codes, and errors as sentences."""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from sglang_dsv4 import (
    __version__,
    cli_bench,
    cli_convert,
    cli_demo,
    cli_doctor,
    cli_graph_check,
    cli_inspect,
    cli_make_tiny,
    cli_precision,
    cli_warm,
)
from sglang_dsv4.config import ConfigError
from sglang_dsv4.nano_demo_server import UsageError
from sglang_dsv4.settings import SettingsError

BAD_INPUT = 2
INTERRUPTED = 130

_EPILOG = """\
examples:
  sglang-dsv4 demo                        serve a small trained model, and ask it
  sglang-dsv4 doctor                      what is installed, what is missing, how to get it
  sglang-dsv4 doctor /models/v4 --json    the same as JSON, with a check of a checkpoint
  sglang-dsv4 inspect /models/v4          what it holds and needs, and whether it can be served
  sglang-dsv4 graph-check                 prove that a decode step can be one CUDA graph
  sglang-dsv4 precision                   what NVFP4 would cost in head, router and compressors
  sglang-dsv4 bench                       time our ops and a decode step
  sglang-dsv4 warm --config flash         compile the kernels before a server needs them
  sglang-dsv4 make-tiny /tmp/tiny         a small random checkpoint, to try the server with
  sglang-dsv4 convert /models/v4 OUT      rewrite a checkpoint in NVFP4
  python -m sglang.launch_server --model-path /tmp/tiny --device cpu --max-total-tokens 16384

exit codes:
  0    all went well
  1    a check failed (doctor, inspect, graph-check), a kernel could not be built (warm) or
       timed (bench), or the server or an answer is not as expected (demo)
  2    the command line or what it names cannot be used
  130  interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ConfigError, SettingsError, UsageError, OSError) as error:
        print(f"sglang-dsv4: error: {error}", file=sys.stderr)
        if arguments.json:
            print(json.dumps({"error": str(error)}))
        return BAD_INPUT
    except KeyboardInterrupt:
        print("sglang-dsv4: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-dsv4",
        description="Tools of the SGLang plugin that serves DeepSeek-V4.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sglang-dsv4 {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in (
        *(cli_demo, cli_make_tiny, cli_convert, cli_doctor, cli_graph_check),
        *(cli_inspect, cli_precision, cli_warm, cli_bench),
    ):
        command = module.add_parser(commands)
        command.add_argument("--json", action="store_true", help="print one JSON object on stdout")
        command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
