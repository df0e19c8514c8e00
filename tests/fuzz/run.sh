#!/usr/bin/env bash
# Fuzzes every target with libFuzzer under AddressSanitizer and
# UndefinedBehaviorSanitizer; stops at the first report.
#
#   tests/fuzz/run.sh [seconds for each target: 600] [target...]
#
# Needs Debian's clang-16 and libclang-rt-16-dev.  What is found new grows under
# build/fuzz/corpus and is not committed; an input that broke a target lies beside
# it as crash-*, and runs again by: build/fuzz/bin/fuzz_TARGET FILE
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/deploy/common.sh"
seconds=${1:-600}
shift || true
need_packages "$root/deploy/packages-clang.txt"
cd "$root"
configure fuzz
cmake --build build/fuzz -j"$(nproc)" --target fuzzers
targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(ls tests/fuzz/corpus)
# Debian's protobuf is not instrumented: containers that it fills look overflowed.
export ASAN_OPTIONS=detect_container_overflow=0:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
for target in "${targets[@]}"; do
  say "Fuzzing $target for $seconds s"
  found=build/fuzz/corpus/$target
  mkdir -p "$found"
  build/fuzz/bin/fuzz_"$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=65536 \
    -print_final_stats=1 -artifact_prefix="$found/../$target-" "$found" "tests/fuzz/corpus/$target" 2>&1 |
    grep -vE '^#[0-9]+[[:space:]]+(NEW|REDUCE|pulse)' || fail "$target: see above"
done
say "No report in $seconds s for each of: ${targets[*]}"
