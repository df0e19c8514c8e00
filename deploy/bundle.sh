#!/usr/bin/env bash
# bundle.sh BIN DIR: gathers what BIN holds into DIR so that it runs on any
# x86-64 Linux with the C library of Debian 12 or newer:
#   bin/       bellwetherd, bellwether, bellwether-lab, bellwether-sender, and the libraries that a trainer loads
#   lib/       the shared libraries that the programs need, all but the C library
#   python/    the Python package; it finds bin/ by itself
#   licenses/  of what is not ours
# gRPC, Protobuf and OpenSSL are in lib/ once for all programs: linked into
# each they would take 10 MiB more.
set -euo pipefail
source "$(dirname "$0")/common.sh"
bin=$1 out=$2
# Nothing but an earlier bundle is replaced.
if [ -n "$(ls -A "$out" 2>/dev/null)" ] && [ ! -f "$out/.bellwether-bundle" ]; then
  fail "$out holds something that is not a bundle of ours; name a new folder"
fi
mkdir -p "$out/"
rm -rf "${out:?}"/{bin,lib,python,licenses}
mkdir "$out"/{bin,lib,python,licenses}
touch "$out/.bellwether-bundle"

for program in bellwetherd bellwether bellwether-lab bellwether-sender; do
  install -s -m 755 "$bin/$program" "$out/bin/$program"
done
install -s -m 644 "$bin/libbellwether_client.so.0" "$bin/libbellwether_kernels.so" "$out/bin/"
# The detectors on GPUs, which a build without CUDA has not got.
if [ -f "$bin/libbellwether_bank.so" ]; then
  install -s -m 644 "$bin/libbellwether_bank.so" "$out/bin/"
fi
ln -s libbellwether_client.so.0 "$out/bin/libbellwether_client.so"
cp -r "$root/client_lib/python/bellwether" "$out/python/"
find "$out/python" -name __pycache__ -prune -exec rm -rf {} +

# The C library must be the machine's own: it belongs to the kernel and to the
# name services there.
glibc='/(ld-linux-x86-64|libc|libm|libdl|librt|libpthread|libresolv)\.so'
needed=$(ldd "$out"/bin/{bellwetherd,bellwether,bellwether-lab,bellwether-sender})
if missing=$(grep 'not found' <<<"$needed"); then
  fail "a library is missing here: $missing"
fi
awk '/=> \//{print $3}' <<<"$needed" | sort -u | grep -vE "$glibc" | while read -r library; do
  install -m 644 "$library" "$out/lib/"
done
# Shared, linked in (RocksDB and what its archive needs), or only headers.
{
  ls "$out/lib" | sed 's,^,*/,' | xargs dpkg -S
  grep -- '-dev' "$root/deploy/packages-build.txt"
  dpkg-query -W -f '${Depends}' librocksdb-dev | grep -oE 'lib[a-z0-9]+-dev'
} 2>/dev/null | cut -d: -f1 | sort -u | while read -r package; do
  cp "/usr/share/doc/$package/copyright" "$out/licenses/$package" 2>/dev/null || true
done
cp "$root/LICENSE" "$out/licenses/bellwether"

cat >"$out/README" <<'END'
Bellwether, ready to run on x86-64 Linux.

  bin/bellwetherd --storage.path=DATA      serves: page on port 7071, gRPC on 7070, both on loopback
  bin/bellwether run list                  asks it
  PYTHONPATH=THIS_FOLDER/python BELLWETHER_SERVER=127.0.0.1:7070 python train.py
                                           a training script that calls bellwether.attach(model)
END
newest=$(objdump -T "$out"/bin/* "$out"/lib/* 2>/dev/null | grep -oE 'GLIBC_2\.[0-9]+' | sort -uV | tail -1)
say "Bundle"
du --apparent-size -sck "$out"/bin/* "$out/lib" "$out/python" "$out/licenses" |
  awk '{printf "%6.1f MiB  %s\n", $1 / 1024, $2}'
echo "Runs with glibc ${newest#GLIBC_} or newer."
