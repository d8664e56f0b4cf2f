#!/usr/bin/env bash
# Runs all tests: unit, integration and documentation tests, with every feature.
#
# The tests start what they need themselves, on free loopback ports. Anything after the name of this
# script goes to cargo, e.g. `tests/run.sh --test promises`.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\n== %s\n' "$*"; }

# Some dependencies have build scripts in C.
if ! command -v cc >/dev/null; then
    say "installing a C compiler"
    sudo=$([ "$(id -u)" = 0 ] || echo sudo)
    $sudo apt-get update -qq
    $sudo apt-get install -y -qq gcc libc6-dev
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
