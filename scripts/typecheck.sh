#!/usr/bin/env bash
# Type-checks the package in its installed shape: checkers cannot follow setuptools' import hook, so
# build/view holds links in that shape (attention/ and moe/ inside sglang_dsv4/).
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

cd "$root"
view=build/view
rm -rf "$view"
mkdir -p "$view"
cp -rs "$root/sglang_dsv4" "$view/"
cp -rs "$root/attention" "$root/moe" "$view/sglang_dsv4/"
"$python" -m mypy
"$python" -m mypy scripts/*.py
