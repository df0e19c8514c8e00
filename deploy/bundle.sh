#!/usr/bin/env bash
# bundle.sh BIN DIR: gathers what BIN holds into DIR so that it runs on any
# x86-64 Linux with the C library of Debian 12 or newer: programs, libraries,
# the shared libraries they need, and the Python package.
set -euo pipefail
source "$(dirname "$0")/common.sh"
bin=$1 out=$2
[ -n "$out" ] || fail "--bundle needs a folder"
mkdir -p "$out/bin" "$out/lib" "$out/python"
for program in bellwetherd bellwether bellwether-sender; do
  install -s -m 755 "$bin/$program" "$out/bin/$program"
done
install -s -m 644 "$bin/libbellwether_client.so.0" "$out/bin/libbellwether_client.so"
install -s -m 644 "$bin/libbellwether_kernels.so" "$out/bin/libbellwether_kernels.so"
# Everything but the C library itself, which must be the machine's own.
ldd "$bin"/bellwetherd "$bin"/bellwether "$bin"/bellwether-sender |
  awk '/=> \//{print $3}' | sort -u |
  grep -vE '/(libc|libm|libdl|librt|libpthread|libresolv|ld-linux[^/]*)\.so' |
  while read -r library; do install -s -m 644 "$library" "$out/lib/$(basename "$library")"; done
rm -rf "$out/python/bellwether"
cp -r "$root/client_lib/python/bellwether" "$out/python/bellwether"
find "$out/python" -name __pycache__ -prune -exec rm -rf {} +
cat >"$out/README" <<END
Bellwether, ready to run: bin/bellwetherd serves, bin/bellwether asks it.
Python: PYTHONPATH=$(basename "$out")/python BELLWETHER_LIB_DIR=$(basename "$out")/bin
END
say "Bundle"
du -sm "$out" | awk '{print $1 " MiB in " $2}'
