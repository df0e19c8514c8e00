# common.sh: what ./start and ./check share.  Sourced by bash; sets `root`.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros CCACHE_MAXSIZE=${CCACHE_MAXSIZE:-5G}

say() { printf '\n== %s\n' "$*"; }
fail() {
  printf '\n%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# took WHAT: prints how long WHAT took since the last call, or since the script began.
took() {
  echo "   ($1: $((SECONDS - lap)) s, $SECONDS s since the start)"
  lap=$SECONDS
}
lap=0

# need_packages FILE: installs the Debian packages that FILE lists and that are
# missing.  A second word in a line is a command that does as well.
need_packages() {
  if ! command -v dpkg-query >/dev/null; then
    say "Not a Debian: taking what $(basename "$1") names for installed"
    return
  fi
  local missing=() package command
  while read -r package command _; do
    case $package in '' | '#'*) continue ;; esac
    [ -n "$command" ] && command -v "$command" >/dev/null && continue
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done <"$1"
  [ ${#missing[@]} -eq 0 ] && return
  say "Installing ${#missing[@]} Debian packages: ${missing[*]}"
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || fail "these packages are missing and neither root nor sudo is here to install them: ${missing[*]}"
    as_root=(sudo)
  fi
  "${as_root[@]}" apt-get update -qq || fail "apt-get update failed"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >"$root/build/apt.log" 2>&1 ||
    { tail -20 "$root/build/apt.log" >&2; fail "apt-get install failed; the end of build/apt.log is above"; }
}

# new_python: a virtual environment .venv, empty where there was none; cmake asks for it.
new_python() { [ -x "$root/.venv/bin/python" ] || python3 -m venv "$root/.venv" || fail "python3 -m venv failed"; }

# need_python FILE: a virtual environment .venv with what FILE pins.
need_python() {
  local stamp=$root/.venv/.installed-$(basename "$1")
  [ -f "$stamp" ] && [ ! "$1" -nt "$stamp" ] && return
  say "Preparing .venv from $(basename "$1") (large packages; this can take minutes)"
  new_python
  "$root/.venv/bin/python" -m pip install -q --disable-pip-version-check -r "$1" || fail "pip could not install what $1 lists"
  touch "$stamp"
}

# need_cuda: sets CUDACXX to the machine's nvcc, or else to one from NVIDIA's
# wheels in .venv.  Compiling needs no GPU.
need_cuda() {
  CUDACXX=$(command -v nvcc) || CUDACXX=$root/.venv/cuda/bin/nvcc
  export CUDACXX
  [ "$CUDACXX" = "$root/.venv/cuda/bin/nvcc" ] || return 0
  need_python "$root/deploy/requirements-cuda.txt"
  # What an installed toolkit has, and the wheels leave out.
  ln -sfn "$root"/.venv/lib/python3*/site-packages/nvidia/cu13 "$root/.venv/cuda"
  ln -sfn lib "$root/.venv/cuda/lib64"
  ln -sfn libcudart.so.13 "$root/.venv/cuda/lib/libcudart.so"
}

# configure PRESET [cmake arguments]: a folder that is new compiles several files as one, in half of the time;
# one that a developer has configured stays as it is.
configure() {
  local preset=$1
  shift
  [ -f "$root/build/$preset/CMakeCache.txt" ] || set -- -DCMAKE_UNITY_BUILD=ON "$@"
  (cd "$root" && cmake --preset "$preset" "$@") >"$root/build/configure-$preset.log" 2>&1 ||
    { grep -A12 'CMake Error' "$root/build/configure-$preset.log" >&2; fail "cmake could not configure; see build/configure-$preset.log"; }
}

# build PRESET [targets]
build() {
  local preset=$1
  shift
  cmake --build "$root/build/$preset" --target "${@:-all}" || fail "the build failed; the compiler's words are above"
}
mkdir -p "$root/build"
