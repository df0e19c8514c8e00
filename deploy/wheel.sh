#!/usr/bin/env bash
# wheel.sh BIN DIR: makes a wheel of the Python package in DIR, with the programs and libraries of BIN
# inside: pip install it, and attach() has a server of its own; nothing else is needed but PyTorch.
# Its tag is the oldest C library that all of it runs with, so that pip refuses it elsewhere.
set -euo pipefail
source "$(dirname "$0")/common.sh"
bin=$1 out=$2
need_python "$root/deploy/requirements-wheel.txt"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$root/deploy/bundle.sh" "$bin" "$work/bundle" >"$work/log" || fail "the bundle failed: $(cat "$work/log")"
newest=$(sed -nE 's/^Runs with glibc ([0-9.]+) or newer\.$/\1/p' "$work/log")
[ -n "$newest" ] || fail "bundle.sh did not say which glibc is needed: $(cat "$work/log")"
platform=manylinux_${newest//./_}_$(uname -m)
mkdir -p "$out"
out=$(cd "$out" && pwd)
# The time of the newest commit, so that the same sources give the same wheel.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct 2>/dev/null || echo 315532800)}
export SOURCE_DATE_EPOCH BELLWETHER_BUNDLE=$work/bundle BELLWETHER_PLATFORM=$platform
(cd "$root/client_lib/python" && "$root/.venv/bin/python" -m hatchling build -t wheel -d "$out") >"$work/log" 2>&1 ||
  fail "hatchling failed: $(cat "$work/log")"
say "Wheel"
du --apparent-size -k "$out"/bellwether-*-py3-none-"$platform".whl | awk '{printf "%6.1f MiB  %s\n", $1 / 1024, $2}'
